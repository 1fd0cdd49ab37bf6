"""Q4_1: 32 weights in 20 bytes. d f16 | m f16 | qs uint8[16].

w[j] = d (qs[j] & 15) + m     w[j + 16] = d (qs[j] >> 4) + m     j = 0..15
"""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks it up in the globals of every device function)
from pyggtrain.kernels.dequant.unpack import load_half, load_run, unsigned_tile


@triton.jit
def decode(p_block, o_lane, p_grid):
    d = load_half(p_block)[:, None]
    m = load_half(p_block + 2)[:, None]
    w0, w1 = load_run(p_block + 4 + 8 * o_lane, 4)
    low = unsigned_tile(w0 & 0x0F0F0F0F, w1 & 0x0F0F0F0F)
    high = unsigned_tile((w0 >> 4) & 0x0F0F0F0F, (w1 >> 4) & 0x0F0F0F0F)
    return low * d + m, high * d + m
