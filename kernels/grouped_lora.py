"""The thin products of low-rank pairs on experts, A [E, R, K] and B [E, N, R], for rows sorted by expert.

    project          h[s]  = s A[e] x[s]                (forward)       dh[s] = s B[e]ᵀ dy[s]      (backward)
    outer            dA[e] = Σ_s dh[s] x[s]ᵀ                            dB[e] = Σ_s dy[s] h[s]ᵀ

Both read the wide rows once, at the speed of memory; sums in float32, dA and dB leave in float32 as their masters are.
h has columns for the padded rank, zeros behind the first R, and is in x's dtype: the low-rank step of
`grouped_matmul` reads it. Experts without rows have zero gradient. The sum over an expert's rows is one program's, in
their order: no result depends on chance.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.grouped_matmul import check_input, check_rows_of_slots, expert_tile, num_tiles, padded_rank
from pyggtrain.kernels.moe_routing import Routing


@triton.jit(do_not_specialize=["first_expert"])
def grouped_project_kernel(
    p_x,
    p_factor0,
    p_factor1,
    p_h,
    p_slot,
    p_bounds,
    scale0,
    scale1,
    x_stride,
    x_part_stride,
    h_stride,
    factor_expert_stride,
    K,
    first_expert,
    num_experts,
    SLOTS_PER_ROW: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    index, row, end = expert_tile(p_bounds, tl.program_id(0), first_expert, num_experts, BE, BM)
    if index >= num_experts:
        return
    expert = first_expert + index
    o_m = row.to(tl.int64) + tl.arange(0, BM)
    o_row = tl.minimum(o_m, end - 1)
    if SLOTS_PER_ROW:
        o_row = tl.load(p_slot + o_row).to(tl.int64) // SLOTS_PER_ROW
    o_r = tl.arange(0, BR)
    part = tl.program_id(1)
    p_x += part * x_part_stride
    p_factor = tl.where(part == 0, p_factor0, p_factor1) + expert.to(tl.int64) * factor_expert_stride
    acc = tl.zeros([BM, BR], dtype=tl.float32)
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        m_k = o_k < K
        b_x = tl.load(p_x + o_row[:, None] * x_stride + o_k[None, :], mask=m_k[None, :], other=0.0)
        b_f = tl.load(p_factor + o_r[None, :] * K + o_k[:, None], mask=m_k[:, None] & (o_r < R)[None, :], other=0.0)
        acc = tl.dot(b_x, b_f.to(b_x.dtype), acc, input_precision=PRECISION)
    p_out = p_h + o_m[:, None] * h_stride + part * BR + o_r[None, :]
    tl.store(p_out, (acc * tl.where(part == 0, scale0, scale1)).to(p_h.dtype.element_ty), mask=(o_m < end)[:, None])


@triton.jit
def grouped_outer_kernel(
    p_h,
    p_x,
    p_gradient,
    p_slot,
    p_bounds,
    scale,
    h_stride,
    x_stride,
    gradient_expert_stride,
    gradient_r_stride,
    gradient_k_stride,
    K,
    SLOTS_PER_ROW: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert = tl.program_id(0)
    start, end = tl.load(p_bounds + expert), tl.load(p_bounds + expert + 1)
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    o_r = tl.arange(0, BR)
    m_k = o_k < K
    acc = tl.zeros([BK, BR], dtype=tl.float32)
    for first in range(start, end, BM):
        o_m = first + tl.arange(0, BM)
        m_m = o_m < end
        o_row = tl.minimum(o_m, end - 1)
        if SLOTS_PER_ROW:
            o_row = tl.load(p_slot + o_row) // SLOTS_PER_ROW
        b_x = tl.load(
            p_x + o_row[None, :].to(tl.int64) * x_stride + o_k[:, None], mask=m_m[None, :] & m_k[:, None], other=0.0
        )
        b_h = tl.load(p_h + o_m[:, None].to(tl.int64) * h_stride + o_r[None, :], mask=m_m[:, None], other=0.0)
        acc = tl.dot(b_x, b_h, acc, input_precision=PRECISION)
    p_out = (
        p_gradient
        + expert.to(tl.int64) * gradient_expert_stride
        + o_k[:, None].to(tl.int64) * gradient_k_stride
        + o_r[None, :].to(tl.int64) * gradient_r_stride
    )
    tl.store(p_out, acc * scale, mask=m_k[:, None] & (o_r < R)[None, :])


def project(
    x: torch.Tensor,
    factors: Sequence[torch.Tensor],
    routing: Routing,
    *,
    scales: Sequence[float],
    slots_per_row: int = 0,
    out: torch.Tensor | None = None,
    experts: tuple[int, int] | None = None,
) -> torch.Tensor:
    """h_p[s] = scale_p F_p[e] x_p[s] for one or two parts p.

    Args:
        x: rows of K numbers that all parts read, or of P K numbers, one part beside the other.
        factors: of each part, [E, R, K], contiguous, of one float dtype: A, or `turned` B.
        scales: of each part.
        slots_per_row: see `grouped_matmul_forward`.
        out: [S, P padded R] in x's dtype, in the order of the places, rows any distance apart; made if None.
        experts: only the rows of experts from the first number up to the second; None: all.

    Returns:
        out: of each part R columns of h, then zeros.
    """
    first, last, num_parts = factors[0], factors[-1], len(factors)
    num_experts, rank, width = first.shape
    if num_experts != routing.num_experts or any(
        one.shape != first.shape or one.dtype != first.dtype or not one.is_contiguous() for one in factors
    ):
        raise ValueError(
            f"factors are {[list(one.shape) for one in factors]}; needed: contiguous ones of one shape and dtype, of "
            f"{routing.num_experts} experts."
        )
    padded = padded_rank(rank)
    out = x.new_empty(routing.num_slots, num_parts * padded) if out is None else out
    is_shared = x.shape[1] == width
    check_input(x, width if is_shared else num_parts * width, slots_per_row, routing)
    check_rows_of_slots("out", out, num_parts * padded, routing.num_slots)
    if routing.num_slots == 0:
        return out
    is_exact = x.dtype == torch.float32
    rows = PROJECT_ROWS if routing.num_slots >= PROJECT_ROWS * routing.num_experts else 16
    first_expert, end_expert = experts or (0, num_experts)
    num_experts = end_expert - first_expert
    grouped_project_kernel[(num_tiles(routing.num_slots, num_experts, rows), num_parts)](
        x,
        first,
        last,
        out,
        routing.slot,
        routing.bounds,
        scales[0],
        scales[-1],
        x.stride(0),
        0 if is_shared else width,
        out.stride(0),
        first.stride(0),
        width,
        first_expert,
        num_experts,
        SLOTS_PER_ROW=slots_per_row,
        R=rank,
        BR=padded,
        BE=triton.next_power_of_2(num_experts),
        BM=rows,
        BK=32 if is_exact else PROJECT_COLUMNS,
        PRECISION="ieee" if is_exact else "tf32",
        num_warps=4,
        num_stages=2 if is_exact else 3,
    )
    return out


def turned(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """B [E, N, R] as [E, R, N] in the dtype of the product: R numbers side by side are too few to be read well (102 us
    of an H200 against 26 for 2,048 tokens, 8 of 256 experts and N = 2,048).
    """
    return factor.transpose(1, 2).to(dtype).contiguous()


def outer(
    h: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    *,
    rank: int,
    is_lora_b: bool,
    scale: float = 1.0,
    slots_per_row: int = 0,
) -> torch.Tensor:
    """scale Σ over the rows s of each expert of h[s] x[s]ᵀ.

    Args:
        h: [S, padded R] in x's dtype, in the order of the places, rows any distance apart.
        x: rows of K numbers.
        rank: R.
        is_lora_b: the result is [E, K, R] instead of [E, R, K].
        slots_per_row: see `grouped_matmul_forward`.

    Returns:
        float32 [E, R, K] or [E, K, R].
    """
    width, padded = x.shape[1], padded_rank(rank)
    check_input(x, width, slots_per_row, routing)
    check_rows_of_slots("h", h, padded, routing.num_slots)
    shape = (routing.num_experts, width, rank) if is_lora_b else (routing.num_experts, rank, width)
    gradient = torch.empty(shape, dtype=torch.float32, device=x.device)
    is_exact = x.dtype == torch.float32
    columns = 32 if is_exact else OUTER_COLUMNS
    grouped_outer_kernel[(routing.num_experts, triton.cdiv(width, columns))](
        h,
        x,
        gradient,
        routing.slot,
        routing.bounds,
        scale,
        h.stride(0),
        x.stride(0),
        gradient.stride(0),
        gradient.stride(2 if is_lora_b else 1),
        gradient.stride(1 if is_lora_b else 2),
        width,
        SLOTS_PER_ROW=slots_per_row,
        R=rank,
        BR=padded,
        BM=OUTER_ROWS,
        BK=columns,
        PRECISION="ieee" if is_exact else "tf32",
        num_warps=4,
        num_stages=2 if is_exact else 3,
    )
    return gradient


PROJECT_ROWS = 64
PROJECT_COLUMNS = 128
OUTER_ROWS = 32
OUTER_COLUMNS = 128
