"""8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa, largest 448) with a scale for each row, for products on 8-bit
matrix units.

    x[t, k] ≈ s[t] q[t, k],      s[t] = max_k |x[t, k]| / 448

`product` is  y[t, n] = s_x[t] s_w[n] Σ_k q_x[t, k] q_w[n, k]. Both factors need a scale for each of their rows that the
sum does not run along, and memory along the sum; so a weight is rounded once for forward (`quantize_rows`) and once,
turned around, for backward (`quantize_columns`). Rounding costs 2^-4 of each number at most; over a product of random
numbers 3.7 % of its norm (docs/performance.md). What divides by 448 is float32.
"""

import torch
import triton
import triton.language as tl

LARGEST = 448.0
DTYPE = torch.float8_e4m3fn


@triton.jit
def quantize_rows_kernel(p_x, p_q, p_scale, x_stride, K, LARGEST: tl.constexpr, BK: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_x = tl.load(p_x + o_t * x_stride + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    # a row of zeros has any scale
    largest = tl.maximum(tl.max(tl.abs(b_x), 0), 1e-30)
    tl.store(p_scale + o_t, largest / LARGEST)
    tl.store(p_q + o_t * K + o_k, (b_x * (LARGEST / largest)).to(p_q.dtype.element_ty), mask=o_k < K)


@triton.jit
def column_maximum_kernel(p_w, p_largest, w_stride, N, K, BN: tl.constexpr, BK: tl.constexpr):
    o_n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    m = (o_n < N) & (o_k < K)[None, :]
    b_w = tl.load(p_w + o_n.to(tl.int64) * w_stride + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    # a maximum does not depend on the order
    tl.atomic_max(p_largest + o_k, tl.max(tl.abs(b_w), 0), mask=o_k < K)


@triton.jit
def quantize_columns_kernel(
    p_w, p_q, p_largest, p_scale, w_stride, N, K, LARGEST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    m = (o_n < N)[:, None] & (o_k < K)[None, :]
    b_w = tl.load(p_w + o_n.to(tl.int64)[:, None] * w_stride + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    b_largest = tl.maximum(tl.load(p_largest + o_k, mask=o_k < K, other=1.0), 1e-30)
    if tl.program_id(0) == 0:
        tl.store(p_scale + o_k, b_largest / LARGEST, mask=o_k < K)
    b_q = tl.trans((b_w * (LARGEST / b_largest)[None, :]).to(p_q.dtype.element_ty))
    tl.store(p_q + o_k.to(tl.int64)[:, None] * N + o_n[None, :], b_q, mask=tl.trans(m))


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row with a scale of its own.

    Args:
        x: floats [T, K], columns side by side, rows any distance apart.

    Returns:
        q float8_e4m3fn [T, K] and the scales, float32 [T, 1].
    """
    _check("x", x)
    num_rows, num_columns = x.shape
    q = torch.empty(num_rows, num_columns, dtype=DTYPE, device=x.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        width = triton.next_power_of_2(num_columns)
        quantize_rows_kernel[(num_rows,)](
            x, q, scale, x.stride(0), num_columns, LARGEST=LARGEST, BK=width, num_warps=16 if width > 8192 else 4
        )
    return q, scale


def quantize_columns(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each column with a scale of its own, and turn the result around.

    Args:
        w: floats [N, K], columns side by side, rows any distance apart.

    Returns:
        q float8_e4m3fn [K, N] and the scales, float32 [K, 1].
    """
    _check("w", w)
    num_rows, num_columns = w.shape
    largest = torch.zeros(num_columns, dtype=torch.float32, device=w.device)
    q = torch.empty(num_columns, num_rows, dtype=DTYPE, device=w.device)
    scale = torch.empty(num_columns, 1, dtype=torch.float32, device=w.device)
    if num_rows:
        grid = (triton.cdiv(num_rows, MAXIMUM_ROWS), triton.cdiv(num_columns, MAXIMUM_COLUMNS))
        column_maximum_kernel[grid](w, largest, w.stride(0), num_rows, num_columns, BN=MAXIMUM_ROWS, BK=MAXIMUM_COLUMNS)
        grid = (triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE))
        quantize_columns_kernel[grid](
            w, q, largest, scale, w.stride(0), num_rows, num_columns, LARGEST=LARGEST, BN=TILE, BK=TILE
        )
    return q, scale


def product(
    x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x wᵀ of rounded factors on the matrix units of a GPU that has them (compute capability 8.9 and up).

    Args:
        x: q [T, K] and scales [T, 1].
        w: q [N, K] and scales [N, 1]; K and N are multiples of 16.
        out: bfloat16 [T, N] without gaps, made if None.

    Returns:
        `out`. Sums are float32, rounded once.
    """
    (q_x, scale_x), (q_w, scale_w) = x, w
    out = torch.empty(len(q_x), len(q_w), dtype=torch.bfloat16, device=q_x.device) if out is None else out
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; needed: no gaps between rows.")
    return torch._scaled_mm(
        q_x, q_w.t(), scale_a=scale_x, scale_b=scale_w.t(), out_dtype=torch.bfloat16, use_fast_accum=True, out=out
    )


def _check(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or not x.is_floating_point() or not 0 < x.shape[1] <= MAX_COLUMNS:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {x.stride()}; "
            f"needed: floats [rows, 1 to {MAX_COLUMNS}] with unit column stride."
        )


# a row is held in registers
MAX_COLUMNS = 65536
MAXIMUM_ROWS = 128
MAXIMUM_COLUMNS = 128
TILE = 64
