"""The one dequantisation kernel: lanes of a type's `decode` side by side, 16-byte stores, nothing shared between lanes.

A program takes LANES lanes. Lane t of a row writes `runs` runs that start at weight
`(t // P) * P * 8 * runs + (t % P) * 8 + r * run_stride` with P = run_stride / 8 lanes side by side, so a
warp's store covers whole 32-byte sectors. The last program points its spare lanes at its last real one and masks only
the store: decoders need no masks. Memory bound: about 2 bytes written per weight against 0.2 to 1.1 read.
"""

import importlib
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.dequant.grids import grid_on


@triton.jit
def dequantize_kernel(
    p_blocks,
    p_out,
    p_grid,
    num_lanes,
    out_stride,
    decode: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LANES_PER_BLOCK: tl.constexpr,
    LANES_PER_ROW: tl.constexpr,  # 0: rows of out touch, so nobody needs to know where one ends
    RUNS: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    LANES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * LANES
    left = tl.minimum(num_lanes - first, LANES).to(tl.int32)
    o_lane = tl.arange(0, LANES)
    o_real = tl.minimum(o_lane, left - 1)

    # LANES is a multiple of LANES_PER_BLOCK, so a program starts at a block: one 64-bit product per program, not per
    # lane
    p_block = p_blocks + first // LANES_PER_BLOCK * BLOCK_BYTES + o_real // LANES_PER_BLOCK * BLOCK_BYTES
    runs = decode(p_block, o_real % LANES_PER_BLOCK, p_grid)

    PARALLEL: tl.constexpr = RUN_STRIDE // 8
    if LANES_PER_ROW == 0:
        p_lane = p_out + first * (8 * RUNS) + (o_lane // PARALLEL * (PARALLEL * 8 * RUNS) + o_lane % PARALLEL * 8)
    else:
        o_flat = (first + o_lane).to(tl.int32)
        o_row = o_flat // LANES_PER_ROW
        o_column = o_flat - o_row * LANES_PER_ROW
        p_lane = (
            p_out
            + o_row.to(tl.int64) * out_stride
            + (o_column // PARALLEL * (PARALLEL * 8 * RUNS) + o_column % PARALLEL * 8)
        )
    p_run = p_lane[:, None] + tl.arange(0, 8)[None, :]
    m_run = (o_lane < left)[:, None]
    for r in tl.static_range(RUNS):
        tl.store(p_run + r * RUN_STRIDE, runs[r].to(p_out.dtype.element_ty), mask=m_run)


@cache
def decoder_of(type: str) -> Any:
    """The device function `decode` of a type."""
    return importlib.import_module(f"pyggtrain.kernels.dequant.{type.lower()}").decode


def launch(blocks: torch.Tensor, type: str, out: torch.Tensor) -> None:
    """Run the kernel; shapes were checked by `dequantize`."""
    decoder = DECODERS[type]
    if blocks.data_ptr() % decoder.alignment:
        raise ValueError(
            f"blocks of {type} start at address {blocks.data_ptr():#x}; needed: a multiple of {decoder.alignment}. "
            "Copy them to a fresh tensor."
        )
    rows, num_columns = out.shape
    lanes_per_block = decoder.block_size // (8 * decoder.runs)
    lanes_per_row = num_columns // (8 * decoder.runs)
    num_lanes = rows * lanes_per_row
    is_dense = rows == 1 or out.stride(0) == num_columns
    if not is_dense and num_lanes >= 2**31:
        raise ValueError(f"out has {num_lanes} lanes in strided rows; needed: fewer than 2^31. Dequantise it in parts.")
    if num_lanes == 0:
        return
    lanes = max(LANES, lanes_per_block)
    dequantize_kernel[(triton.cdiv(num_lanes, lanes),)](
        blocks,
        out,
        grid_on(decoder.grid, blocks.device) if decoder.grid else blocks,
        num_lanes,
        out.stride(0),
        decode=decoder_of(type),
        BLOCK_BYTES=decoder.block_bytes,
        LANES_PER_BLOCK=lanes_per_block,
        LANES_PER_ROW=0 if is_dense else lanes_per_row,
        RUNS=decoder.runs,
        RUN_STRIDE=decoder.run_stride,
        LANES=lanes,
        num_warps=NUM_WARPS,
    )


# of seven tried on nine types on an H200: within 2 % of the best for seven, within 8 % for IQ3_S and TQ1_0
LANES = 128
NUM_WARPS = 4
