"""Blocks to numbers: w = dequantise(blocks), as llama.cpp's own `to_float` computes it.

Embedding rows, norm weights and tests come through here; matrix products use `dequantize_rows`, which writes into the
workspace.
"""

from functools import cache

import torch

from pyggtrain import _bridge
from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.ops.operation import operation

# These are stored as plain numbers: a view of the mapping, or torch's own conversion, is faster than a decoder.
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@cache
def block_sizes() -> dict[str, tuple[int, int]]:
    """ggml type name -> (weights in a block, bytes in a block)."""
    return {name: (type.block_size, type.block_bytes) for name, type in _bridge.quant_types().items()}


def num_columns(blocks: torch.Tensor, type: str) -> int:
    """Weights in one row of `blocks` (uint8 [..., row_bytes])."""
    block_size, block_bytes = block_sizes()[type]
    return blocks.shape[-1] // block_bytes * block_size


def dequantize_rows(blocks: torch.Tensor, type: str, out: torch.Tensor) -> None:
    """Write the rows `blocks` (uint8 [N, row_bytes]) as numbers into `out` [N, K].

    On the CPU `out` is float32 and contiguous. On a GPU it is of any float dtype and its rows may lie any distance
    apart.
    """
    if type in FLOAT_TYPES:
        out.copy_(blocks.view(FLOAT_TYPES[type]))
    elif not out.is_cuda:
        _bridge.dequantize(type, blocks, out, torch.get_num_threads())
    else:
        from pyggtrain.kernels.dequant import dequantize as decode

        decode(blocks.contiguous(), type, out=out)


@operation("dequantize")
def _dequantize(blocks: torch.Tensor, type: str) -> torch.Tensor:
    out = torch.empty(blocks.shape[0], num_columns(blocks, type), dtype=torch.float32, device=blocks.device)
    dequantize_rows(blocks, type, out)
    return out


@_dequantize.register_fake
def _(blocks: torch.Tensor, type: str) -> torch.Tensor:
    return blocks.new_empty(blocks.shape[0], num_columns(blocks, type), dtype=torch.float32)


def dequantize(weight: QuantTensor, *, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> torch.Tensor:
    """The numbers that a quantised tensor stands for.

    Args:
        weight: blocks with logical shape [..., K].
        dtype: of the result. Decoding is in float32 whatever is asked for.
        rows: only these rows of the weight, counted over all leading dimensions. None: all of it, in its own shape.

    Returns:
        [..., K], or [number of rows, K] if `rows` is given. A new tensor, never a view of the file.
    """
    blocks = weight.blocks.reshape(-1, weight.row_bytes)
    if rows is not None:
        values: torch.Tensor = _dequantize(blocks[rows], weight.type)
        return values.to(dtype)
    values = _dequantize(blocks, weight.type)
    return values.view(weight.shape).to(dtype)
