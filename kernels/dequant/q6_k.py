"""Q6_K: 256 weights in 210 bytes, 16 sub-blocks of 16. ql uint8[128] | qh uint8[64] | scales int8[16] | d f16.

w[128 n + 32 r + l] = d scales[8 n + 2 r + l // 16] (low | ((qh[32 n + l] >> 2 r) & 3) << 4) - 32)
low = ql[64 n + 32 (r % 2) + l] & 15 for r < 2, >> 4 for r >= 2     n = 0..1, r = 0..3, l = 0..31
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_half, load_run, unsigned_tile


@triton.jit
def quarter(p_scale, d, w0, w1, h0, h1):
    scale = tl.load(p_scale.to(tl.pointer_type(tl.int8))).to(tl.float32)
    quants = unsigned_tile((w0 & 0x0F0F0F0F) | (h0 & 0x30303030), (w1 & 0x0F0F0F0F) | (h1 & 0x30303030))
    return (quants - 32.0) * (d * scale)[:, None]


@triton.jit
def decode(p_block, o_lane, p_grid):
    half = o_lane // 4
    l_first = o_lane % 4 * 8
    d = load_half(p_block + 208)
    p_low = p_block + 64 * half + l_first
    even0, even1 = load_run(p_low, 2)
    odd0, odd1 = load_run(p_low + 32, 2)
    h0, h1 = load_run(p_block + 128 + 32 * half + l_first, 2)
    p_scale = p_block + 192 + 8 * half + l_first // 16
    return (
        quarter(p_scale, d, even0, even1, h0 << 4, h1 << 4),
        quarter(p_scale + 2, d, odd0, odd1, h0 << 2, h1 << 2),
        quarter(p_scale + 4, d, even0 >> 4, even1 >> 4, h0, h1),
        quarter(p_scale + 6, d, odd0 >> 4, odd1 >> 4, h0 >> 2, h1 >> 2),
    )
