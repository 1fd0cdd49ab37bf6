"""IQ4_XS: 256 weights in 136 bytes, 8 sub-blocks of 32. d f16 | scales_h u16 | scales_l uint8[4] | qs uint8[128].

w[32 i + j]      = d (s[i] - 32) values[qs[16 i + j] & 15]
w[32 i + 16 + j] = d (s[i] - 32) values[qs[16 i + j] >> 4]     i = 0..7, j = 0..15
s[i] = nibble i of scales_l | ((scales_h >> 2 i) & 3) << 4
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_byte, load_half, load_run, load_short, lookup_tile


@triton.jit
def decode(p_block, o_lane, p_grid):
    i = o_lane // 2
    low_bits = (load_byte(p_block + 4 + i // 2) >> (4 * (i % 2))) & 15
    scale = low_bits | (((load_short(p_block + 2) >> (2 * i)) & 3) << 4)
    scale = (load_half(p_block) * (scale - 32).to(tl.float32))[:, None]
    w0, w1 = load_run(p_block + 8 + 8 * o_lane, 8)
    low = lookup_tile(p_grid, w0 & 0x0F0F0F0F, w1 & 0x0F0F0F0F)
    high = lookup_tile(p_grid, (w0 >> 4) & 0x0F0F0F0F, (w1 >> 4) & 0x0F0F0F0F)
    return low * scale, high * scale
