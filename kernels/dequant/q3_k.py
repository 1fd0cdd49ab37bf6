"""Q3_K: 256 weights in 110 bytes, 16 sub-blocks of 16. hmask uint8[32] | qs uint8[64] | scales uint8[12] | d f16.

w[128 n + 32 r + l] = d (s[8 n + 2 r + l // 16] - 32) (((qs[32 n + l] >> 2 r) & 3) + 4 (bit 4 n + r of hmask[l]) - 4)
s[i] = (scales[i] & 15 for i < 8, else scales[i - 8] >> 4) | ((scales[8 + i % 4] >> 2 (i // 4)) & 3) << 4
n = 0..1, r = 0..3, l = 0..31
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, load_run, unsigned_tile


@triton.jit
def quarter(scale, d, w0, w1, h0, h1):
    quants = unsigned_tile((w0 & 0x03030303) | ((h0 & 0x01010101) << 2), (w1 & 0x03030303) | ((h1 & 0x01010101) << 2))
    return (quants - 4.0) * (d * (scale - 32).to(tl.float32))[:, None]


@triton.jit
def decode(p_block, o_lane, p_grid):
    half = o_lane // 4
    l_first = o_lane % 4 * 8
    upper = l_first // 16
    d = load_half(p_block + 108)
    w0, w1 = load_run(p_block + 32 + 32 * half + l_first, 2)
    h0, h1 = load_run(p_block + l_first, 2)
    h0 = h0 >> (4 * half)
    h1 = h1 >> (4 * half)
    p_low = p_block + 96 + upper
    even = load_byte(p_low + 8) >> (4 * half)
    odd = load_byte(p_low + 10) >> (4 * half)
    return (
        quarter((load_byte(p_low) >> (4 * half)) & 15 | ((even & 3) << 4), d, w0, w1, h0, h1),
        quarter((load_byte(p_low + 2) >> (4 * half)) & 15 | ((odd & 3) << 4), d, w0 >> 2, w1 >> 2, h0 >> 1, h1 >> 1),
        quarter((load_byte(p_low + 4) >> (4 * half)) & 15 | ((even & 12) << 2), d, w0 >> 4, w1 >> 4, h0 >> 2, h1 >> 2),
        quarter((load_byte(p_low + 6) >> (4 * half)) & 15 | ((odd & 12) << 2), d, w0 >> 6, w1 >> 6, h0 >> 3, h1 >> 3),
    )
