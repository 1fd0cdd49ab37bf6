"""IQ4_NL: 32 weights in 18 bytes, nibbles index 16 uneven values. d f16 | qs uint8[16].

w[j] = d values[qs[j] & 15]     w[j + 16] = d values[qs[j] >> 4]     j = 0..15
"""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks it up in the globals of every device function)
from pyggtrain.kernels.dequant.unpack import load_half, load_run, lookup_tile


@triton.jit
def decode(p_block, o_lane, p_grid):
    d = load_half(p_block)[:, None]
    w0, w1 = load_run(p_block + 2 + 8 * o_lane, 2)
    low = lookup_tile(p_grid, w0 & 0x0F0F0F0F, w1 & 0x0F0F0F0F)
    high = lookup_tile(p_grid, (w0 >> 4) & 0x0F0F0F0F, (w1 >> 4) & 0x0F0F0F0F)
    return low * d, high * d
