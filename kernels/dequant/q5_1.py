"""Q5_1: 32 weights in 24 bytes. d f16 | m f16 | qh u32 | qs uint8[16].

w[j] = d (qs[j] & 15 | bit j of qh << 4) + m     w[j + 16] = d (qs[j] >> 4 | bit j + 16 of qh << 4) + m     j = 0..15
"""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks it up in the globals of every device function)
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, load_run, spread_bits, unsigned_tile


@triton.jit
def decode(p_block, o_lane, p_grid):
    d = load_half(p_block)[:, None]
    m = load_half(p_block + 2)[:, None]
    w0, w1 = load_run(p_block + 8 + 8 * o_lane, 8)
    h0, h1 = spread_bits(load_byte(p_block + 4 + o_lane))
    low = unsigned_tile(w0 & 0x0F0F0F0F | (h0 << 4), w1 & 0x0F0F0F0F | (h1 << 4))
    h0, h1 = spread_bits(load_byte(p_block + 6 + o_lane))
    high = unsigned_tile((w0 >> 4) & 0x0F0F0F0F | (h0 << 4), (w1 >> 4) & 0x0F0F0F0F | (h1 << 4))
    return low * d + m, high * d + m
