"""Low-rank adapters beside a quantised linear: y = x Wᵀ + s (x Aᵀ) Bᵀ, A [R, K], B [N, R]   (Hu et al. 2021, eq. 3)

Added afterwards, the low-rank term costs a pass over y that takes as long as a sixth of the matrix product itself
(H200, R = 16: 0.20 ms after 1.2 ms). Instead the dequantisation workspace is made a little larger, and one matrix
product does both. For linears that share x (q, k and v; gate and up) with weights W, ranks and products stacked:

        E = [ W   s B* ]  N rows           y      = [x | x Aᵀ] E[:N]ᵀ
            [ A    .   ]  P rows           dy s B = dy E[:N, K:]
              K     P  columns             dx     = [dy | dy s B] E[:, :K]

B* is block diagonal, one block of R columns per linear; P >= the sum of ranks is padded with zeros so that rows of E
start at 128-byte borders (H200: K + 64 columns cost 0-2 % over K, K + 16 up to 4 %). The bottom right corner is never
read.

Gradients, s dy B =: dyb [T, R], xa = x Aᵀ [T, R] saved by forward, B A never formed:

    dB = s dyᵀ xa       dA = dybᵀ x       dx = dy W + dyb A

Products of bfloat16 accumulate in float32; dA and dB leave in float32, as the adapters' masters are.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def lora_extend_kernel(
    p_extended,
    p_a,
    p_b,
    extended_stride,
    N,
    K,
    second_row,
    third_row,
    scale,
    num_pairs,
    R: tl.constexpr,
    P: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    NUM_A_PROGRAMS: tl.constexpr,
):
    # the two branches keep to names of their own: Triton wants one shape per name
    if tl.program_id(0) < NUM_A_PROGRAMS:
        # bottom rows: A, then zeros
        o_row = tl.arange(0, P)[:, None]
        o_k = tl.program_id(0) * BK + tl.arange(0, BK)[None, :]
        b_a = tl.load(p_a + o_row.to(tl.int64) * K + o_k, mask=(o_row < num_pairs * R) & (o_k < K), other=0.0)
        tl.store(
            p_extended + (N + o_row).to(tl.int64) * extended_stride + o_k,
            b_a.to(p_extended.dtype.element_ty),
            mask=o_k < K,
        )
    else:
        # right columns: s B on the diagonal of pairs, zeros elsewhere
        o_n = (tl.program_id(0) - NUM_A_PROGRAMS) * BN + tl.arange(0, BN)[:, None]
        o_column = tl.arange(0, P)[None, :]
        pair = (o_n >= second_row).to(tl.int32) + (o_n >= third_row).to(tl.int32)
        m_b = (o_n < N) & (o_column // R == pair)
        b_b = tl.load(p_b + o_n.to(tl.int64) * R + o_column % R, mask=m_b, other=0.0).to(tl.float32) * scale
        p_right = p_extended + o_n.to(tl.int64) * extended_stride + K + o_column
        tl.store(p_right, b_b.to(p_extended.dtype.element_ty), mask=o_n < N)


def lora_extend_(
    extended: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, *, row_counts: tuple[int, ...], scale: float
) -> None:
    """Write A and s B* around the weights in `extended` (E above); the weights themselves are left alone.

    Args:
        extended: [N + P, K + P], columns side by side, P a power of two of at least R times the number of linears.
        lora_a: [R * number of linears, K], contiguous, one linear's A after the other.
        lora_b: [N, R], contiguous, one linear's B after the other.
        row_counts: rows of each linear, at most three; their sum is N.
        scale: s = alpha / R.
    """
    num_rows, rank = lora_b.shape
    width = lora_a.shape[1]
    padded = extended.shape[1] - width
    if len(row_counts) > 3 or sum(row_counts) != num_rows or lora_a.shape[0] != rank * len(row_counts):
        raise ValueError(
            f"lora_a is {list(lora_a.shape)} and lora_b {list(lora_b.shape)} for linears of {row_counts} rows; "
            f"needed: one A of {rank} rows for each of at most three linears, and B rows that add up."
        )
    if (
        extended.shape[0] != num_rows + padded
        or padded < lora_a.shape[0]
        or padded & (padded - 1)
        or extended.stride(1) != 1
    ):
        raise ValueError(
            f"extended is {list(extended.shape)}; needed: [{num_rows} + P, {width} + P], "
            f"P a power of two and at least {lora_a.shape[0]}."
        )
    if not (lora_a.is_contiguous() and lora_b.is_contiguous()):
        raise ValueError("lora_a or lora_b has gaps between its rows; needed: contiguous tensors.")
    starts = [sum(row_counts[:i]) for i in range(1, len(row_counts))] + [num_rows, num_rows]
    num_a_programs = triton.cdiv(width, EXTEND_COLUMNS)
    lora_extend_kernel[(num_a_programs + triton.cdiv(num_rows, EXTEND_ROWS),)](
        extended,
        lora_a,
        lora_b,
        extended.stride(0),
        num_rows,
        width,
        starts[0],
        starts[1],
        scale,
        len(row_counts),
        R=rank,
        P=padded,
        BK=EXTEND_COLUMNS,
        BN=EXTEND_ROWS,
        NUM_A_PROGRAMS=num_a_programs,
    )


def mm_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b with the float32 sums kept: no rounding to a's dtype at the end. On a GPU torch >= 2.8."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def lora_backward(
    dy: torch.Tensor, x: torch.Tensor, xa: torch.Tensor, lora_b: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one adapter pair, and the low-rank side of dx, for callers without an extended weight.

    Three products of the library: each runs at the speed of reading dy or x once, and a kernel of our own that reads dy
    once for both of its products won only 9 % (docs/performance.md).

    Args:
        dy: [T, N], x: [T, K], xa: [T, R] = x Aᵀ.
        lora_b: [N, R] in dy's dtype.
        scale: s.

    Returns:
        dyb [T, R] = s dy B in dy's dtype (dx gains dyb A), d_lora_a float32 [R, K], d_lora_b float32 [N, R].
    """
    num_tokens, num_rows = dy.shape
    if lora_b.shape != (num_rows, xa.shape[1]) or len(xa) != num_tokens or len(x) != num_tokens:
        raise ValueError(
            f"dy is {list(dy.shape)}, x {list(x.shape)}, xa {list(xa.shape)}, lora_b {list(lora_b.shape)}; "
            "needed: [T, N], [T, K], [T, R], [N, R]."
        )
    dyb = torch.mm(dy, lora_b).mul_(scale)
    return dyb, mm_float32(dyb.t(), x), mm_float32(dy.t(), xa).mul_(scale)


EXTEND_COLUMNS = 128
EXTEND_ROWS = 64
