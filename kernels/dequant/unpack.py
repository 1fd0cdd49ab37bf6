"""From packed bytes to float tiles: the few device functions that the decoders of all ggml types are made of.

A *run* is 8 consecutive weights. It is the unit of work because 8 bfloat16 are one 16-byte store, and because every
ggml grid holds 8 weights or half of them. A lane unpacks a run as two 32-bit words of 4 bytes each, one byte a weight,
little endian: byte i of `w0` is weight i, byte i of `w1` is weight 4 + i.
"""

import triton
import triton.language as tl


@triton.jit
def load_half(p):
    """The float16 at byte address `p`, as float32. Blocks that hold a half start at even addresses."""
    return tl.load(p.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def load_byte(p):
    """The byte at `p`, as int32 in 0..255."""
    return tl.load(p).to(tl.int32)


@triton.jit
def load_short(p):
    """The two bytes at even address `p`, as int32 in 0..65535."""
    return tl.load(p.to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def load_word(p, ALIGN: tl.constexpr):
    """The 4 bytes at `p` as int32; `p` is a multiple of ALIGN, and a wider load than that would trap."""
    if ALIGN >= 4:
        return tl.load(p.to(tl.pointer_type(tl.int32)))
    elif ALIGN == 2:
        return load_short(p) | (load_short(p + 2) << 16)
    else:
        return load_byte(p) | (load_byte(p + 1) << 8) | (load_byte(p + 2) << 16) | (load_byte(p + 3) << 24)


@triton.jit
def load_run(p, ALIGN: tl.constexpr):
    """The 8 bytes at `p` as two words (w0, w1)."""
    if ALIGN >= 8:
        q = tl.load(p.to(tl.pointer_type(tl.int64)))
        return q.to(tl.int32), (q >> 32).to(tl.int32)
    else:
        return load_word(p, ALIGN), load_word(p + 4, ALIGN)


@triton.jit
def spread_bits(bits):
    """Bit i of `bits` (i < 8) into byte i of two words, as 0 or 1.

    Multiplying 4 bits by 1 + 2^7 + 2^14 + 2^21 puts bit i at 8 i and never carries.
    """
    return ((bits & 15) * 0x00204081) & 0x01010101, (((bits >> 4) & 15) * 0x00204081) & 0x01010101


@triton.jit
def tile(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight tensors [...] side by side: [..., 8]. Costs nothing, as one thread holds all eight."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), v0.shape + [8])  # noqa: RUF005 (Triton does not compile the star)


@triton.jit
def unsigned_tile(w0, w1):
    """Bytes 0..255 of a run as float32 [..., 8]."""
    return tile(
        w0 & 255,
        (w0 >> 8) & 255,
        (w0 >> 16) & 255,
        (w0 >> 24) & 255,
        w1 & 255,
        (w1 >> 8) & 255,
        (w1 >> 16) & 255,
        (w1 >> 24) & 255,
    ).to(tl.float32)


@triton.jit
def signed_tile(w0, w1):
    """Bytes -128..127 of a run as float32 [..., 8]."""
    return tile(
        (w0 << 24) >> 24,
        (w0 << 16) >> 24,
        (w0 << 8) >> 24,
        w0 >> 24,
        (w1 << 24) >> 24,
        (w1 << 16) >> 24,
        (w1 << 8) >> 24,
        w1 >> 24,
    ).to(tl.float32)


@triton.jit
def sign_tile(bits):
    """Bit i of `bits` as the factor of weight i: set means -1, clear means +1. float32 [..., 8]."""
    return tile(
        1 - 2 * (bits & 1),
        1 - 2 * ((bits >> 1) & 1),
        1 - 2 * ((bits >> 2) & 1),
        1 - 2 * ((bits >> 3) & 1),
        1 - 2 * ((bits >> 4) & 1),
        1 - 2 * ((bits >> 5) & 1),
        1 - 2 * ((bits >> 6) & 1),
        1 - 2 * ((bits >> 7) & 1),
    ).to(tl.float32)


@triton.jit
def parity_signs(seven):
    """ggml's `ksigns_iq2xs`: 7 stored sign bits and an eighth that makes the number of set bits even."""
    fold = seven ^ (seven >> 4)
    fold = fold ^ (fold >> 2)
    return seven | (((fold ^ (fold >> 1)) & 1) << 7)


@triton.jit
def lookup_tile(p_table, w0, w1):
    """Each byte of a run as an index into a float32 table: [..., 8]. The table must stay in the first-level cache."""
    return tile(
        tl.load(p_table + (w0 & 255)),
        tl.load(p_table + ((w0 >> 8) & 255)),
        tl.load(p_table + ((w0 >> 16) & 255)),
        tl.load(p_table + ((w0 >> 24) & 255)),
        tl.load(p_table + (w1 & 255)),
        tl.load(p_table + ((w1 >> 8) & 255)),
        tl.load(p_table + ((w1 >> 16) & 255)),
        tl.load(p_table + ((w1 >> 24) & 255)),
    )


@triton.jit
def e2m1_tile(w0, w1):
    """Four-bit floats (sign, 2 bits of exponent, 1 of mantissa) in the low halves of a run's bytes, doubled: float32
    [..., 8].

    The three low bits moved to the exponent of a float16 are the value over 2^15, subnormals included. ggml's table
    holds +0 for both zeros, and adding +0 turns -0 into it.
    """
    nibbles = tile(w0, w0 >> 8, w0 >> 16, w0 >> 24, w1, w1 >> 8, w1 >> 16, w1 >> 24)
    bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 32768.0 + 0.0


@triton.jit
def scale_min_pair(p_scales, chunk):
    """Scales and minimums of sub-blocks 2 chunk and 2 chunk + 1 of a Q4_K or Q5_K block, 6 bits each.

    Two bytes at a time: the low byte of each result belongs to the even sub-block. `p_scales` points to the 12 bytes
    that `get_scale_min_k4` of ggml-quants.c reads; sub-blocks 0-3 keep their 6 bits whole, 4-7 borrow the upper two
    bits of bytes 0-7.
    """
    j = 2 * chunk
    whole = chunk < 2
    a = load_short(p_scales + j)
    b = load_short(p_scales + j + 4)
    c = load_short(p_scales + tl.where(whole, j, j - 4))
    scale = tl.where(whole, a & 0x3F3F, (b & 0x0F0F) | ((c >> 2) & 0x3030))
    minimum = tl.where(whole, b & 0x3F3F, ((b >> 4) & 0x0F0F) | ((a >> 2) & 0x3030))
    return scale, minimum
