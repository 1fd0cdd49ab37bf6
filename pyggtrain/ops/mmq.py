"""llama.cpp's MMQ on torch's memory and stream: products with packed blocks on a GPU's 8-bit integer matrix units.

    y [T, N] = x Wᵀ          y [T, J, N] = x [T, J or 1, K] W[ids]ᵀ

x is rounded to 8 bits in blocks of 32 or 64 (0.5-1.6 % relative, docs/numerics.md), as llama.cpp does on the same card
at inference. In builds with CUDA only (`-Ccmake.define.PYGGTRAIN_CUDA=ON`). Nothing waits for the card and memory comes
from torch's allocator, so calls can be captured in a CUDA graph.
"""

from functools import cache

import torch

from pyggtrain import _bridge
from pyggtrain.ops.dequantize import block_sizes

# MMQ walks over K in steps of this many weights, and a last step that is not full would read beyond the weight.
COLUMN_STEP = 256


@cache
def types() -> frozenset[str]:
    """Types that can be multiplied; none in a build without CUDA."""
    return frozenset(_bridge.mmq_types())


def takes(type: str, num_columns: int) -> bool:
    """Whether a weight with rows of `num_columns` can be multiplied."""
    return type in types() and num_columns % COLUMN_STEP == 0


def forward(x_TK: torch.Tensor, blocks: torch.Tensor, type: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """y = x Wᵀ.

    Args:
        x_TK: floats on a GPU; other than float32 is converted first.
        blocks: uint8 [N, row_bytes] of `type` without gaps, on the same GPU.
        out: float32 [T, N] with unit column stride, made if None.

    Returns:
        `out`.

    Raises:
        BridgeError: no MMQ in this build, or none for this type, K or card.
    """
    num_columns = _columns(blocks, type)
    num_tokens, num_rows = x_TK.shape[0], blocks.shape[0]
    x_TK = _lendable(x_TK, (num_tokens, num_columns), blocks)
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=x_TK.device)
    elif out.shape != (num_tokens, num_rows) or out.dtype != torch.float32 or out.stride(1) != 1:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}; needed: float32 "
            f"[{num_tokens}, {num_rows}] with unit column stride."
        )
    device = _index(x_TK.device)
    workspace = _workspace(
        _bridge.mmq_workspace_bytes(
            type, num_rows=num_rows, num_columns=num_columns, num_tokens=num_tokens, device=device
        ),
        x_TK.device,
    )
    _bridge.mmq(
        type,
        blocks=blocks.data_ptr(),
        num_rows=num_rows,
        num_columns=num_columns,
        x=x_TK.data_ptr(),
        x_stride=num_columns,
        num_tokens=num_tokens,
        y=out.data_ptr(),
        y_stride=max(out.stride(0), num_rows),
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        device=device,
        stream=torch.cuda.current_stream(x_TK.device).cuda_stream,
    )
    return out


def experts_forward(x_TIK: torch.Tensor, blocks: torch.Tensor, type: str, ids_TJ: torch.Tensor) -> torch.Tensor:
    """y[t, j] = x[t, j] W[ids[t, j]]ᵀ.

    Args:
        x_TIK: floats [T, J, K], or [T, 1, K] where all experts of a token read one row.
        blocks: uint8 [E, N, row_bytes] of `type` without gaps.
        ids_TJ: integers in 0..E-1, an expert at most once per token. Not looked at on the host: others read anywhere.

    Returns:
        y [T, J, N], float32.

    Raises:
        BridgeError: as `forward`.
    """
    num_columns = _columns(blocks, type)
    (num_tokens, num_used), (num_experts, num_rows) = ids_TJ.shape, blocks.shape[:2]
    num_inputs = x_TIK.shape[1]
    x_TIK = _lendable(x_TIK, (num_tokens, num_inputs, num_columns), blocks)
    ids_TJ = ids_TJ.to(torch.int32).contiguous()
    if ids_TJ.device != x_TIK.device:
        raise ValueError(f"ids are on {ids_TJ.device}; needed: on {x_TIK.device}, where x is.")
    y_TJN = torch.empty(num_tokens, num_used, num_rows, dtype=torch.float32, device=x_TIK.device)
    device = _index(x_TIK.device)
    workspace = _workspace(
        _bridge.mmq_experts_workspace_bytes(
            type,
            num_experts=num_experts,
            num_rows=num_rows,
            num_columns=num_columns,
            num_inputs=num_inputs,
            num_tokens=num_tokens,
            num_used=num_used,
            device=device,
        ),
        x_TIK.device,
    )
    _bridge.mmq_experts(
        type,
        blocks=blocks.data_ptr(),
        num_experts=num_experts,
        num_rows=num_rows,
        num_columns=num_columns,
        x=x_TIK.data_ptr(),
        num_inputs=num_inputs,
        num_tokens=num_tokens,
        ids=ids_TJ.data_ptr(),
        num_used=num_used,
        y=y_TJN.data_ptr(),
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.numel(),
        device=device,
        stream=torch.cuda.current_stream(x_TIK.device).cuda_stream,
    )
    return y_TJN


def _columns(blocks: torch.Tensor, type: str) -> int:
    block_size, block_bytes = block_sizes()[type]
    if blocks.dtype != torch.uint8 or not blocks.is_contiguous() or blocks.shape[-1] % block_bytes:
        raise ValueError(
            f"blocks of {type} are {blocks.dtype} {list(blocks.shape)} with strides {blocks.stride()}; needed: uint8 "
            f"without gaps, rows of whole blocks of {block_bytes} bytes."
        )
    return blocks.shape[-1] // block_bytes * block_size


def _lendable(x: torch.Tensor, shape: tuple[int, ...], blocks: torch.Tensor) -> torch.Tensor:
    """x as MMQ reads it: float32, no gaps, on the GPU of the weight."""
    if x.shape != shape or not x.is_cuda or x.device != blocks.device or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}, blocks on {blocks.device}; "
            f"needed: floats {list(shape)} and both on one GPU."
        )
    x = x.detach().to(torch.float32).contiguous()
    # It is read 16 bytes at a time.
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _workspace(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
