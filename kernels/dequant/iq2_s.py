"""IQ2_S: 256 weights in 82 bytes, 16 sub-blocks of 16 made of 2 grid rows each.
d f16 | qs uint8[32] | signs uint8[32] | qh uint8[8] | scales uint8[8].

    w[32 i + 8 l + j] = d (0.5 + s) / 4 * grid[qs[4 i + l] | ((qh[i] >> 2 l) & 3) << 8][j] * sign
    s = nibble l // 2 of scales[i], sign = -1 where bit j of signs[4 i + l] is set     i = 0..7, l = 0..3, j = 0..7
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, load_run, sign_tile, unsigned_tile


@triton.jit
def row(p_grid, p_q, high_bits, scale):
    w0, w1 = load_run(p_grid + 8 * (load_byte(p_q) | ((high_bits & 3) << 8)), 8)
    return unsigned_tile(w0, w1) * scale[:, None] * sign_tile(load_byte(p_q + 32))


@triton.jit
def decode(p_block, o_lane, p_grid):
    i = o_lane // 2
    first = o_lane % 2
    d = load_half(p_block)
    high_bits = load_byte(p_block + 66 + i) >> (2 * first)
    scales = load_byte(p_block + 74 + i)
    p_q = p_block + 2 + 4 * i + first
    return (
        row(p_grid, p_q, high_bits, d * (0.5 + (scales & 15).to(tl.float32)) * 0.25),
        row(p_grid, p_q + 2, high_bits >> 4, d * (0.5 + (scales >> 4).to(tl.float32)) * 0.25),
    )
