"""Q2_0: 64 weights in 18 bytes, 2 bits each. d f16 | qs uint8[16].

w[4 b + i] = d (((qs[b] >> 2 i) & 3) - 1)     b = 0..15, i = 0..3
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_half, load_short, tile


@triton.jit
def run(bits, d):
    quants = tile(
        bits & 3,
        (bits >> 2) & 3,
        (bits >> 4) & 3,
        (bits >> 6) & 3,
        (bits >> 8) & 3,
        (bits >> 10) & 3,
        (bits >> 12) & 3,
        (bits >> 14) & 3,
    )
    return (quants.to(tl.float32) - 1.0) * d


@triton.jit
def decode(p_block, o_lane, p_grid):
    d = load_half(p_block)[:, None]
    p_q = p_block + 2 + o_lane // 2 * 8 + o_lane % 2 * 2
    return run(load_short(p_q), d), run(load_short(p_q + 4), d)
