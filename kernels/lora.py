"""Low-rank adapters beside a quantised linear: y = x Wᵀ + s (x Aᵀ) Bᵀ, A [R, K], B [N, R]   (Hu et al. 2021, eq. 3)

Added afterwards, the low-rank term costs a pass over y that takes as long as a sixth of the matrix product itself
(H200, R = 16: 0.20 ms after 1.2 ms). Instead the dequantisation workspace is made a little larger, and one matrix
product does both. For linears that share x (q, k and v; gate and up) with weights W, ranks and products stacked:

        E = [ W    B* ]  N rows           y    = [x | s x Aᵀ] E[:N]ᵀ
            [ s A   . ]  P rows           dy B = dy E[:N, K:]
              K     P  columns            dx   = [dy | dy B] E[:, :K]

B* is block diagonal, one block of columns per linear, as wide as its rank (0 for a linear without a pair); P >= the
sum of ranks is padded with zeros so that rows of E start at 128-byte borders (H200: K + 64 columns cost 0-2 % over K,
K + 16 up to 4 %). The bottom right corner is never read.

Gradients, dyb = dy B [T, R], xa = s x Aᵀ [T, R] saved by forward, B A never formed:

    dB = dyᵀ xa       dA = s dybᵀ x       dx = dy W + s dyb A

Products of bfloat16 accumulate in float32; dA and dB leave in float32, as the adapters' masters are.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MAX_LINEARS = 3
"""Linears that one extended weight holds: q, k and v."""

Pair = tuple[torch.Tensor, torch.Tensor, float]
"""lora_a [R, K], lora_b [N, R], s."""


@triton.jit
def lora_extend_kernel(
    p_extended,
    p_a0,
    p_a1,
    p_a2,
    p_b0,
    p_b1,
    p_b2,
    extended_stride,
    N,
    K,
    row1,
    row2,
    rank0,
    rank1,
    rank2,
    scale0,
    scale1,
    scale2,
    P: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    NUM_A_PROGRAMS: tl.constexpr,
):
    # the two branches keep to names of their own: Triton wants one shape per name
    if tl.program_id(0) < NUM_A_PROGRAMS:
        # bottom rows: one s A after the other, then zeros
        o_row = tl.arange(0, P)[:, None]
        o_k = tl.program_id(0) * BK + tl.arange(0, BK)[None, :]
        o_1 = o_row - rank0
        o_2 = o_1 - rank1
        m_k = o_k < K
        m_0 = m_k & (o_row < rank0)
        m_1 = m_k & (o_1 >= 0) & (o_1 < rank1)
        m_2 = m_k & (o_2 >= 0) & (o_2 < rank2)
        b_a = tl.load(p_a0 + o_row.to(tl.int64) * K + o_k, mask=m_0, other=0.0).to(tl.float32) * scale0
        b_a += tl.load(p_a1 + o_1.to(tl.int64) * K + o_k, mask=m_1, other=0.0).to(tl.float32) * scale1
        b_a += tl.load(p_a2 + o_2.to(tl.int64) * K + o_k, mask=m_2, other=0.0).to(tl.float32) * scale2
        p_bottom = p_extended + (N + o_row).to(tl.int64) * extended_stride + o_k
        tl.store(p_bottom, b_a.to(p_extended.dtype.element_ty), mask=m_k)
    else:
        # right columns: B of each pair on the diagonal, zeros elsewhere
        o_n = (tl.program_id(0) - NUM_A_PROGRAMS) * BN + tl.arange(0, BN)[:, None]
        o_c = tl.arange(0, P)[None, :]
        o_c1 = o_c - rank0
        o_c2 = o_c1 - rank1
        m_b0 = (o_n < row1) & (o_c < rank0)
        m_b1 = (o_n >= row1) & (o_n < row2) & (o_c1 >= 0) & (o_c1 < rank1)
        m_b2 = (o_n >= row2) & (o_n < N) & (o_c2 >= 0) & (o_c2 < rank2)
        b_b = tl.load(p_b0 + o_n.to(tl.int64) * rank0 + o_c, mask=m_b0, other=0.0).to(tl.float32)
        b_b += tl.load(p_b1 + (o_n - row1).to(tl.int64) * rank1 + o_c1, mask=m_b1, other=0.0).to(tl.float32)
        b_b += tl.load(p_b2 + (o_n - row2).to(tl.int64) * rank2 + o_c2, mask=m_b2, other=0.0).to(tl.float32)
        p_right = p_extended + o_n.to(tl.int64) * extended_stride + K + o_c
        tl.store(p_right, b_b.to(p_extended.dtype.element_ty), mask=o_n < N)


def lora_extend_(extended: torch.Tensor, pairs: Sequence[Pair | None], *, row_counts: Sequence[int]) -> None:
    """Write s A and B* around the weights in `extended` (E above); the weights themselves are left alone.

    Args:
        extended: [N + P, K + P], columns side by side, P a power of two of at least the sum of ranks.
        pairs: of each linear, at most three: (lora_a [R, K], lora_b [rows, R], s = alpha / R), contiguous, any float
            dtype; None for a linear without one.
        row_counts: rows of each linear; their sum is N.
    """
    num_rows = sum(row_counts)
    padded = extended.shape[0] - num_rows
    width = extended.shape[1] - padded
    ranks = [0 if pair is None else pair[0].shape[0] for pair in pairs]
    if len(pairs) != len(row_counts) or not 1 <= len(pairs) <= MAX_LINEARS:
        raise ValueError(f"{len(pairs)} pairs for {len(row_counts)} linears; needed: one each, at most {MAX_LINEARS}.")
    for pair, count, rank in zip(pairs, row_counts, ranks, strict=True):
        if pair is not None and (pair[0].shape != (rank, width) or pair[1].shape != (count, rank)):
            raise ValueError(
                f"lora_a is {list(pair[0].shape)} and lora_b {list(pair[1].shape)}; "
                f"needed: [R, {width}] and [{count}, R]."
            )
        if pair is not None and not (pair[0].is_contiguous() and pair[1].is_contiguous()):
            raise ValueError("lora_a or lora_b has gaps between its rows; needed: contiguous tensors.")
    if padded < max(1, sum(ranks)) or padded & (padded - 1) or width < 1 or extended.stride(1) != 1:
        raise ValueError(
            f"extended is {list(extended.shape)} for {num_rows} rows; needed: [{num_rows} + P, K + P], "
            f"P a power of two and at least {sum(ranks)}."
        )
    missing = MAX_LINEARS - len(pairs)
    lora_a = [extended if pair is None else pair[0] for pair in pairs] + [extended] * missing
    lora_b = [extended if pair is None else pair[1] for pair in pairs] + [extended] * missing
    scales = [0.0 if pair is None else pair[2] for pair in pairs] + [0.0] * missing
    starts = [sum(row_counts[:i]) for i in range(1, len(row_counts))] + [num_rows] * missing
    num_a_programs = triton.cdiv(width, EXTEND_COLUMNS)
    lora_extend_kernel[(num_a_programs + triton.cdiv(num_rows, EXTEND_ROWS),)](
        extended,
        *lora_a,
        *lora_b,
        extended.stride(0),
        num_rows,
        width,
        starts[0],
        starts[1],
        *ranks,
        *[0] * missing,
        *scales,
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
