"""IQ2_XXS: 256 weights in 66 bytes, 8 sub-blocks of 32 made of 4 grid rows each. d f16 | (index uint8[4], aux u32)[8].

w[32 i + 8 l + j] = d (0.5 + (aux[i] >> 28)) / 4 * grid[index[i][l]][j] * sign,  sign = -1 where bit j of signs is set
signs = the 7 bits of aux[i] from bit 7 l, and an eighth for even parity     i = 0..7, l = 0..3, j = 0..7
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import (
    load_byte,
    load_half,
    load_run,
    load_word,
    parity_signs,
    sign_tile,
    unsigned_tile,
)


@triton.jit
def row(p_grid, index, signs, scale):
    w0, w1 = load_run(p_grid + 8 * index, 8)
    return unsigned_tile(w0, w1) * scale * sign_tile(parity_signs(signs & 127))


@triton.jit
def decode(p_block, o_lane, p_grid):
    first = o_lane % 2
    p_sub = p_block + 2 + 8 * (o_lane // 2)
    aux = load_word(p_sub + 4, 2)
    scale = (load_half(p_block) * (0.5 + ((aux >> 28) & 15).to(tl.float32)) * 0.25)[:, None]
    signs = aux >> (7 * first)
    return (
        row(p_grid, load_byte(p_sub + first), signs, scale),
        row(p_grid, load_byte(p_sub + first + 2), signs >> 14, scale),
    )
