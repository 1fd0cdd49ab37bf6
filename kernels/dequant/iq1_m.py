"""IQ1_M: 256 weights in 56 bytes, 16 sub-blocks of 16 made of 2 grid rows each.
qs uint8[32] | qh uint8[16] | scales u16[4].

w[32 i + 8 l + j] = d (2 s + 1) (grid[qs[4 i + l] | (x & 7) << 8][j] + delta),  x = nibble l % 2 of qh[2 i + l // 2]
s = 3 bits of scales[i // 2] from bit 6 (i % 2) + 3 (l // 2); delta = -1/8 where bit 3 of x is set, else 1/8
d = float16 made of the top nibbles of scales[0..3], lowest first     i = 0..7, l = 0..3, j = 0..7
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_byte, load_run, load_short, signed_tile


@triton.jit
def row(p_grid, low_bits, x, d, scale_bits):
    w0, w1 = load_run(p_grid + 8 * (low_bits | ((x & 7) << 8)), 8)
    delta = tl.where((x & 8) != 0, -0.125, 0.125)[:, None]
    return (signed_tile(w0, w1) + delta) * (d * (2 * (scale_bits & 7) + 1).to(tl.float32))[:, None]


@triton.jit
def decode(p_block, o_lane, p_grid):
    i = o_lane // 2
    first = o_lane % 2
    w0, w1 = load_run(p_block + 48, 8)
    bits = ((w0 >> 12) & 15) | ((w0 >> 24) & 0xF0) | ((w1 >> 4) & 0xF00) | ((w1 >> 16) & 0xF000)
    d = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    scale_bits = load_short(p_block + 48 + i // 2 * 2) >> (6 * (i % 2))
    p_q = p_block + 4 * i + first
    p_x = p_block + 32 + 2 * i
    return (
        row(p_grid, load_byte(p_q), load_byte(p_x) >> (4 * first), d, scale_bits),
        row(p_grid, load_byte(p_q + 2), load_byte(p_x + 1) >> (4 * first), d, scale_bits >> 3),
    )
