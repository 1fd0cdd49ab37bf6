"""What is measured on logits for a parity report: both sides on the same text, llama.cpp's noise, the adapter's effect.

Nothing here judges; `parity` holds the bounds. Shape letters: T tokens, P compared positions, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from pyggtrain.errors import DataError
from pyggtrain.ops.linear_cross_entropy import IGNORED
from pyggtrain.validation.difference import (
    EffectMoments,
    LogitsDifference,
    compare_logits,
    effect_moments,
    merge_differences,
    target_losses,
)
from pyggtrain.validation.runtime import OpenRuntime, Runtime, RuntimeSettings

# Scales of the adapter: none at all, and the one that it is served with.
BASE, ADAPTED = None, 1.0


class OurModel(Protocol):
    """The trained model on our side. `scale=None` means the base model alone."""

    @property
    def num_pairs(self) -> int:
        """LoRA pairs that were trained and exported."""

    @property
    def layer_names(self) -> list[str]:
        """llama.cpp's name of each layer's output (`l_out-0`, ...), in order of computation."""

    def logits(self, tokens: Sequence[int], *, scale: float | None) -> torch.Tensor:
        """Logits [T, V] float32 of one sequence."""

    def layer_outputs(
        self, tokens: Sequence[int], *, scale: float | None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Output [T, D] of each layer by its name.

        With `inputs`, the layer that follows a tensor named there starts from that tensor instead of from ours.
        """


@dataclass(frozen=True)
class Excerpt:
    """One document of the comparison.

    Attributes:
        tokens: All of its T tokens.
        positions: The P rows of its logits that are compared.
        targets_P: int64, the token that each of these rows should predict; -100 where nothing is learnt.
    """

    tokens: list[int]
    positions: list[int]
    targets_P: torch.Tensor


def select_excerpts(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], *, max_tokens: int
) -> tuple[list[Excerpt], list[str]]:
    """Choose what is compared: documents in order as long as they fit whole; if none fits, the first one is cut.

    Args:
        documents: (token ids, labels) with labels aligned to the ids and -100 where nothing is learnt.
        max_tokens: Tokens of all excerpts together.

    Returns:
        The excerpts with all their rows, and sentences that say what was left out.

    Raises:
        DataError: No document has two tokens or more.
    """
    usable = [(list(ids), list(labels)) for ids, labels in documents if len(ids) >= 2]
    if not usable:
        raise DataError(
            f"Of {len(documents)} held-out documents none has two tokens or more: a comparison with llama.cpp needs "
            f"one. Add held-out rows."
        )
    chosen: list[tuple[list[int], list[int]]] = []
    budget = max_tokens
    for ids, labels in usable:
        if len(ids) <= budget:
            chosen.append((ids, labels))
            budget -= len(ids)
    notes = []
    if not chosen:
        ids, labels = usable[0]
        chosen = [(ids[:max_tokens], labels[:max_tokens])]
        notes.append(f"No document has {max_tokens} tokens or less; the first one was cut from {len(ids)}.")
    if len(chosen) < len(documents):
        notes.append(f"{len(chosen)} of {len(documents)} documents were compared, {max_tokens} tokens at most.")
    return [Excerpt(ids, list(range(len(ids))), torch.tensor([*labels[1:], IGNORED])) for ids, labels in chosen], notes


