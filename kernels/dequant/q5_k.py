"""Q5_K: 256 weights in 176 bytes, 8 sub-blocks of 32.
d f16 | dmin f16 | scales uint8[12] | qh uint8[32] | qs uint8[128].

w[64 c + l]      = d s[2 c] (qs[32 c + l] & 15 | (bit 2 c of qh[l]) << 4) - dmin m[2 c]
w[64 c + 32 + l] = d s[2 c + 1] (qs[32 c + l] >> 4 | (bit 2 c + 1 of qh[l]) << 4) - dmin m[2 c + 1]
c = 0..3, l = 0..31; s, m: 6 bits each, see unpack.scale_min_pair
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_half, load_run, scale_min_pair, unsigned_tile


@triton.jit
def decode(p_block, o_lane, p_grid):
    chunk = o_lane // 4
    d = load_half(p_block)
    dmin = load_half(p_block + 2)
    scale, minimum = scale_min_pair(p_block + 4, chunk)
    h0, h1 = load_run(p_block + 16 + o_lane % 4 * 8, 8)
    h0 = h0 >> (2 * chunk)
    h1 = h1 >> (2 * chunk)
    w0, w1 = load_run(p_block + 48 + 8 * o_lane, 8)
    low = unsigned_tile(w0 & 0x0F0F0F0F | ((h0 & 0x01010101) << 4), w1 & 0x0F0F0F0F | ((h1 & 0x01010101) << 4))
    high = unsigned_tile(
        (w0 >> 4) & 0x0F0F0F0F | ((h0 & 0x02020202) << 3), (w1 >> 4) & 0x0F0F0F0F | ((h1 & 0x02020202) << 3)
    )
    return (
        low * (d * (scale & 255).to(tl.float32))[:, None] - (dmin * (minimum & 255).to(tl.float32))[:, None],
        high * (d * (scale >> 8).to(tl.float32))[:, None] - (dmin * (minimum >> 8).to(tl.float32))[:, None],
    )
