"""Dequantisation of every ggml type in plain torch, on any device: one function per type, bytes in, weights out.

Each function takes uint8 [n, block_bytes] and returns float32 [n, block_size], bit-equal to ggml's `dequantize_row_*`
(ggml/src/ggml-quants.c, llama.cpp 0c1e57098). Layouts are written out in the kernel file of the same type.
"""

from collections.abc import Callable

import torch
from pyggtrain.kernels.dequant import DECODERS, check_blocks
from pyggtrain.kernels.dequant.grids import GRIDS, IQ4_VALUES

Blocks = torch.Tensor


def half(blocks: Blocks, offset: int) -> torch.Tensor:
    """float16 field at a byte offset, as float32 [n, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def integers(blocks: Blocks, start: int, stop: int) -> torch.Tensor:
    """Bytes start..stop as int32 [n, stop - start]."""
    return blocks[:, start:stop].int()


def shorts(blocks: Blocks, start: int, stop: int) -> torch.Tensor:
    """Little-endian 16-bit fields as int32 [n, (stop - start) / 2]."""
    low_high = integers(blocks, start, stop).view(len(blocks), -1, 2)
    return low_high[..., 0] | low_high[..., 1] << 8


def words(blocks: Blocks, start: int, stop: int) -> torch.Tensor:
    """Little-endian 32-bit fields as int64 [n, (stop - start) / 4], never negative."""
    low_high = shorts(blocks, start, stop).long().view(len(blocks), -1, 2)
    return low_high[..., 0] | low_high[..., 1] << 16


def fields(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`count` bit fields of each number, lowest first: [..., count]."""
    shifts = torch.arange(count, device=packed.device, dtype=packed.dtype) * bits
    return packed[..., None] >> shifts & (1 << bits) - 1


