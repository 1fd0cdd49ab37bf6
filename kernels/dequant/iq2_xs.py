"""IQ2_XS: 256 weights in 74 bytes, 16 sub-blocks of 16 made of 2 grid rows each. d f16 | qs u16[32] | scales uint8[8].

w[32 i + 8 l + j] = d (0.5 + s) / 4 * grid[q & 511][j] * sign,  q = qs[4 i + l],  s = nibble l // 2 of scales[i]
sign = -1 where bit j of signs is set; signs = q >> 9 and an eighth bit for even parity     i = 0..7, l = 0..3, j = 0..7
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import (
    load_byte,
    load_half,
    load_run,
    load_short,
    parity_signs,
    sign_tile,
    unsigned_tile,
)


@triton.jit
def row(p_grid, q, scale):
    w0, w1 = load_run(p_grid + 8 * (q & 511), 8)
    return unsigned_tile(w0, w1) * scale[:, None] * sign_tile(parity_signs(q >> 9))


@triton.jit
def decode(p_block, o_lane, p_grid):
    i = o_lane // 2
    d = load_half(p_block)
    scales = load_byte(p_block + 66 + i)
    p_q = p_block + 2 + 8 * i + 2 * (o_lane % 2)
    return (
        row(p_grid, load_short(p_q), d * (0.5 + (scales & 15).to(tl.float32)) * 0.25),
        row(p_grid, load_short(p_q + 4), d * (0.5 + (scales >> 4).to(tl.float32)) * 0.25),
    )
