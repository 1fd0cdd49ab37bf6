"""Low-rank adapters: which weights get a pair, how it starts, what factor it carries.

The words are PEFT's (`r`, `lora_alpha`, `target_modules`, ...), the names are the file's: "attn_q" is every layer's,
"blk.0.attn_q" one tensor, "blk.*.ffn_*" a pattern. Hugging Face's names of the same weights are understood too.

Only weights that llama.cpp passes through its LoRA path can be trained (`Model.linears`). Everything else is refused
here, before any step, with the reason: an adapter that trains well and is then dropped in serving is the worst result
there is.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pyggtrain.adapters.targets import ALL_LINEAR, last_match, matches, select
from pyggtrain.errors import ConfigError
from pyggtrain.nn import LoraPair, Model


def _f32(value: float) -> float:
    """`value` rounded to float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class LoraConfig:
    """What to train.

    Attributes:
        r: rank of every pair that `rank_pattern` does not name.
        lora_alpha: the update is scaled by lora_alpha / r.
        lora_dropout: probability that an element of a linear's input is hidden from its pair while training.
        target_modules: "all-linear" (every trainable linear but the output head, as in PEFT, and but routers), or one
            or more patterns.
            A pattern is a name without layer ("attn_q"), a whole name ("blk.0.attn_q"), or either with * and ?; Hugging
            Face's names ("q_proj") are translated.
        exclude_modules: one or more patterns, taken out again.
        layers_to_transform: only these layers (0 is the first); None: all. Weights outside the layers are not touched
            by it.
        use_rslora: scale by lora_alpha / sqrt(r) instead (Kalajdzievski 2023).
        rank_pattern, alpha_pattern: other r or lora_alpha for the weights that a pattern matches; the last match
            counts.

    Raises:
        ConfigError: a value that training and llama.cpp would read differently, or that cannot be meant. Names all of
            them.
    """

    r: int = 8
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mistakes = [*_rank_mistakes("r", self.r), *_alpha_mistakes("lora_alpha", self.lora_alpha)]
        for pattern, rank in self.rank_pattern.items():
            mistakes += _rank_mistakes(f"rank_pattern['{pattern}']", rank)
        for pattern, alpha in self.alpha_pattern.items():
            mistakes += _alpha_mistakes(f"alpha_pattern['{pattern}']", alpha)
        if not isinstance(self.lora_dropout, (int, float)) or not 0 <= self.lora_dropout < 1:
            mistakes.append(f"lora_dropout is {self.lora_dropout!r}: needed a number from 0 to below 1")
        if not self.targets:
            mistakes.append(f"target_modules is {self.target_modules!r}: needed '{ALL_LINEAR}' or at least one pattern")
        for pattern in (*self.targets, *self.excluded):
            if not isinstance(pattern, str) or not pattern:
                mistakes.append(f"target_modules or exclude_modules holds {pattern!r}: needed names or patterns")
        for layer in self.layers_to_transform or ():
            if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                mistakes.append(f"layers_to_transform holds {layer!r}: needed layer numbers, 0 or more")
        if mistakes:
            raise ConfigError("The LoRA settings are wrong:\n  " + "\n  ".join(mistakes))

    @property
    def targets(self) -> tuple[str, ...]:
        """`target_modules` as a tuple."""
        return (self.target_modules,) if isinstance(self.target_modules, str) else tuple(self.target_modules)

    @property
    def excluded(self) -> tuple[str, ...]:
        """`exclude_modules` as a tuple."""
        return (self.exclude_modules,) if isinstance(self.exclude_modules, str) else tuple(self.exclude_modules)


def _rank_mistakes(name: str, rank: object) -> list[str]:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        return [f"{name} is {rank!r}: needed a whole number, 1 or more"]
    return []


