"""Products with a quantised weight W [N, K]: y = x Wᵀ and dx = dy W, without autograd. The ops build on them.

Two ways to compute y on a CPU:

* "exact": rows of W are dequantised into the workspace, a chunk at a time, and torch multiplies in float32. This is the
  mathematics that backward differentiates.
* "ggml": llama.cpp's own kernel, which first rounds x to 8-bit blocks (0.5-0.7 % relative, `docs/numerics.md`). It is
  what llama-server will compute, and for some types the faster one. Backward treats the rounding of x as identity.

dx is always exact: ggml's `out_prod` decodes every row again for every row of dy (6-27 times slower, measured).

Ways on a GPU (`product_choice` measures which is fastest where):

* "bf16": rows are decoded by our own kernels straight into the dtype of the product, and the library multiplies. Above
  a few hundred tokens that beats products on packed integers on a data-centre card (docs/performance.md).
* "fused": decoded on the way into the matrix units, for few rows (`kernels/dequant_matmul`).
* "mmq": llama.cpp's kernels, x in 8 bits, in builds with CUDA (`ops/mmq`). Forward; its backward is one of the others.

x in bfloat16 or float16 is multiplied as it is, with float32 sums; x in float32 is rounded to bfloat16 first unless
compute is "exact". 8-bit floats ("fp8") are for the halves of a layer that run as one operation
(`ops/fused/linear_group`); a product by itself, such as the head's, is computed as with "auto".
"""

from collections.abc import Iterator
from functools import partial

import torch

from pyggtrain import _bridge
from pyggtrain.ops import mmq, product_choice, workspace
from pyggtrain.ops.dequantize import FLOAT_TYPES, dequantize_rows
from pyggtrain.ops.dequantize import num_columns as columns_of

COMPUTE = ("auto", "exact", "ggml", "bf16", "fused", "mmq", "fp8")
GPU_COMPUTE = ("bf16", "fused", "mmq", "fp8")
HALF_DTYPES = (torch.bfloat16, torch.float16)

# Below this many rows decoding W costs more than the product, and ggml's kernels decode in registers.
FEW_ROWS = 32
# Decoding Q1_0 is slow: ggml is 6 times faster at 32 rows and still twice at 128 (docs/gguf.md).
FEW_ROWS_OF = {"Q1_0": 256}

# Types with a tiled kernel in ggml (ggml-cpu/tiled): at 512 rows 1.1-1.7 times faster than decoding + torch with AVX2,
# 2.5 times with AVX-512. The other block types are level or slower there (Q4_1 and Q5_1 by half), so they take the
# exact way.
TILED_TYPES = frozenset(
    [
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
    ]
)

# ggml multiplies these with plain scalar code, 3 times slower than decoding at 8 rows and 20 times at 256.
SCALAR_TYPES = frozenset({"Q2_0"})


def chosen_compute(compute: str, type: str, num_rows: int, dtype: torch.dtype) -> str:
    """What "auto" means for x [num_rows, K] of `dtype`: "exact" or "ggml"."""
    if compute != "auto":
        return compute
    if type in FLOAT_TYPES or type in SCALAR_TYPES or dtype != torch.float32:
        return "exact"
    return "ggml" if num_rows < FEW_ROWS_OF.get(type, FEW_ROWS) or type in TILED_TYPES else "exact"


def check(x: torch.Tensor, num_columns: int, compute: str) -> None:
    """Raise ValueError unless x is float32 or float64 [T, num_columns] and `compute` is known."""
    if compute not in COMPUTE:
        raise ValueError(f"compute={compute!r}: needed one of {', '.join(COMPUTE)}")
    if x.dim() != 2 or x.shape[1] != num_columns:
        raise ValueError(f"x has shape {tuple(x.shape)}: needed [T, {num_columns}], the weight's row length")
    if x.dtype not in (torch.float32, torch.float64) and not (x.is_cuda and x.dtype in HALF_DTYPES):
        raise ValueError(f"x is {x.dtype} on {x.device}: needed float32 (float64 for references, half types on a GPU)")
    if compute == "ggml" and (x.dtype != torch.float32 or x.is_cuda):
        raise ValueError(f"compute='ggml' takes float32 on the CPU, x is {x.dtype} on {x.device}")
    if compute in GPU_COMPUTE and not x.is_cuda:
        raise ValueError(f"compute={compute!r} is for a GPU, x is on {x.device}")