def nibble_halves(packed: torch.Tensor) -> torch.Tensor:
    """Low nibbles of all bytes, then high nibbles: [..., 2 m] from [..., m]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def quarters(packed: torch.Tensor) -> torch.Tensor:
    """2-bit fields of each 32 bytes, plane after plane: [n, 4 m] from [n, m]."""
    return fields(packed.unflatten(1, (-1, 32)), 2, 4).transpose(-1, -2).flatten(1)


def each(scales: torch.Tensor, count: int) -> torch.Tensor:
    """Every scale `count` times in a row."""
    return scales.repeat_interleave(count, 1)


def signs_of(bits: torch.Tensor) -> torch.Tensor:
    """Set bit -> -1, clear bit -> +1, lowest first: float32 [..., 8]."""
    return 1.0 - 2.0 * fields(bits, 1, 8).float()


def with_parity(seven: torch.Tensor) -> torch.Tensor:
    """The eighth sign bit, which makes the number of set bits even."""
    return seven | (fields(seven, 1, 7).sum(-1) & 1) << 7


def grid(name: str, index: torch.Tensor) -> torch.Tensor:
    """Grid rows as float32 [..., width]."""
    return GRIDS[name].rows().float().to(index.device)[index.long()]


def e2m1_doubled(nibbles: torch.Tensor) -> torch.Tensor:
    table = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    return torch.tensor(table, dtype=torch.float32, device=nibbles.device)[nibbles.long()]


def iq4_values(nibbles: torch.Tensor) -> torch.Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=nibbles.device)[nibbles.long()]


def q1_0(b: Blocks) -> torch.Tensor:
    return -signs_of(integers(b, 2, 18)).flatten(1) * half(b, 0)


def q2_0(b: Blocks) -> torch.Tensor:
    return (fields(integers(b, 2, 18), 2, 4).flatten(1) - 1).float() * half(b, 0)


def q4_0(b: Blocks) -> torch.Tensor:
    return (nibble_halves(integers(b, 2, 18)) - 8).float() * half(b, 0)


def q4_1(b: Blocks) -> torch.Tensor:
    return nibble_halves(integers(b, 4, 20)).float() * half(b, 0) + half(b, 2)


def q5_0(b: Blocks) -> torch.Tensor:
    fifth_bit = fields(integers(b, 2, 6), 1, 8).flatten(1)
    return ((nibble_halves(integers(b, 6, 22)) | fifth_bit << 4) - 16).float() * half(b, 0)


def q5_1(b: Blocks) -> torch.Tensor:
    fifth_bit = fields(integers(b, 4, 8), 1, 8).flatten(1)
    return (nibble_halves(integers(b, 8, 24)) | fifth_bit << 4).float() * half(b, 0) + half(b, 2)


def q8_0(b: Blocks) -> torch.Tensor:
    return b[:, 2:].contiguous().view(torch.int8).float() * half(b, 0)


def q2_k(b: Blocks) -> torch.Tensor:
    packed_scales = integers(b, 0, 16)
    scale = half(b, 80) * (packed_scales & 15).float()
    minimum = half(b, 82) * (packed_scales >> 4).float()
    return each(scale, 16) * quarters(integers(b, 16, 80)).float() - each(minimum, 16)


def q3_k(b: Blocks) -> torch.Tensor:
    third_bit = fields(integers(b, 0, 32), 1, 8).transpose(1, 2).flatten(1)
    packed = integers(b, 96, 108)
    scales = nibble_halves(packed[:, :8]) | fields(packed[:, 8:], 2, 4).transpose(1, 2).flatten(1) << 4
    quants = quarters(integers(b, 32, 96)) + 4 * third_bit - 4
    return each(half(b, 108) * (scales - 32).float(), 16) * quants.float()


def scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and 8 minimums of 6 bits in the 12 bytes of Q4_K and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales, minimums


def q4_k(b: Blocks) -> torch.Tensor:
    scales, minimums = scales_and_minimums(integers(b, 4, 16))
    quants = nibble_halves(integers(b, 16, 144).unflatten(1, (4, 32))).flatten(1)
    return each(half(b, 0) * scales.float(), 32) * quants.float() - each(half(b, 2) * minimums.float(), 32)


def q5_k(b: Blocks) -> torch.Tensor:
    scales, minimums = scales_and_minimums(integers(b, 4, 16))
    fifth_bit = fields(integers(b, 16, 48), 1, 8).transpose(1, 2).flatten(1)
    quants = nibble_halves(integers(b, 48, 176).unflatten(1, (4, 32))).flatten(1) | fifth_bit << 4
    return each(half(b, 0) * scales.float(), 32) * quants.float() - each(half(b, 2) * minimums.float(), 32)


def q6_k(b: Blocks) -> torch.Tensor:
    low = nibble_halves(integers(b, 0, 128).unflatten(1, (2, 64))).flatten(1)
    quants = (low | quarters(integers(b, 128, 192)) << 4) - 32
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    return each(half(b, 208) * scales, 16) * quants.float()


def iq1_s(b: Blocks) -> torch.Tensor:
    qh = shorts(b, 34, 50)
    index = integers(b, 2, 34) | fields(qh, 3, 4).flatten(1) << 8
    delta = torch.where(qh & 0x8000 > 0, -0.125, 0.125)
    scale = half(b, 0) * (2 * (qh >> 12 & 7) + 1).float()
    return ((grid("IQ1", index) + each(delta, 4)[..., None]) * each(scale, 4)[..., None]).flatten(1)


def iq1_m(b: Blocks) -> torch.Tensor:
    packed = shorts(b, 48, 56)
    bits = (packed >> 12 << torch.arange(0, 16, 4, device=b.device, dtype=torch.int32)).sum(1, dtype=torch.int32)
    d = bits.to(torch.int16).view(torch.float16).float()[:, None]
    scale = d * (2 * fields(packed, 3, 4).flatten(1) + 1).float()
    x = fields(integers(b, 32, 48), 4, 2).flatten(1)
    index = integers(b, 0, 32) | (x & 7) << 8
    delta = torch.where(x & 8 > 0, -0.125, 0.125)
    return ((grid("IQ1", index) + delta[..., None]) * each(scale, 2)[..., None]).flatten(1)


def iq2_xxs(b: Blocks) -> torch.Tensor:
    index = integers(b, 2, 66).unflatten(1, (8, 8))[..., :4].flatten(1)
    aux = words(b, 2, 66)[:, 1::2]
    scale = half(b, 0) * (0.5 + (aux >> 28).float()) * 0.25
    signs = signs_of(with_parity(fields(aux, 7, 4).flatten(1)))
    return (each(scale, 4)[..., None] * grid("IQ2_XXS", index) * signs).flatten(1)


def iq2_xs(b: Blocks) -> torch.Tensor:
    q = shorts(b, 2, 66)
    scale = half(b, 0) * (0.5 + fields(integers(b, 66, 74), 4, 2).flatten(1).float()) * 0.25
    return (each(scale, 2)[..., None] * grid("IQ2_XS", q & 511) * signs_of(with_parity(q >> 9))).flatten(1)


def iq2_s(b: Blocks) -> torch.Tensor:
    index = integers(b, 2, 34) | fields(integers(b, 66, 74), 2, 4).flatten(1) << 8
    scale = half(b, 0) * (0.5 + fields(integers(b, 74, 82), 4, 2).flatten(1).float()) * 0.25
    return (each(scale, 2)[..., None] * grid("IQ2_S", index) * signs_of(integers(b, 34, 66))).flatten(1)


def iq3_xxs(b: Blocks) -> torch.Tensor:
    aux = words(b, 66, 98)
    scale = half(b, 0) * (0.5 + (aux >> 28).float()) * 0.5
    signs = signs_of(with_parity(fields(aux, 7, 4).flatten(1))).flatten(1)
    return each(scale, 32) * grid("IQ3_XXS", integers(b, 2, 66)).flatten(1) * signs


def iq3_s(b: Blocks) -> torch.Tensor:
    index = integers(b, 2, 66) | fields(integers(b, 66, 74), 1, 8).flatten(1) << 8
    scale = half(b, 0) * (1 + 2 * fields(integers(b, 106, 110), 4, 2).flatten(1)).float()
    return each(scale, 32) * grid("IQ3_S", index).flatten(1) * signs_of(integers(b, 74, 106)).flatten(1)


def iq4_nl(b: Blocks) -> torch.Tensor:
    return half(b, 0) * iq4_values(nibble_halves(integers(b, 2, 18)))


def iq4_xs(b: Blocks) -> torch.Tensor:
    scales = fields(integers(b, 4, 8), 4, 2).flatten(1) | fields(shorts(b, 2, 4), 2, 8).flatten(1) << 4
    values = iq4_values(nibble_halves(integers(b, 8, 136).unflatten(1, (8, 16))).flatten(1))
    return each(half(b, 0) * (scales - 32).float(), 32) * values


def digits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """`count` base-3 digits of each byte, plane after plane: [n, count m] from [n, m]."""
    powers = torch.tensor((1, 3, 9, 27, 81), device=packed.device, dtype=torch.int32)[:count]
    return ((packed[:, None, :] * powers[:, None] & 255) * 3 >> 8).flatten(1)


def tq1_0(b: Blocks) -> torch.Tensor:
    ternary = (digits(integers(b, 0, 32), 5), digits(integers(b, 32, 48), 5), digits(integers(b, 48, 52), 4))
    return (torch.cat(ternary, 1) - 1).float() * half(b, 52)


def tq2_0(b: Blocks) -> torch.Tensor:
    return (quarters(integers(b, 0, 64)) - 1).float() * half(b, 64)


def mxfp4(b: Blocks) -> torch.Tensor:
    scale = torch.exp2(integers(b, 0, 1).double() - 128).float()
    return e2m1_doubled(nibble_halves(integers(b, 1, 17))) * scale


def nvfp4(b: Blocks) -> torch.Tensor:
    code = integers(b, 0, 4)
    exponent, mantissa = code >> 3 & 15, (code & 7).float()
    magnitude = torch.where(exponent == 0, mantissa / 8, 1 + mantissa / 8) * torch.exp2(
        exponent.clamp(min=1).float() - 7
    )
    scale = torch.where(code == 127, 0.0, magnitude * 0.5)
    return each(scale, 16) * e2m1_doubled(nibble_halves(integers(b, 4, 36).unflatten(1, (4, 8)))).flatten(1)


FUNCTIONS: dict[str, Callable[[Blocks], torch.Tensor]] = {
    "Q1_0": q1_0,
    "Q2_0": q2_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
}


def dequantize(
    blocks: torch.Tensor, type: str, *, dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `pyggtrain.kernels.dequant.dequantize`, on any device; `dtype` may also be float64."""
    rows, num_columns = check_blocks(blocks, type)
    weights = FUNCTIONS[type](blocks.view(-1, DECODERS[type].block_bytes)).view(rows, num_columns)
    return weights.to(dtype) if out is None else out.copy_(weights)