def _alpha_mistakes(name: str, alpha: object) -> list[str]:
    # llama.cpp reads an alpha of 0 as "no alpha: factor 1", other tools as "factor 0". float32 is what the file holds.
    smallest, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not smallest <= alpha <= largest:
        return [f"{name} is {alpha!r}: needed a number above 0 that float32 can hold"]
    return []


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """The trained pairs of a model.

    Attributes:
        architecture: `general.architecture` of the model.
        config: the settings it was made with.
        pairs: by tensor name ("blk.0.attn_q.weight"), in the model's order. Parameters are float32.
    """

    architecture: str
    config: LoraConfig
    pairs: dict[str, LoraPair]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """lora_a and lora_b of each pair in turn."""
        for pair in self.pairs.values():
            yield pair.lora_a
            yield pair.lora_b

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def scale(self) -> float:
        """lora_alpha / r in float32: the factor of every pair unless patterns or rslora change it (`LoraPair.scale`
        holds each one's).
        """
        return scale_of(self.config.lora_alpha, self.config.r)


def scale_of(alpha: float, rank: int) -> float:
    """alpha / rank as llama.cpp computes it, in float32."""
    return _f32(_f32(alpha) / rank)


def attach(model: Model, config: LoraConfig, *, seed: int) -> LoraAdapter:
    """Give the chosen linears of a model a pair each, and freeze everything else.

    lora_a starts uniform in ±1/sqrt(K), as in PEFT, from a generator seeded by `seed` and the tensor's name: which
    other weights are trained does not change how one starts. lora_b starts at zero, so the model computes what it did.

    Args:
        model: a loaded model without an adapter.
        config: what to train.
        seed: of the start.

    Returns:
        The adapter; its pairs are part of the model from now on.

    Raises:
        ConfigError: a pattern matches nothing, a rank is larger than a weight, or the model has an adapter already.
        UnsupportedError: a weight was asked for that an adapter cannot train in llama.cpp.
    """
    taken = [name for name, linear in model.linears.items() if linear.lora is not None]
    if taken:
        raise ConfigError(f"The model has an adapter already ({len(taken)} pairs): load it again for another one.")
    for option, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for pattern in patterns:
            matches(model, pattern, option)
    targets = select(model, config.targets, exclude=config.excluded, layers=config.layers_to_transform)
    ranks = {name: last_match(config.rank_pattern, name, config.r) for name in targets}
    _check_ranks(model, ranks)
    pairs = {}
    for name, rank in ranks.items():
        alpha = last_match(config.alpha_pattern, name, config.lora_alpha)
        scale = _f32(_f32(alpha) / _f32(math.sqrt(rank))) if config.use_rslora else scale_of(alpha, rank)
        linear = model.linears[name]
        # A stack of experts has a pair for each of them: llama.cpp aborts on fewer.
        *experts, num_out, num_in = linear.shape
        bound = 1 / math.sqrt(num_in)
        lora_a = torch.empty(*experts, rank, num_in).uniform_(-bound, bound, generator=_generator(seed, name))
        lora_b = torch.zeros(*experts, num_out, rank)
        device = linear.weight.device
        pair = LoraPair(lora_a.to(device), lora_b.to(device), scale=scale, dropout=config.lora_dropout)
        linear.lora = pair
        pairs[name] = pair
    return LoraAdapter(model.architecture, config, pairs)


@contextmanager
def adapter_off(model: Model) -> Iterator[None]:
    """Let a model compute as its file says, without its adapter, for the time of a `with` block; nothing is copied."""
    pairs = {linear: linear.lora for linear in model.linears.values() if linear.lora is not None}
    for linear in pairs:
        linear.lora = None
    try:
        yield
    finally:
        for linear, pair in pairs.items():
            linear.lora = pair


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _check_ranks(model: Model, ranks: Mapping[str, int]) -> None:
    """A rank above min(N, K) can express nothing that min(N, K) cannot: it is a mistake, and wasted memory."""
    limits = {name: min(model.linears[name].shape[-2:]) for name in ranks}
    too_large = [name for name in ranks if ranks[name] > limits[name]]
    if too_large:
        name = min(too_large, key=lambda name: limits[name])
        raise ConfigError(
            f"r = {ranks[name]} is too large for {name} {list(model.linears[name].shape)} "
            f"({len(too_large)} weights are too small for theirs): needed at most {limits[name]}. "
            "Lower r, or give these weights their own with rank_pattern."
        )