def product_dtype(x: torch.Tensor, compute: str) -> torch.dtype:
    """What x and the rows of W are multiplied in."""
    return torch.bfloat16 if x.is_cuda and x.dtype == torch.float32 and compute != "exact" else x.dtype


def _chunks(
    blocks: torch.Tensor, type: str, num_columns: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (first row, end row, rows of W as [n, K] in `dtype`), each valid until the next one is asked for."""
    num_rows = blocks.shape[0]
    if type == "F32" and dtype == torch.float32:
        # Stored as torch wants it: no copy, no chunk.
        yield 0, num_rows, blocks.view(torch.float32)
        return
    decoded = dtype if blocks.is_cuda and dtype in HALF_DTYPES else torch.float32
    step = workspace.rows_per_chunk(num_rows, num_columns, decoded, blocks.device.type)
    for first in range(0, num_rows, step):
        end = min(first + step, num_rows)
        chunk = workspace.rows(end - first, num_columns, blocks.device, decoded)
        dequantize_rows(blocks[first:end], type, chunk)
        yield first, end, chunk.to(dtype)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
    """out = a b, or out += a b; a and b are half precision where `out` may be float32."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=float(accumulate), out=out)
    elif accumulate:
        out += torch.mm(a, b, out_dtype=out.dtype)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def forward(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    compute: str,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """y = x Wᵀ, or y += x Wᵀ.

    A sum that ends in a product costs less than a product followed by sums: the product adds to what is there while it
    is in registers. So callers write first what shall be added, and let the product come last.

    Args:
        x: [T, K] float32 or float64, on a GPU also half precision.
        blocks: uint8 [N, row_bytes] of `type`.
        compute: one of COMPUTE.
        out: [T, N], rows any distance apart, to write or add to; None allocates.
        accumulate: add to what `out` holds.

    Returns:
        `out`.
    """
    y = x.new_empty(x.shape[0], blocks.shape[0]) if out is None else out
    if x.is_cuda:
        x = x.to(product_dtype(x, compute))
        way = _way("forward", x, blocks, type, compute)
        return _forward_on_gpu(way, x, blocks, type, y, accumulate)
    if chosen_compute(compute, type, x.shape[0], x.dtype) == "ggml":
        is_direct = not accumulate and y.is_contiguous()
        product = y if is_direct else torch.empty(y.shape, dtype=y.dtype, device=y.device)
        # An operation sees its inputs as they are, and a tensor that wants a gradient cannot be lent to the bridge.
        _bridge.mul_mat(type, blocks, x.detach().contiguous(), product, torch.get_num_threads())
        if accumulate:
            y.add_(product)
        elif not is_direct:
            y.copy_(product)
        return y
    return _decoded_forward(x, blocks, type, y, accumulate)


def backward(
    dy: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    compute: str = "auto",
    out: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """dx = dy W, or dx += dy W: the exact Jacobian of the dequantised weight.

    Args:
        dy: [T, N].
        blocks: uint8 [N, row_bytes] of `type`.
        compute: one of COMPUTE; matters on a GPU only.
        out: [T, K], to write or add to.
        accumulate: add to what `out` holds.

    Returns:
        `out`.
    """
    dy = dy.to(product_dtype(dy, compute))
    if dy.is_cuda and _way("backward", dy, blocks, type, compute) == "fused":
        return _fused("backward", dy, blocks, type, out, accumulate)
    return _decoded_backward(dy, blocks, type, out, accumulate)


def _decoded_forward(
    x: torch.Tensor, blocks: torch.Tensor, type: str, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    for first, end, w in _chunks(blocks, type, x.shape[1], x.dtype):
        _multiply(x, w.t(), out[:, first:end], accumulate=accumulate)
    return out


def _decoded_backward(
    dy: torch.Tensor, blocks: torch.Tensor, type: str, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    for first, end, w in _chunks(blocks, type, out.shape[1], dy.dtype):
        _multiply(dy[:, first:end], w, out, accumulate=accumulate or first > 0)
    return out


def _fused(
    direction: str, x: torch.Tensor, blocks: torch.Tensor, type: str, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    from pyggtrain.kernels.dequant_matmul import dequant_matmul_backward, dequant_matmul_forward

    product = dequant_matmul_forward if direction == "forward" else dequant_matmul_backward
    x = x if x.stride(1) == 1 else x.contiguous()
    return product(x, blocks.contiguous(), type, out=out, accumulate=accumulate)


def _forward_on_gpu(
    way: str, x: torch.Tensor, blocks: torch.Tensor, type: str, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    if way == "fused":
        return _fused("forward", x, blocks, type, out, accumulate)
    if way == "bf16":
        return _decoded_forward(x, blocks, type, out, accumulate)
    if out.dtype == torch.float32 and not accumulate:
        return mmq.forward(x, blocks.contiguous(), type, out=out)
    product = mmq.forward(x, blocks.contiguous(), type)
    return out.add_(product) if accumulate else out.copy_(product)


def _way(direction: str, x: torch.Tensor, blocks: torch.Tensor, type: str, compute: str) -> str:
    """How a GPU multiplies x: "bf16", "fused" or "mmq". Called for every product: few rows aside, a few comparisons."""
    if type in FLOAT_TYPES or compute in ("exact", "bf16") or x.dtype not in HALF_DTYPES or x.shape[0] == 0:
        return "bf16"
    num_columns = columns_of(blocks, type)
    if compute == "mmq" and not mmq.takes(type, num_columns):
        raise ValueError(
            f"compute='mmq' cannot multiply {type} with rows of {num_columns}: needed a multiple of {mmq.COLUMN_STEP} "
            f"and one of {', '.join(sorted(mmq.types())) or 'no type, as this build has no MMQ'}"
        )
    if compute == "fused" or (compute == "mmq" and direction == "forward"):
        return compute
    names = ["bf16"]
    if x.shape[0] <= product_choice.MAX_FUSED_ROWS:
        names.append("fused")
    if direction == "forward" and compute in ("auto", "fp8") and mmq.takes(type, num_columns):
        names.append("mmq")
    if len(names) == 1:
        return "bf16"
    product = product_choice.Product(
        direction,
        type,
        blocks.shape[0],
        num_columns,
        str(x.dtype).removeprefix("torch."),
        product_choice.class_of(x.shape[0]),
    )
    return product_choice.choose(
        product, {name: partial(_once, name, direction, x, blocks, type, num_columns) for name in names}, x.device
    )


def _once(
    name: str, direction: str, x: torch.Tensor, blocks: torch.Tensor, type: str, num_columns: int
) -> torch.Tensor:
    """The product, for measuring."""
    if direction == "forward":
        return _forward_on_gpu(name, x, blocks, type, x.new_empty(x.shape[0], blocks.shape[0]), False)
    multiply = _decoded_backward if name == "bf16" else partial(_fused, "backward")
    return multiply(x, blocks, type, x.new_empty(x.shape[0], num_columns), False)


def start_of(bias_N: torch.Tensor | None, residual_TN: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    """bias + residual as a new [T, N] tensor that a product may be added to; None if there is neither."""
    if residual_TN is not None:
        return residual_TN.clone() if bias_N is None else residual_TN + bias_N
    return None if bias_N is None else bias_N.repeat(num_tokens, 1)
