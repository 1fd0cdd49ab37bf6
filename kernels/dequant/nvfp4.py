"""NVFP4: 64 weights in 36 bytes, E2M1 with one unsigned E4M3 scale for every 16. scales uint8[4] | qs uint8[32].

w[16 s + j]     = scale[s] values[qs[8 s + j] & 15]
w[16 s + 8 + j] = scale[s] values[qs[8 s + j] >> 4]     s = 0..3, j = 0..7
values = twice E2M1, scale = half of E4M3 and 0 for the NaN code 0x7F. The tensor's own float32 scale is another tensor.
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import e2m1_tile, load_byte, load_run


@triton.jit
def decode(p_block, o_lane, p_grid):
    code = load_byte(p_block + o_lane)
    # 4 bits of exponent and 3 of mantissa in the place of a float16's: bias 15 instead of 7, and half of it
    scale = ((code & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 128.0
    scale = tl.where(code == 127, 0.0, scale)[:, None]
    w0, w1 = load_run(p_block + 4 + 8 * o_lane, 4)
    return e2m1_tile(w0, w1) * scale, e2m1_tile(w0 >> 4, w1 >> 4) * scale
