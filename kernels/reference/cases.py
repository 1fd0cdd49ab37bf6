"""The cases that tests, the self-test and the benchmarks of all kernels run: one list, so that a speed is never quoted
for a shape that nobody checks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pyggtrain.kernels.dequant import DECODERS
from pyggtrain.kernels.reference.comparison import as_close_as_torch

HALF_OFFSETS: dict[str, tuple[int, ...]] = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "MXFP4": (),
    "NVFP4": (),
}
"""Byte offsets of the float16 fields in a block; types not listed have one, at 0."""
_BYTE_SCALES = {"MXFP4": (1, 116), "NVFP4": (4, 32)}
"""Type -> how many bytes at a block's start are its scales, and the least of eight neighbours of usual size."""


def random_blocks(
    type: str, rows: int, num_columns: int, *, generator: torch.Generator, magnitude: float = 1e-2
) -> torch.Tensor:
    """Random valid blocks: every bit of the packed weights random, scales finite, about `magnitude`, of either sign.

    One half in sixteen is a float16 subnormal, because that is where a decoder that handles halves by hand goes wrong.

    Args:
        num_columns: a multiple of the type's block size.
        generator: its device is where the blocks are made.

    Returns:
        uint8 [rows, row_bytes] on the generator's device.
    """
    decoder = DECODERS[type]
    device = generator.device
    num_blocks = rows * num_columns // decoder.block_size
    blocks = torch.randint(
        0, 256, (num_blocks, decoder.block_bytes), dtype=torch.uint8, device=device, generator=generator
    )
    for offset in HALF_OFFSETS.get(type, (0,)):
        halves = torch.randn(num_blocks, 1, device=device, generator=generator) * magnitude
        halves = torch.where(
            torch.rand(num_blocks, 1, device=device, generator=generator) < 1 / 16, halves * 2e-3, halves
        )
        blocks[:, offset : offset + 2] = halves.to(torch.float16).view(torch.uint8)
    if type == "IQ1_M":
        # the half is spread over the top nibbles of bytes 49, 51, 53, 55; its exponent lives in the last
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x20
    if type == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 250
    if type == "NVFP4":
        blocks[:, :4] &= 127
    return blocks.view(rows, -1)


def random_factors(type: str, rows: int, num_columns: int, *, generator: torch.Generator) -> torch.Tensor:
    """As `random_blocks`, for products: of types whose scales are a byte those that leave every sum finite."""
    blocks = random_blocks(type, rows, num_columns, generator=generator)
    if type in _BYTE_SCALES:
        num_scales, least = _BYTE_SCALES[type]
        scales = blocks.view(-1, DECODERS[type].block_bytes)[:, :num_scales]
        scales.copy_(scales % 8 + least)
    return blocks


@dataclass(frozen=True)
class DequantizeCase:
    """Shape of one dequantisation: `num_columns` in blocks, so that one case suits every block size."""

    rows: int
    row_blocks: int
    out_padding: int = 0
    """Columns that the rows of `out` keep free behind the weights."""

    @property
    def id(self) -> str:
        return f"{self.rows}x{self.row_blocks}blocks" + (f"_pad{self.out_padding}" if self.out_padding else "")


DEQUANTIZE_CASES = (
    DequantizeCase(1, 1),
    DequantizeCase(5, 3, out_padding=48),
    DequantizeCase(9, 4),
)


@dataclass(frozen=True)
class DequantMatmulCase:
    """`tokens` rows times a weight of `rows` x at least `columns`, whole blocks; the sum in `num_parts` parts, None: as
    is usual.
    """

    tokens: int
    rows: int
    columns: int
    num_parts: int | None = None
    is_added: bool = False
    """Whether the product is added to what is there."""

    @property
    def id(self) -> str:
        parts = f"_{self.num_parts}parts" if self.num_parts else ""
        return f"{self.tokens}x{self.rows}x{self.columns}{parts}" + "_added" * self.is_added


# one for each type, as each takes seconds to compile; the other shapes run through the same code whatever the type
# (288 columns of blocks of 32 end within a tile)
DEQUANT_MATMUL_CASES = (DequantMatmulCase(13, 130, 288, num_parts=2, is_added=True),)
DEQUANT_MATMUL_SHAPE_CASES = (
    DequantMatmulCase(1, 70, 768),
    DequantMatmulCase(130, 64, 256),
    DequantMatmulCase(33, 1, 32, is_added=True),
    DequantMatmulCase(16, 200, 1280, num_parts=5),
)


