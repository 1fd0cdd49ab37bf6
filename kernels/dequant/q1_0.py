"""Q1_0: 128 weights in 18 bytes, one bit each. d f16 | qs uint8[16].

w[8 b + i] = d where bit i of qs[b] is set, else -d     b = 0..15, i = 0..7
"""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks it up in the globals of every device function)
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, sign_tile


@triton.jit
def decode(p_block, o_lane, p_grid):
    minus_d = -load_half(p_block)[:, None]
    p_q = p_block + 2 + o_lane // 2 * 4 + o_lane % 2
    return sign_tile(load_byte(p_q)) * minus_d, sign_tile(load_byte(p_q + 2)) * minus_d
