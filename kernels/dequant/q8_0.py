"""Q8_0: 32 weights in 34 bytes. d f16 | qs int8[32].

w[j] = d qs[j]
"""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks it up in the globals of every device function)
from pyggtrain.kernels.dequant.unpack import load_half, load_run, signed_tile


@triton.jit
def decode(p_block, o_lane, p_grid):
    d = load_half(p_block)[:, None]
    first0, first1 = load_run(p_block + 2 + 8 * o_lane, 2)
    second0, second1 = load_run(p_block + 18 + 8 * o_lane, 2)
    return signed_tile(first0, first1) * d, signed_tile(second0, second1) * d
