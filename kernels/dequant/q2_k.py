"""Q2_K: 256 weights in 84 bytes, 16 sub-blocks of 16. scales uint8[16] | qs uint8[64] | d f16 | dmin f16.

w[128 n + 32 r + l] = d (s & 15) ((qs[32 n + l] >> 2 r) & 3) - dmin (s >> 4),  s = scales[8 n + 2 r + l // 16]
n = 0..1, r = 0..3, l = 0..31
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, load_run, unsigned_tile


@triton.jit
def quarter(p_scale, d, dmin, w0, w1):
    s = load_byte(p_scale)
    scale = (d * (s & 15).to(tl.float32))[:, None]
    minimum = (dmin * (s >> 4).to(tl.float32))[:, None]
    return unsigned_tile(w0 & 0x03030303, w1 & 0x03030303) * scale - minimum


@triton.jit
def decode(p_block, o_lane, p_grid):
    half = o_lane // 4
    l_first = o_lane % 4 * 8
    d = load_half(p_block + 80)
    dmin = load_half(p_block + 82)
    w0, w1 = load_run(p_block + 16 + 32 * half + l_first, 4)
    p_scale = p_block + 8 * half + l_first // 16
    return (
        quarter(p_scale, d, dmin, w0, w1),
        quarter(p_scale + 2, d, dmin, w0 >> 2, w1 >> 2),
        quarter(p_scale + 4, d, dmin, w0 >> 4, w1 >> 4),
        quarter(p_scale + 6, d, dmin, w0 >> 6, w1 >> 6),
    )
