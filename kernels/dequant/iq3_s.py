"""IQ3_S: 256 weights in 110 bytes, 8 sub-blocks of 32 made of 8 grid rows of 4.
d f16 | qs uint8[64] | qh uint8[8] | signs uint8[32] | scales uint8[4].

    w[32 i + 8 l + 4 h + j] = d (1 + 2 s) * grid[qs[8 i + 2 l + h] | (bit 2 l + h of qh[i]) << 8][j] * sign
    s = nibble i % 2 of scales[i // 2]; sign = -1 where bit 4 h + j of signs[4 i + l] is set
    i = 0..7, l = 0..3, h = 0..1, j = 0..3
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, load_short, load_word, sign_tile, unsigned_tile


@triton.jit
def row(p_grid, pair, high_bits, signs, scale):
    w0 = load_word(p_grid + 4 * (pair & 255 | ((high_bits & 1) << 8)), 4)
    w1 = load_word(p_grid + 4 * ((pair >> 8) | ((high_bits & 2) << 7)), 4)
    return unsigned_tile(w0, w1) * scale * sign_tile(signs)


@triton.jit
def decode(p_block, o_lane, p_grid):
    i = o_lane // 2
    first = o_lane % 2
    nibble = (load_byte(p_block + 106 + i // 2) >> (4 * (i % 2))) & 15
    scale = (load_half(p_block) * (1 + 2 * nibble).to(tl.float32))[:, None]
    high_bits = load_byte(p_block + 66 + i) >> (2 * first)
    p_pair = p_block + 2 + 8 * i + 2 * first
    p_signs = p_block + 74 + 4 * i + first
    return (
        row(p_grid, load_short(p_pair), high_bits, load_byte(p_signs), scale),
        row(p_grid, load_short(p_pair + 4), high_bits >> 4, load_byte(p_signs + 2), scale),
    )
