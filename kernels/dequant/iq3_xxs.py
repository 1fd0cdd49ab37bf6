"""IQ3_XXS: 256 weights in 98 bytes, 8 sub-blocks of 32 made of 8 grid rows of 4. d f16 | qs uint8[64] | aux u32[8].

w[32 i + 8 l + 4 h + j] = d (0.5 + (aux[i] >> 28)) / 2 * grid[qs[8 i + 2 l + h]][j] * sign
sign = -1 where bit 4 h + j of signs is set; signs = the 7 bits of aux[i] from bit 7 l, and an eighth for even parity
i = 0..7, l = 0..3, h = 0..1, j = 0..3
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_half, load_short, load_word, parity_signs, sign_tile, unsigned_tile


@triton.jit
def row(p_grid, pair, signs, scale):
    w0 = load_word(p_grid + 4 * (pair & 255), 4)
    w1 = load_word(p_grid + 4 * (pair >> 8), 4)
    return unsigned_tile(w0, w1) * scale * sign_tile(parity_signs(signs & 127))


@triton.jit
def decode(p_block, o_lane, p_grid):
    i = o_lane // 2
    first = o_lane % 2
    aux = load_word(p_block + 66 + 4 * i, 2)
    scale = (load_half(p_block) * (0.5 + ((aux >> 28) & 15).to(tl.float32)) * 0.5)[:, None]
    signs = aux >> (7 * first)
    p_pair = p_block + 2 + 8 * i + 2 * first
    return (
        row(p_grid, load_short(p_pair), signs, scale),
        row(p_grid, load_short(p_pair + 4), signs >> 14, scale),
    )
