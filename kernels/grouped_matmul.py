"""Products of rows with their own expert's matrix, for rows that lie sorted by expert (`moe_routing`).

    forward    y_p[s] = c W_p[e] x[s] + b_p[e]  + B_p[e] h_p[s]           W [E, N, K], B [E, N, R], h [S, R]
    backward   dx[s]  = c Σ_p W_p[e]ᵀ dy_p[s]   + Σ_p A_p[e]ᵀ dh_p[s]     A [E, R, K], dh [S, R]

e is the expert of place s, c[e] a file's own factor and b[e] its bias (usually absent). The low-rank term is one more
step of the same sum, so it costs no pass over y or dx. One launch takes one or two weights p (gate and up): forward
puts y_p side by side, so that few experts still fill a card with programs; backward takes them into one float32 sum.

Rows may lie in the order of the places, of the slots, or of the tokens, all J experts of one reading the same row; the
gather is part of the load, and what is summed over a token's slots is stored in their order.

How many rows an expert has is known on the device alone. Programs are launched for the largest number of tiles that
can be, S / BM + E, and each finds its expert and rows in the bounds; those beyond the last tile return. Nothing waits
for the host, and no sum depends on who came first.

Weights come decoded here, a slice of G experts from `first_expert` on, so that the workspace is bounded;
`grouped_dequant_matmul` takes them packed, which is faster for few rows of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.moe_routing import Routing


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program's tile: rows, columns of the result, terms of a step."""

    rows: int
    columns: int
    terms: int
    num_warps: int
    num_stages: int


@triton.jit
def expert_tile(p_bounds, pid, first_expert, num_experts, BE: tl.constexpr, BM: tl.constexpr):
    """(expert counted from `first_expert`, first row, end of the expert's rows) of tile `pid`.

    The expert is at least `num_experts` if there is no such tile.
    """
    o_e = tl.arange(0, BE)
    m_e = o_e < num_experts
    b_start = tl.load(p_bounds + first_expert + o_e, mask=m_e, other=0)
    b_end = tl.load(p_bounds + first_expert + 1 + o_e, mask=m_e, other=0)
    b_tiles = (b_end - b_start + BM - 1) // BM
    b_last = tl.cumsum(b_tiles, 0)
    expert = tl.sum((b_last <= pid).to(tl.int32), 0)
    m_is = o_e == expert
    first_tile = tl.sum(tl.where(m_is, b_last - b_tiles, 0), 0)
    start = tl.sum(tl.where(m_is, b_start, 0), 0)
    end = tl.sum(tl.where(m_is, b_end, 0), 0)
    return expert, start + (pid - first_tile) * BM, end