@dataclass(frozen=True)
class RowCase:
    """`tokens` rows of `width` columns, as slices of rows `gap` columns wider."""

    tokens: int
    width: int
    gap: int = 0

    @property
    def id(self) -> str:
        return f"{self.tokens}x{self.width}" + (f"_gap{self.gap}" if self.gap else "")


# 2880 (gpt-oss) is five times a power of two and more: a number of warps has to be one.
ROW_CASES = (RowCase(1, 64), RowCase(7, 576, gap=64), RowCase(3, 2050, gap=3), RowCase(2, 2880))


@dataclass(frozen=True)
class RopeCase:
    """`heads` heads of `head_size`, of which `rotary` elements turn."""

    tokens: int
    heads: int
    head_size: int
    rotary: int

    @property
    def id(self) -> str:
        return f"{self.tokens}x{self.heads}x{self.head_size}_rotary{self.rotary}"


ROPE_CASES = (RopeCase(1, 1, 64, 64), RopeCase(9, 11, 128, 128), RopeCase(5, 3, 96, 72))


@dataclass(frozen=True)
class LoraCase:
    """One adapter pair on a linear of `out_features` x `in_features`."""

    tokens: int
    out_features: int
    in_features: int
    rank: int

    @property
    def id(self) -> str:
        return f"{self.tokens}x{self.out_features}x{self.in_features}_r{self.rank}"


LORA_CASES = (LoraCase(1, 32, 16, 4), LoraCase(70, 300, 96, 16), LoraCase(200, 576, 64, 24))


@dataclass(frozen=True)
class ExpertCase:
    """Products of the slots of `tokens` rows, `chosen` for each, with experts of `out_features` x `in_features`.

    Expert 2 is chosen by nobody, the last one once.
    """

    tokens: int
    chosen: int
    experts: int
    out_features: int
    in_features: int
    rank: int

    @property
    def id(self) -> str:
        return f"{self.tokens}x{self.chosen}of{self.experts}x{self.out_features}x{self.in_features}_r{self.rank}"

    def ids(self, device: torch.device) -> torch.Tensor:
        """int64 [T, J]; a token may choose one expert twice."""
        generator = torch.Generator().manual_seed(self.tokens)
        ids = torch.randint(0, self.experts - 1, (self.tokens, self.chosen), generator=generator)
        ids[ids == 2] = 0
        ids[-1, -1] = self.experts - 1
        return ids.to(device)


EXPERT_CASES = (ExpertCase(1, 1, 4, 32, 256, 4), ExpertCase(7, 3, 5, 34, 256, 3), ExpertCase(24, 2, 4, 70, 512, 20))


@dataclass(frozen=True)
class TopKCase:
    """`chosen` of `columns` for each of `tokens` rows; only numbers of so many steps from zero, so that many are equal,
    and if `is_hostile` also -0, both infinities and NaN.
    """

    tokens: int
    columns: int
    chosen: int
    steps: int
    is_hostile: bool = False

    @property
    def id(self) -> str:
        return f"{self.chosen}of{self.columns}x{self.tokens}_steps{self.steps}" + "_hostile" * self.is_hostile


TOP_K_CASES = (
    TopKCase(1, 1, 1, 1),
    TopKCase(5, 5, 5, 1),
    TopKCase(9, 256, 8, 1000),
    TopKCase(3, 160, 6, 3, is_hostile=True),
    TopKCase(2, 1000, 32, 20, is_hostile=True),
)
# Types whose lanes make one, two and four runs, blocks of 32 and of 256 weights, with a table and without.
EXPERT_TYPES = ("Q4_K", "Q6_K", "Q8_0", "MXFP4", "TQ1_0", "IQ3_S")


@dataclass(frozen=True)
class AttentionCase:
    """Documents of these lengths in one row; `kv_heads` key heads for `heads` query heads."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def id(self) -> str:
        options = f"_window{self.window}" * (self.window is not None) + f"_cap{self.softcap}" * (
            self.softcap is not None
        )
        documents = "+".join(map(str, self.lengths))
        return f"{documents}x{self.heads}of{self.kv_heads}x{self.head_size}{options}" + "_sinks" * self.has_sinks


ATTENTION_CASES = (
    AttentionCase((1,), 1, 1, 64),
    AttentionCase((64,), 2, 2, 64),
    AttentionCase((130, 1, 70), 4, 2, 64),
    AttentionCase((17, 150), 3, 1, 80),
    AttentionCase((40, 200), 2, 1, 128, window=33, has_sinks=True),
    AttentionCase((150, 90), 2, 2, 64, softcap=2.0),
    AttentionCase((65, 100), 2, 1, 256, window=64),
    AttentionCase((150, 9), 4, 1, 256),
)


@dataclass(frozen=True)
class DeltaRuleCase:
    """Documents of these lengths in one row; `heads` value heads over `key_heads` key heads."""

    lengths: tuple[int, ...]
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    decay: float = 0.5
    """Size of the log decays."""
    has_one_key: bool = False
    """All keys are nearly the same and all betas nearly 1: the inverse of a chunk's system is at its worst."""

    @property
    def id(self) -> str:
        documents = "+".join(map(str, self.lengths))
        sizes = f"{self.heads}of{self.key_heads}x{self.key_size}x{self.value_size}"
        return f"{documents}x{sizes}_decay{self.decay:g}" + "_one_key" * self.has_one_key


