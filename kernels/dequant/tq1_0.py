"""TQ1_0: 256 ternary weights in 54 bytes, 5 digits a byte in base 3. qs uint8[48] | qh uint8[4] | d f16.

w[32 n + m]       = d (digit n of qs[m] - 1)           n = 0..4, m = 0..31
w[160 + 16 n + m] = d (digit n of qs[32 + m] - 1)      n = 0..4, m = 0..15
w[240 + 4 n + m]  = d (digit n of qh[m] - 1)           n = 0..3, m = 0..3
digit n of b = 3 (3^n b mod 256) // 256
"""

import triton
import triton.language as tl
from pyggtrain.kernels.dequant.unpack import load_half, load_word, tile


@triton.jit
def power_of_3(n):
    return tl.where(n == 0, 1, tl.where(n == 1, 3, tl.where(n == 2, 9, tl.where(n == 3, 27, 81))))


@triton.jit
def digit(byte, power):
    return (((byte & 255) * power) & 255) * 3 >> 8


@triton.jit
def decode(p_block, o_lane, p_grid):
    # lanes 0-19, 20-29 and 30-31 read the three areas; in the last one a run is 4 bytes seen at two digits
    is_first = o_lane < 20
    is_last = o_lane >= 30
    n0 = tl.where(is_first, o_lane // 4, tl.where(is_last, 2 * (o_lane - 30), (o_lane - 20) // 2))
    power0 = power_of_3(n0)
    power1 = tl.where(is_last, power0 * 3, power0)
    start = tl.where(is_first, o_lane % 4 * 8, tl.where(is_last, 48, 32 + (o_lane - 20) % 2 * 8))
    w0 = load_word(p_block + start, 2)
    w1 = load_word(p_block + start + tl.where(is_last, 0, 4), 2)
    digits = tile(
        digit(w0, power0),
        digit(w0 >> 8, power0),
        digit(w0 >> 16, power0),
        digit(w0 >> 24, power0),
        digit(w1, power1),
        digit(w1 >> 8, power1),
        digit(w1 >> 16, power1),
        digit(w1 >> 24, power1),
    )
    return ((digits.to(tl.float32) - 1.0) * load_half(p_block + 52)[:, None],)
