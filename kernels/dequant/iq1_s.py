"""IQ1_S: 256 weights in 50 bytes, 8 sub-blocks of 32 made of 4 grid rows each. d f16 | qs uint8[32] | qh u16[8].

w[32 i + 8 l + j] = d (2 s + 1) (grid[qs[4 i + l] | ((qh[i] >> 3 l) & 7) << 8][j] + delta)
s = bits 12-14 of qh[i], delta = -1/8 where bit 15 is set, else 1/8     i = 0..7, l = 0..3, j = 0..7
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, load_run, load_short, signed_tile


@triton.jit
def row(p_grid, index, scale, delta):
    w0, w1 = load_run(p_grid + 8 * index, 8)
    return (signed_tile(w0, w1) + delta) * scale


@triton.jit
def decode(p_block, o_lane, p_grid):
    i = o_lane // 2
    first = o_lane % 2
    qh = load_short(p_block + 34 + 2 * i)
    scale = (load_half(p_block) * (2 * ((qh >> 12) & 7) + 1).to(tl.float32))[:, None]
    delta = tl.where((qh & 0x8000) != 0, -0.125, 0.125)[:, None]
    p_q = p_block + 2 + 4 * i + first
    high_bits = qh >> (3 * first)
    return (
        row(p_grid, load_byte(p_q) | ((high_bits & 7) << 8), scale, delta),
        row(p_grid, load_byte(p_q + 2) | (((high_bits >> 6) & 7) << 8), scale, delta),
    )