def spread_positions(excerpts: Sequence[Excerpt], max_positions: int) -> list[Excerpt]:
    """Keep few rows of few excerpts: `max_positions` in all, evenly spread over the supervised ones of each."""
    kept = excerpts[:max_positions]
    share = max_positions // len(kept)
    thinned = []
    for excerpt in kept:
        supervised = [row for row, target in enumerate(excerpt.targets_P.tolist()) if target != IGNORED]
        rows = supervised or list(range(len(excerpt.positions)))
        num_rows = min(share, len(rows))
        rows = [rows[index * len(rows) // num_rows] for index in range(num_rows)]
        positions = [excerpt.positions[row] for row in rows]
        thinned.append(Excerpt(excerpt.tokens, positions, excerpt.targets_P[rows]))
    return thinned


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp with the base and adapter under test, to be opened with this or that setting.

    Attributes:
        is_causal: No token sees a later one. Otherwise llama.cpp computes a text only as a whole, without a cache.
    """

    base: Path
    adapter: Path | None
    open_runtime: OpenRuntime
    settings: RuntimeSettings
    is_causal: bool = True

    @contextmanager
    def opened(self, settings: RuntimeSettings | None = None) -> Iterator[tuple[Runtime, int]]:
        """A runtime that holds base and adapter, and the number of pairs it reports; closed on leaving."""
        with closing(self.open_runtime(self.base, settings or self.settings)) as runtime:
            yield runtime, 0 if self.adapter is None else runtime.load_adapter(self.adapter)

    def variations(self, *, strict: bool) -> dict[str, RuntimeSettings]:
        """Ways to compute that should not matter; the last one is llama-server's default.

        F16 keys and values are a rounding of their own, and so no yardstick where nothing else rounds. Products in
        float32 show what the rounding of activations does by itself: where few weights are quantised, the other ways
        meet the same roundings as the plain one, and would call that noise nought. A text that
        is computed as a whole and rounds nothing leaves no variation at all.
        """
        half = replace(self.settings, kv_type="F16")
        if not self.is_causal:
            return {} if strict else {"flash attention": replace(half, flash_attention=True)}
        one_by_one = {"ubatch 1": replace(self.settings, num_ubatch=1)}
        if strict:
            return one_by_one
        return {
            **one_by_one,
            "float32 products": replace(self.settings, exact_products=True),
            "F16 KV": half,
            "flash attention": replace(half, flash_attention=True),
        }


def their_logits(runtime: Runtime, excerpts: Sequence[Excerpt], scale: float | None) -> list[torch.Tensor]:
    """llama.cpp's logits [P, V] of each excerpt."""
    return [runtime.logits(excerpt.tokens, scale=scale, positions=excerpt.positions) for excerpt in excerpts]


def our_logits(
    ours: OurModel, excerpts: Sequence[Excerpt], scale: float | None, *, as_log_probs: bool
) -> list[torch.Tensor]:
    """Our logits [P, V] of each excerpt; `as_log_probs` if llama.cpp's rows are log-probabilities."""
    rows = [ours.logits(excerpt.tokens, scale=scale)[excerpt.positions] for excerpt in excerpts]
    return [logits_PV.double().log_softmax(dim=-1).float() for logits_PV in rows] if as_log_probs else rows


def num_changed_logits(runtime: Runtime, excerpts: Sequence[Excerpt], base: Sequence[torch.Tensor]) -> int:
    """How many logits at scale 0 are not the base's, bit for bit. Run after scale 1, it also finds what lingers."""
    return sum(
        int((runtime.logits(excerpt.tokens, scale=0.0, positions=excerpt.positions) != logits_PV).sum())
        for excerpt, logits_PV in zip(excerpts, base, strict=True)
    )


@dataclass(frozen=True)
class Agreement:
    """Both sides on the same text at one scale.

    Attributes:
        difference: Ours from llama.cpp's.
        our_loss: Mean -log p of the supervised tokens, nats; NaN if there are none.
        their_loss: The same from llama.cpp's logits.
        num_targets: Supervised tokens.
    """

    difference: LogitsDifference
    our_loss: float
    their_loss: float
    num_targets: int


def measure_agreement(
    excerpts: Sequence[Excerpt], ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]
) -> Agreement:
    """Compare both sides' logits [P, V] of each excerpt."""
    our_losses, their_losses = _target_losses(excerpts, ours), _target_losses(excerpts, theirs)
    # The mean of nothing is NaN.
    return Agreement(_difference(theirs, ours), float(our_losses.mean()), float(their_losses.mean()), len(our_losses))


def _target_losses(excerpts: Sequence[Excerpt], logits: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(
        [target_losses(logits_PV, excerpt.targets_P) for excerpt, logits_PV in zip(excerpts, logits, strict=True)]
    )


@dataclass(frozen=True)
class Spread:
    """llama.cpp from itself, computed in another way, at one scale.

    Attributes:
        difference: Of the logits.
        mean_squared_gap: Mean square of what a supervised token's loss changes by, nats squared; NaN without any.
    """

    difference: LogitsDifference
    mean_squared_gap: float


def measure_noise(
    llama_cpp: LlamaCpp,
    excerpts: Sequence[Excerpt],
    reference: Mapping[float | None, Sequence[torch.Tensor]],
    *,
    strict: bool,
) -> dict[str, dict[float | None, Spread]]:
    """Differences of llama.cpp from itself.

    Args:
        llama_cpp: The files.
        excerpts: The text.
        reference: llama.cpp's logits with the plain settings, by scale.
        strict: Whether the file rounds nothing.

    Returns:
        Name of the variation -> scale -> difference.
    """
    losses = {scale: _target_losses(excerpts, logits) for scale, logits in reference.items()}
    noise: dict[str, dict[float | None, Spread]] = {}
    for name, settings in llama_cpp.variations(strict=strict).items():
        noise[name] = {}
        with llama_cpp.opened(settings) as (runtime, _):
            for scale, logits in reference.items():
                varied = their_logits(runtime, excerpts, scale)
                gaps = _target_losses(excerpts, varied) - losses[scale]
                noise[name][scale] = Spread(_difference(logits, varied), float(gaps.square().mean()))
    return noise


@dataclass(frozen=True)
class Effect:
    """What the adapter does to the logits: mean KL(base || adapted) on both sides, and how the two changes compare."""

    our_kl: float
    their_kl: float
    moments: EffectMoments


def find_effect_scale(ours: OurModel, excerpt: Excerpt, scales: Sequence[float], clear_kl: float) -> float:
    """The first scale at which our own logits move by more than `clear_kl`; the last one if none does."""
    base = our_logits(ours, [excerpt], BASE, as_log_probs=False)
    for scale in scales:
        if _difference(base, our_logits(ours, [excerpt], scale, as_log_probs=False)).mean_kl > clear_kl:
            return scale
    return scales[-1]


def measure_effect(
    our_base: Sequence[torch.Tensor],
    our_adapted: Sequence[torch.Tensor],
    their_base: Sequence[torch.Tensor],
    their_adapted: Sequence[torch.Tensor],
) -> Effect:
    """Compare what the adapter changes on both sides; logits [P, V] of each excerpt."""
    moments = EffectMoments()
    for logits in zip(our_base, our_adapted, their_base, their_adapted, strict=True):
        moments += effect_moments(*logits)
    return Effect(_difference(our_base, our_adapted).mean_kl, _difference(their_base, their_adapted).mean_kl, moments)


def _difference(reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> LogitsDifference:
    return merge_differences([compare_logits(*pair) for pair in zip(reference, other, strict=True)])
