"""TQ2_0: 256 ternary weights in 66 bytes, 2 bits each. qs uint8[64] | d f16.

w[128 n + 32 r + l] = d (((qs[32 n + l] >> 2 r) & 3) - 1)     n = 0..1, r = 0..3, l = 0..31
"""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks it up in the globals of every device function)
from pyggtrain.kernels.dequant.unpack import load_half, load_run, unsigned_tile


@triton.jit
def quarter(d, w0, w1):
    return (unsigned_tile(w0 & 0x03030303, w1 & 0x03030303) - 1.0) * d


@triton.jit
def decode(p_block, o_lane, p_grid):
    d = load_half(p_block + 64)[:, None]
    w0, w1 = load_run(p_block + 8 * o_lane, 2)
    return quarter(d, w0, w1), quarter(d, w0 >> 2, w1 >> 2), quarter(d, w0 >> 4, w1 >> 4), quarter(d, w0 >> 6, w1 >> 6)
