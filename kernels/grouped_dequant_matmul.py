"""As `grouped_matmul`, with weights in ggml blocks: a tile is decoded where it is multiplied and never written out.

    forward    y[s]  = c W[e] x[s] + b[e]     + B[e] h[s]
    backward   dx[s] = c Σ_p W_p[e]ᵀ dy_p[s]  + Σ_p A_p[e]ᵀ dh_p[s]

For few rows of an expert the packed bytes are all that has to be read: 0.56 bytes a weight for Q4_K, where decoding
into a workspace writes and reads 2 more each. Every tile of rows decodes its weights again, so with many rows the
workspace wins (`pyggtrain.ops.expert_product` chooses; docs/performance.md has the figures).

A lane of a type's `decode` gives `runs` runs of 8 weights, `run_stride` apart. They are not brought into one order:
run r of all lanes is a matrix of its own, whose columns are the weights

    k = c // run_stride * run_stride * runs + c % run_stride + r * run_stride        c = 0, 1, ...

of the tile, and a sum over k does not mind its order: forward is one product with the same columns of x for each run,
backward has an accumulator for each run.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.dequant.grids import grid_on
from pyggtrain.kernels.dequant.kernel import decoder_of
from pyggtrain.kernels.grouped_matmul import (
    LowRank,
    Tiles,
    check_input,
    check_rows_of_slots,
    expert_tile,
    low_rank_arguments,
    low_rank_step,
    num_tiles,
)
from pyggtrain.kernels.moe_routing import Routing


@triton.jit
def grouped_dequant_fwd_kernel(
    p_x,
    p_blocks,
    p_grid,
    p_y,
    p_slot,
    p_bounds,
    p_h,
    p_factor0,
    p_factor1,
    p_expert_scale,
    p_bias,
    x_stride,
    y_stride,
    h_stride,
    factor_expert_stride,
    factor_n_stride,
    factor_r_stride,
    N,
    K,
    num_experts,
    decode: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LANES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a row, at a time
    PRECISION: tl.constexpr,
):
    LANES: tl.constexpr = BLOCKS * LANES_PER_BLOCK
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    expert, row, end = expert_tile(p_bounds, pid // num_n, 0, num_experts, BE, BM)
    if expert >= num_experts:
        return
    o_m = row.to(tl.int64) + tl.arange(0, BM)
    o_n = pid % num_n * BN + tl.arange(0, BN)
    o_row = tl.minimum(o_m, end - 1)
    if SLOTS_PER_ROW:
        o_row = tl.load(p_slot + o_row).to(tl.int64) // SLOTS_PER_ROW
    row_blocks = K // (LANES_PER_BLOCK * 8 * RUNS)
    o_lane = tl.arange(0, BN * LANES)
    o_weight_row = tl.minimum(pid % num_n * BN + o_lane // LANES, N - 1)
    p_row = p_blocks + (expert.to(tl.int64) * N + o_weight_row) * row_blocks * BLOCK_BYTES
    o_block = o_lane % LANES // LANES_PER_BLOCK
    o_c = tl.arange(0, LANES * 8)
    o_k = o_c // RUN_STRIDE * (RUN_STRIDE * RUNS) + o_c % RUN_STRIDE
    p_x_row = p_x + o_row[:, None] * x_stride
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for first in range(0, row_blocks, BLOCKS):
        # blocks beyond the row repeat its last one, and meet zeros of x
        p_block = p_row + tl.minimum(first + o_block, row_blocks - 1) * BLOCK_BYTES
        runs = decode(p_block, o_lane % LANES_PER_BLOCK, p_grid)
        o_k_tile = first * (LANES_PER_BLOCK * 8 * RUNS) + o_k
        for r in tl.static_range(RUNS):
            o_k_run = o_k_tile + r * RUN_STRIDE
            if BLOCKS == 1:
                b_x = tl.load(p_x_row + o_k_run[None, :])
            else:
                b_x = tl.load(p_x_row + o_k_run[None, :], mask=(o_k_run < K)[None, :], other=0.0)
            b_w = tl.reshape(runs[r].to(b_x.dtype), [BN, LANES * 8])
            acc = tl.dot(b_x, tl.trans(b_w), acc, input_precision=PRECISION)
    if HAS_SCALE:
        acc *= tl.load(p_expert_scale + expert).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(p_bias + expert.to(tl.int64) * N + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    if R > 0:
        acc = low_rank_step(
            acc,
            p_h,
            p_factor0 + expert.to(tl.int64) * factor_expert_stride,
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
    o_out = tl.load(p_slot + o_m, mask=o_m < end, other=0).to(tl.int64) if TO_SLOTS else o_m
    m_y = (o_m < end)[:, None] & (o_n < N)[None, :]
    tl.store(p_y + o_out[:, None] * y_stride + o_n[None, :], acc.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def grouped_dequant_bwd_kernel(
    p_dy,
    p_blocks0,
    p_blocks1,
    p_grid,
    p_dx,
    p_slot,
    p_bounds,
    p_h,
    p_factor0,
    p_factor1,
    p_expert_scale,
    dy_stride,
    dx_stride,
    h_stride,
    factor_expert_stride,
    factor_n_stride,
    factor_r_stride,
    N,
    K,
    num_experts,
    decode: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LANES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,  # rows of W at a time
    BLOCKS: tl.constexpr,  # of a row: the columns of the result
    PRECISION: tl.constexpr,
):
    LANES: tl.constexpr = BLOCKS * LANES_PER_BLOCK
    WEIGHTS: tl.constexpr = LANES * 8 * RUNS
    num_k = tl.cdiv(K, WEIGHTS)
    pid = tl.program_id(0)
    expert, row, end = expert_tile(p_bounds, pid // num_k, 0, num_experts, BE, BM)
    if expert >= num_experts:
        return
    o_m = row.to(tl.int64) + tl.arange(0, BM)
    o_row = tl.minimum(o_m, end - 1)
    if SLOTS_PER_ROW:
        o_row = tl.load(p_slot + o_row).to(tl.int64) // SLOTS_PER_ROW
    row_blocks = K // (LANES_PER_BLOCK * 8 * RUNS)
    o_lane = tl.arange(0, BN * LANES)
    o_block = tl.minimum(pid % num_k * BLOCKS + o_lane % LANES // LANES_PER_BLOCK, row_blocks - 1)
    # one accumulator for each run; those that the type does not have are never used and vanish
    acc0 = tl.zeros([BM, LANES * 8], dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for part in tl.static_range(PARTS):
        p_blocks = p_blocks0 if part == 0 else p_blocks1
        p_column = p_blocks + expert.to(tl.int64) * N * row_blocks * BLOCK_BYTES + o_block * BLOCK_BYTES
        p_dy_row = p_dy + o_row[:, None] * dy_stride + part * N
        for first in range(0, N, BN):
            o_n = first + tl.arange(0, BN)
            b_dy = tl.load(p_dy_row + o_n[None, :], mask=(o_n < N)[None, :], other=0.0)
            # rows beyond the last repeat it, and meet zeros of dy
            o_weight_row = tl.minimum(first + o_lane // LANES, N - 1)
            p_block = p_column + o_weight_row.to(tl.int64) * row_blocks * BLOCK_BYTES
            runs = decode(p_block, o_lane % LANES_PER_BLOCK, p_grid)
            b_w = tl.reshape(runs[0].to(b_dy.dtype), [BN, LANES * 8])
            acc0 = tl.dot(b_dy, b_w, acc0, input_precision=PRECISION)
            if RUNS > 1:
                b_w = tl.reshape(runs[1].to(b_dy.dtype), [BN, LANES * 8])
                acc1 = tl.dot(b_dy, b_w, acc1, input_precision=PRECISION)
            if RUNS > 2:
                b_w = tl.reshape(runs[2].to(b_dy.dtype), [BN, LANES * 8])
                acc2 = tl.dot(b_dy, b_w, acc2, input_precision=PRECISION)
                b_w = tl.reshape(runs[3].to(b_dy.dtype), [BN, LANES * 8])
                acc3 = tl.dot(b_dy, b_w, acc3, input_precision=PRECISION)
    o_c = tl.arange(0, LANES * 8)
    o_out = tl.load(p_slot + o_m, mask=o_m < end, other=0).to(tl.int64) if TO_SLOTS else o_m
    for r in tl.static_range(RUNS):
        acc = acc0 if r == 0 else (acc1 if r == 1 else (acc2 if r == 2 else acc3))
        o_k = pid % num_k * WEIGHTS + o_c // RUN_STRIDE * (RUN_STRIDE * RUNS) + o_c % RUN_STRIDE + r * RUN_STRIDE
        if HAS_SCALE:
            acc *= tl.load(p_expert_scale + expert).to(tl.float32)
        if R > 0:
            for part in tl.static_range(PARTS):
                p_factor = p_factor0 if part == 0 else p_factor1
                acc = low_rank_step(
                    acc,
                    p_h + part * BR,
                    p_factor + expert.to(tl.int64) * factor_expert_stride,
                    o_m,
                    end,
                    o_k,
                    K,
                    factor_n_stride,
                    factor_r_stride,
                    h_stride,
                    R,
                    BR,
                    PRECISION,
                )
        m_dx = (o_m < end)[:, None] & (o_k < K)[None, :]
        tl.store(p_dx + o_out[:, None] * dx_stride + o_k[None, :], acc.to(p_dx.dtype.element_ty), mask=m_dx)


def _check_stack(blocks: torch.Tensor, type: str, routing: Routing) -> tuple[int, int]:
    """(N, K) of a stack [E, N, row_bytes]."""
    decoder = DECODERS[type]
    if (
        blocks.dim() != 3
        or blocks.dtype != torch.uint8
        or not blocks.is_contiguous()
        or blocks.shape[0] != routing.num_experts
        or blocks.shape[2] % decoder.block_bytes
        or blocks.data_ptr() % decoder.alignment
    ):
        raise ValueError(
            f"blocks of {type} are {blocks.dtype} {list(blocks.shape)} at address {blocks.data_ptr():#x}; needed: "
            f"contiguous uint8 [{routing.num_experts}, N, a multiple of {decoder.block_bytes}], "
            f"aligned to {decoder.alignment} bytes."
        )
    return blocks.shape[1], blocks.shape[2] // decoder.block_bytes * decoder.block_size


def _type_arguments(type: str, blocks: torch.Tensor, tile_weights: int) -> dict[str, object]:
    """What a kernel knows of a type; a tile has about `tile_weights` weights of a row, in whole blocks."""
    decoder = DECODERS[type]
    return {
        "p_grid": grid_on(decoder.grid, blocks.device) if decoder.grid else blocks,
        "decode": decoder_of(type),
        "BLOCK_BYTES": decoder.block_bytes,
        "LANES_PER_BLOCK": decoder.block_size // (8 * decoder.runs),
        "RUNS": decoder.runs,
        "RUN_STRIDE": decoder.run_stride,
        "BLOCKS": max(1, tile_weights // decoder.block_size),
    }


def grouped_dequant_forward(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    routing: Routing,
    *,
    out: torch.Tensor,
    slots_per_row: int = 0,
    to_slots: bool = False,
    low_rank: LowRank | None = None,
    expert_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[s] = c W[e] x[s] + b[e] + B[e] h[s].

    Args:
        x: rows of K numbers.
        blocks: uint8 [E, N, row_bytes] of `type`.
        out: [S, N].
        bias: b, [E, N], contiguous, any float dtype.
        slots_per_row, to_slots, low_rank, expert_scale, tiles: see `grouped_matmul_forward`.

    Returns:
        out.
    """
    num_out, num_terms = _check_stack(blocks, type, routing)
    check_input(x, num_terms, slots_per_row, routing)
    check_rows_of_slots("out", out, num_out, routing.num_slots)
    if out.numel() == 0:
        return out
    tiles = tiles or tiles_for(routing.num_slots / routing.num_experts, x.dtype, is_backward=False)
    num_programs = num_tiles(routing.num_slots, routing.num_experts, tiles.rows) * triton.cdiv(num_out, tiles.columns)
    grouped_dequant_fwd_kernel[(num_programs,)](
        x,
        blocks,
        p_y=out,
        p_slot=routing.slot,
        p_bounds=routing.bounds,
        p_expert_scale=x if expert_scale is None else expert_scale,
        p_bias=x if bias is None else bias,
        x_stride=x.stride(0),
        y_stride=out.stride(0),
        **low_rank_arguments(low_rank, x, is_backward=False),
        **_type_arguments(type, blocks, tiles.terms),
        N=num_out,
        K=num_terms,
        num_experts=routing.num_experts,
        SLOTS_PER_ROW=slots_per_row,
        TO_SLOTS=to_slots,
        HAS_SCALE=expert_scale is not None,
        HAS_BIAS=bias is not None,
        BE=triton.next_power_of_2(routing.num_experts),
        BM=tiles.rows,
        BN=tiles.columns,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def grouped_dequant_backward(
    dy: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    type: str,
    routing: Routing,
    *,
    out: torch.Tensor,
    slots_per_row: int = 0,
    to_slots: bool = False,
    low_rank: LowRank | None = None,
    expert_scale: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[s] = c Σ_p W_p[e]ᵀ dy_p[s] + Σ_p A_p[e]ᵀ dh_p[s].

    Args:
        dy: rows of P N numbers.
        stacks: one or two uint8 [E, N, row_bytes] of one type and shape.
        out: [S, K].
        slots_per_row, to_slots, low_rank, expert_scale, tiles: see `grouped_matmul_backward`.

    Returns:
        out.
    """
    sizes = {_check_stack(blocks, type, routing) for blocks in stacks}
    if len(sizes) != 1 or len(stacks) > 2:
        raise ValueError(f"{len(stacks)} stacks of sizes {sorted(sizes)}; needed: one, or two of one size.")
    ((num_terms, num_out),) = sizes
    check_input(dy, len(stacks) * num_terms, slots_per_row, routing)
    check_rows_of_slots("out", out, num_out, routing.num_slots)
    if out.numel() == 0:
        return out
    tiles = tiles or tiles_for(routing.num_slots / routing.num_experts, dy.dtype, is_backward=True)
    type_arguments = _type_arguments(type, stacks[0], tiles.columns)
    columns = type_arguments["BLOCKS"] * DECODERS[type].block_size  # type: ignore[operator]
    num_programs = num_tiles(routing.num_slots, routing.num_experts, tiles.rows) * triton.cdiv(num_out, columns)
    grouped_dequant_bwd_kernel[(num_programs,)](
        dy,
        stacks[0],
        stacks[-1],
        p_dx=out,
        p_slot=routing.slot,
        p_bounds=routing.bounds,
        p_expert_scale=dy if expert_scale is None else expert_scale,
        dy_stride=dy.stride(0),
        dx_stride=out.stride(0),
        **low_rank_arguments(low_rank, dy, is_backward=True),
        **type_arguments,
        N=num_terms,
        K=num_out,
        num_experts=routing.num_experts,
        PARTS=len(stacks),
        SLOTS_PER_ROW=slots_per_row,
        TO_SLOTS=to_slots,
        HAS_SCALE=expert_scale is not None,
        BE=triton.next_power_of_2(routing.num_experts),
        BM=tiles.rows,
        BN=tiles.terms,
        PRECISION="ieee" if dy.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def tiles_for(rows_per_expert: float, dtype: torch.dtype, *, is_backward: bool) -> Tiles:
    """Tiles for so many rows of an expert on average."""
    if dtype == torch.float32:
        return FLOAT32_TILES
    table = BACKWARD_TILES if is_backward else FORWARD_TILES
    return next(tiles for limit, tiles in table if rows_per_expert <= limit)


FLOAT32_TILES = Tiles(16, 32, 32, 4, 1)
# of five to nine tried on an H200 with Q4_K at 16, 64 and 128 rows of an expert
FORWARD_TILES = (
    (48, Tiles(32, 64, 256, 4, 2)),
    (96, Tiles(64, 64, 256, 4, 1)),
    (float("inf"), Tiles(128, 128, 256, 8, 1)),
)
BACKWARD_TILES = (
    (48, Tiles(32, 256, 32, 4, 2)),
    (96, Tiles(64, 256, 64, 4, 2)),
    (float("inf"), Tiles(128, 256, 64, 8, 1)),
)