@triton.jit
def low_rank_step(
    acc,
    p_h,
    p_factor,
    o_m,
    end,
    o_n,
    N,
    factor_n_stride,
    factor_r_stride,
    h_stride,
    R: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + h F, h [rows, BR] with zeros behind its first R columns, F [R, columns] of one expert."""
    o_r = tl.arange(0, BR)
    b_h = tl.load(p_h + o_m[:, None] * h_stride + o_r[None, :], mask=(o_m < end)[:, None], other=0.0)
    p_f = p_factor + o_n[None, :].to(tl.int64) * factor_n_stride + o_r[:, None].to(tl.int64) * factor_r_stride
    b_f = tl.load(p_f, mask=(o_r < R)[:, None] & (o_n < N)[None, :], other=0.0)
    return tl.dot(b_h, b_f.to(b_h.dtype), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["first_expert"])
def grouped_matmul_kernel(
    p_x,
    p_w,
    p_y,
    p_slot,
    p_bounds,
    p_h,
    p_factor0,
    p_factor1,
    p_expert_scale,
    p_bias0,
    p_bias1,
    x_stride,
    y_stride,
    h_stride,
    w_part_stride,
    w_expert_stride,
    w_n_stride,
    w_k_stride,
    factor_expert_stride,
    factor_n_stride,
    factor_r_stride,
    N,
    K,
    first_expert,
    num_experts,
    PARTS: tl.constexpr,  # summed
    SIDES: tl.constexpr,  # parts side by side in y
    SLOTS_PER_ROW: tl.constexpr,  # 0: x lies in the order of the places
    TO_SLOTS: tl.constexpr,  # y lies in the order of the slots
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    IS_EVEN: tl.constexpr,  # N and K are multiples of their tiles
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    index, row, end = expert_tile(p_bounds, pid // (SIDES * num_n), first_expert, num_experts, BE, BM)
    if index >= num_experts:
        return
    expert = (first_expert + index).to(tl.int64)
    o_m = row.to(tl.int64) + tl.arange(0, BM)
    o_n = pid % num_n * BN + tl.arange(0, BN)
    if SIDES > 1:
        side = pid // num_n % SIDES
        p_w += side * w_part_stride
        p_y += side * N
        p_h += side * BR
        p_bias0 = tl.where(side == 0, p_bias0, p_bias1)
        p_factor0 = tl.where(side == 0, p_factor0, p_factor1)
    # rows beyond the end repeat the last one: only the store needs a mask. Not so columns: the compiler would no longer
    # see that they lie side by side, and load them one by one (20 times slower where W is turned).
    o_row = tl.minimum(o_m, end - 1)
    if SLOTS_PER_ROW:
        o_row = tl.load(p_slot + o_row).to(tl.int64) // SLOTS_PER_ROW
    m_n = (o_n < N)[None, :]
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        o_k = tl.arange(0, BK)
        p_x_tile = p_x + o_row[:, None] * x_stride + part * K + o_k[None, :]
        p_w_tile = (
            p_w
            + part * w_part_stride
            + index.to(tl.int64) * w_expert_stride
            + o_n[None, :].to(tl.int64) * w_n_stride
            + o_k[:, None].to(tl.int64) * w_k_stride
        )
        for first in range(0, K, BK):
            if IS_EVEN:
                b_x = tl.load(p_x_tile)
                b_w = tl.load(p_w_tile)
            else:
                m_k = first + o_k < K
                b_x = tl.load(p_x_tile, mask=m_k[None, :], other=0.0)
                b_w = tl.load(p_w_tile, mask=m_k[:, None] & m_n, other=0.0)
            acc = tl.dot(b_x, b_w, acc, input_precision=PRECISION)
            p_x_tile += BK
            p_w_tile += BK * w_k_stride
    if HAS_SCALE:
        acc *= tl.load(p_expert_scale + expert).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(p_bias0 + expert * N + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    if R > 0:
        for part in tl.static_range(PARTS):
            p_factor = p_factor0 if part == 0 else p_factor1
            acc = low_rank_step(
                acc,
                p_h + part * BR,
                p_factor + expert * factor_expert_stride,
                o_m,
                end,
                o_n,
                N,
                factor_n_stride,
                factor_r_stride,
                h_stride,
                R,
                BR,
                PRECISION,
            )
    m_y = (o_m < end)[:, None] & (o_n < N)[None, :]
    if TO_SLOTS:
        o_m = tl.load(p_slot + o_m, mask=o_m < end, other=0).to(tl.int64)
    tl.store(p_y + o_m[:, None] * y_stride + o_n[None, :], acc.to(p_y.dtype.element_ty), mask=m_y)


@dataclass(frozen=True, eq=False)
class LowRank:
    """The low-rank term of a product.

    Attributes:
        h: [S, P BR], in the order of the places, rows any distance apart; P parts of `padded_rank` columns
            (`grouped_lora.project`).
        factors: of each part, any float dtype: B [E, N, R] forward, A [E, R, K] backward.
    """

    h: torch.Tensor
    factors: tuple[torch.Tensor, ...]


def padded_rank(rank: int) -> int:
    """Columns that R numbers take where matrix units multiply them: a power of two, at least 16; 0 for 0."""
    return 0 if rank == 0 else max(16, triton.next_power_of_2(rank))


def check_rows_of_slots(name: str, tensor: torch.Tensor, width: int, num_rows: int) -> None:
    if tensor.dim() != 2 or tuple(tensor.shape) != (num_rows, width) or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} is {list(tensor.shape)} with strides {tensor.stride()}; "
            f"needed: [{num_rows}, {width}] with unit column stride."
        )


def check_input(x: torch.Tensor, width: int, slots_per_row: int, routing: Routing) -> None:
    """Check rows that are read: see `grouped_matmul_forward`."""
    if slots_per_row not in (0, 1, routing.num_chosen):
        raise ValueError(f"{slots_per_row} slots read a row of x; needed: 0, 1 or {routing.num_chosen}.")
    check_rows_of_slots("x", x, width, routing.num_slots // max(1, slots_per_row))


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(one.shape == first.shape and one.dtype == first.dtype and one.is_contiguous() for one in tensors)


def low_rank_arguments(low_rank: LowRank | None, like: torch.Tensor, *, is_backward: bool) -> dict[str, object]:
    """Pointers, strides and sizes of the low-rank step; `like` stands in for tensors that are not there."""
    if low_rank is None:
        return {
            "p_h": like,
            "p_factor0": like,
            "p_factor1": like,
            "h_stride": 0,
            "factor_expert_stride": 0,
            "factor_n_stride": 0,
            "factor_r_stride": 0,
            "R": 0,
            "BR": 16,
        }
    first, last = low_rank.factors[0], low_rank.factors[-1]
    rank = first.shape[1 if is_backward else 2]
    if not _are_alike(low_rank.factors):
        raise ValueError(
            "low-rank factors differ in shape or dtype, or have gaps; needed: contiguous ones of one shape and dtype."
        )
    check_rows_of_slots("h", low_rank.h, len(low_rank.factors) * padded_rank(rank), low_rank.h.shape[0])
    return {
        "p_h": low_rank.h,
        "p_factor0": first,
        "p_factor1": last,
        "h_stride": low_rank.h.stride(0),
        "factor_expert_stride": first.stride(0),
        "factor_n_stride": first.stride(2 if is_backward else 1),
        "factor_r_stride": first.stride(1 if is_backward else 2),
        "R": rank,
        "BR": padded_rank(rank),
    }


def num_tiles(num_slots: int, num_experts: int, rows: int) -> int:
    """Tiles of `rows` rows that slots of so many experts can take at most."""
    return min(num_slots, num_slots // rows + num_experts)


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    *,
    first_expert: int,
    is_backward: bool,
    slots_per_row: int,
    to_slots: bool,
    low_rank: LowRank | None,
    expert_scale: torch.Tensor | None,
    biases: Sequence[torch.Tensor],
    tiles: Tiles | None,
) -> None:
    num_parts, num_experts, num_rows, num_columns = weights.shape
    num_out, num_terms = (num_columns, num_rows) if is_backward else (num_rows, num_columns)
    num_summed, num_sides = (num_parts, 1) if is_backward else (1, num_parts)
    check_input(x, num_summed * num_terms, slots_per_row, routing)
    check_rows_of_slots("out", out, num_sides * num_out, routing.num_slots)
    if num_parts not in (1, 2) or any(
        len(own) not in (0, num_parts) for own in (biases, () if low_rank is None else low_rank.factors)
    ):
        raise ValueError(f"{num_parts} weights; needed: one or two, and a bias and a low-rank factor for each or none.")
    if biases and not (_are_alike(biases) and tuple(biases[0].shape) == (routing.num_experts, num_out)):
        raise ValueError(f"biases differ, or are not contiguous [{routing.num_experts}, {num_out}].")
    if weights.stride(3) != 1 or first_expert + num_experts > routing.num_experts:
        raise ValueError(
            f"weights are {list(weights.shape)} from expert {first_expert} of {routing.num_experts} on, with strides "
            f"{weights.stride()}; needed: [P, G, N, K] with unit column stride, G experts at most."
        )
    if out.numel() == 0:
        return
    tiles = tiles or tiles_for(routing.num_slots / routing.num_experts, x.dtype)
    num_column_tiles = num_sides * triton.cdiv(num_out, tiles.columns)
    num_programs = num_tiles(routing.num_slots, num_experts, tiles.rows) * num_column_tiles
    grouped_matmul_kernel[(num_programs,)](
        x,
        weights,
        out,
        routing.slot,
        routing.bounds,
        p_expert_scale=x if expert_scale is None else expert_scale,
        p_bias0=biases[0] if biases else x,
        p_bias1=biases[-1] if biases else x,
        x_stride=x.stride(0),
        y_stride=out.stride(0),
        w_part_stride=weights.stride(0),
        w_expert_stride=weights.stride(1),
        w_n_stride=1 if is_backward else weights.stride(2),
        w_k_stride=weights.stride(2) if is_backward else 1,
        **low_rank_arguments(low_rank, x, is_backward=is_backward),
        N=num_out,
        K=num_terms,
        first_expert=first_expert,
        num_experts=num_experts,
        PARTS=num_summed,
        SIDES=num_sides,
        SLOTS_PER_ROW=slots_per_row,
        TO_SLOTS=to_slots,
        HAS_SCALE=expert_scale is not None,
        HAS_BIAS=bool(biases),
        IS_EVEN=num_terms % tiles.terms == 0 and num_out % tiles.columns == 0,
        BE=triton.next_power_of_2(num_experts),
        BM=tiles.rows,
        BN=tiles.columns,
        BK=tiles.terms,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def grouped_matmul_forward(
    x: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    *,
    out: torch.Tensor,
    first_expert: int = 0,
    slots_per_row: int = 0,
    to_slots: bool = False,
    low_rank: LowRank | None = None,
    expert_scale: torch.Tensor | None = None,
    biases: Sequence[torch.Tensor] = (),
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out_p[s] = c W_p[e] x[s] + b_p[e] + B_p[e] h_p[s] for the rows of experts `first_expert` up to + G.

    Args:
        x: rows of K numbers, see `slots_per_row`.
        weights: [P, G, N, K] in x's dtype, P is 1 or 2.
        routing: of all E experts.
        out: [S, P N], the parts side by side; rows of other experts are left alone.
        slots_per_row: 0: x [S, K] lies in the order of the places; 1: in that of the slots; J: x is [T, K].
        to_slots: out lies in the order of the slots instead of that of the places.
        low_rank: h and the B of each part, of all experts.
        expert_scale: c, [E], the same for all parts.
        biases: b of each part, [E, N], contiguous, of one float dtype; or none.
        tiles: for measuring; None: the best known.

    Returns:
        out.
    """
    _launch(
        x,
        weights,
        routing,
        out,
        first_expert=first_expert,
        is_backward=False,
        slots_per_row=slots_per_row,
        to_slots=to_slots,
        low_rank=low_rank,
        expert_scale=expert_scale,
        biases=biases,
        tiles=tiles,
    )
    return out


def grouped_matmul_backward(
    dy: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    *,
    out: torch.Tensor,
    first_expert: int = 0,
    slots_per_row: int = 0,
    to_slots: bool = False,
    low_rank: LowRank | None = None,
    expert_scale: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[s] = c Σ_p W_p[e]ᵀ dy_p[s] + Σ_p A_p[e]ᵀ dh_p[s] for the rows of experts `first_expert` up to + G.

    Args:
        dy: rows of P N numbers.
        weights: [P, G, N, K] in dy's dtype, P is 1 or 2.
        routing: of all E experts.
        out: [S, K]; rows of other experts are left alone.
        slots_per_row, to_slots: see `grouped_matmul_forward`.
        low_rank: dh and the A of each part.
        expert_scale: c, [E].
        tiles: for measuring; None: the best known.

    Returns:
        out.
    """
    _launch(
        dy,
        weights,
        routing,
        out,
        first_expert=first_expert,
        is_backward=True,
        slots_per_row=slots_per_row,
        to_slots=to_slots,
        low_rank=low_rank,
        expert_scale=expert_scale,
        biases=(),
        tiles=tiles,
    )
    return out


def tiles_for(rows_per_expert: float, dtype: torch.dtype) -> Tiles:
    """Tiles for so many rows of an expert on average."""
    if dtype == torch.float32:
        return FLOAT32_TILES
    return next(tiles for limit, tiles in TILES if rows_per_expert <= limit)


FLOAT32_TILES = Tiles(32, 64, 32, 4, 2)
# Of three to eight tried on an H200 at 16, 64, 128 and 512 rows of an expert, and of 28 to 35 for each product of three
# models' layers (benchmarks/expert_tiles.py): none gained more than 7 % there.
TILES = (
    (48, Tiles(32, 128, 128, 4, 3)),
    (96, Tiles(128, 256, 64, 8, 3)),
    (float("inf"), Tiles(128, 256, 64, 8, 4)),
)
