"""MXFP4: 32 weights in 17 bytes, E2M1 with one power of two (OCP Microscaling Formats 1.0). e uint8 | qs uint8[16].

w[j] = 2^(e - 128) values[qs[j] & 15]     w[j + 16] = 2^(e - 128) values[qs[j] >> 4]     j = 0..15
values = twice E2M1: 0 1 2 3 4 6 8 12 and their negatives
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import e2m1_tile, load_byte, load_run


@triton.jit
def decode(p_block, o_lane, p_grid):
    e = load_byte(p_block)
    # exponents below -126 need a subnormal float32, which ggml spells out and so does this
    scale = tl.where(e < 2, 0x00200000 << (e & 1), (e - 1) << 23).to(tl.float32, bitcast=True)[:, None]
    w0, w1 = load_run(p_block + 1 + 8 * o_lane, 1)
    return e2m1_tile(w0, w1) * scale, e2m1_tile(w0 >> 4, w1 >> 4) * scale