DELTA_RULE_CASES = (
    DeltaRuleCase((1,), 1, 1, 16, 16),
    DeltaRuleCase((66,), 2, 4, 32, 16),
    DeltaRuleCase((63, 1, 65), 1, 2, 64, 64),
    DeltaRuleCase((64,), 1, 1, 128, 128, decay=20.0),
    DeltaRuleCase((128,), 1, 1, 64, 32, decay=0.001, has_one_key=True),
)


@dataclass(frozen=True)
class ConvolutionCase:
    """Documents of these lengths in one row of `channels` channels, `normed` heads of `head_size` to unit length."""

    lengths: tuple[int, ...]
    channels: int
    width: int
    has_silu: bool = True
    normed: int = 0
    head_size: int = 64

    @property
    def id(self) -> str:
        documents = "+".join(map(str, self.lengths))
        return f"{documents}x{self.channels}_taps{self.width}" + "_silu" * self.has_silu + f"_normed{self.normed}"


CONVOLUTION_CASES = (
    ConvolutionCase((1,), 16, 4, has_silu=False),
    ConvolutionCase((2, 40, 1, 3), 200, 3),
    ConvolutionCase((33, 70), 320, 4, normed=3),
)


GATED_NORM_CASES = (RowCase(1, 32), RowCase(9, 256, gap=64), RowCase(5, 66, gap=3))
GATE_CASES = (RowCase(1, 3), RowCase(70, 32))


@dataclass(frozen=True)
class CrossEntropyCase:
    """`rows` of logits over `vocabulary`."""

    rows: int
    vocabulary: int

    @property
    def id(self) -> str:
        return f"{self.rows}x{self.vocabulary}"


CROSS_ENTROPY_CASES = (CrossEntropyCase(1, 5), CrossEntropyCase(6, 4096), CrossEntropyCase(9, 9001))


@dataclass(frozen=True)
class LinearCrossEntropyCase:
    """A head of 96 x 256 in Q4_K on 10 tokens, decoded `workspace_rows` and taken `token_chunk` tokens at a time."""

    workspace_rows: int
    token_chunk: int

    @property
    def id(self) -> str:
        return f"head{self.workspace_rows}_tokens{self.token_chunk}"


LINEAR_CROSS_ENTROPY_CASES = tuple(LinearCrossEntropyCase(rows, chunk) for rows in (96, 40) for chunk in (4, 64))


@dataclass(frozen=True)
class QuantLinearCase:
    """A product of `tokens` rows with a quantised weight of `out_features` x `in_features`."""

    tokens: int
    out_features: int = 70
    in_features: int = 256

    @property
    def id(self) -> str:
        return f"{self.tokens}x{self.out_features}x{self.in_features}"


QUANT_LINEAR_CASES = (QuantLinearCase(1), QuantLinearCase(37))


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """Dtypes to try on a device. The interpreter truncates float32 to bfloat16 where hardware rounds to nearest."""
    return (torch.float32, torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float32, torch.float16)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty is full of NaN inside, so an element that nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_rows(case: RowCase, count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """`count` matrices [tokens, width] of normal numbers, each with gaps between its rows if the case has them."""
    generator = torch.Generator(device).manual_seed(case.tokens * case.width)
    shape = (case.tokens, case.width + case.gap)
    return [torch.randn(shape, device=device, generator=generator).to(dtype)[:, : case.width] for _ in range(count)]


def assert_as_close_as_torch(
    ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, *, terms: int = 1, magnitude: float | None = None
) -> None:
    """Assert `as_close_as_torch`."""
    comparison = as_close_as_torch("result", ours, plain, exact, terms=terms, magnitude=magnitude)
    assert comparison.passed, comparison
