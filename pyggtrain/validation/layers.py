"""The outputs of single layers on both sides: where the two part, and what the adapter does in each layer.

Nothing here judges; `parity` holds the bounds. Shape letters: T tokens, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyggtrain.validation.evidence import ADAPTED, BASE, LlamaCpp, OurModel
from pyggtrain.validation.runtime import RuntimeSettings

# Relative error of a layer's row below which rounding is not looked for: float32 sums of a thousand terms lie below.
MIN_ROUNDING = 1e-3


@dataclass(frozen=True)
class RowErrors:
    """How far the rows of one layer's output are apart, each row relative to its own size.

    A few rows of a trained transformer (the first token's, above all) are hundreds of times larger than the others:
    relative to the RMS of the whole tensor, the others' errors would not be seen.

    Attributes:
        worst: Largest over the rows of: largest |difference| of an element / RMS of the row.
        typical: Median over the rows of: RMS of the difference / RMS of the row.
    """

    worst: float
    typical: float


def compare_rows(reference_TD: torch.Tensor, other_TD: torch.Tensor) -> RowErrors:
    """Row errors of `other_TD` from `reference_TD`, both [T, D] float32."""
    reference_TD = reference_TD.double()
    difference_TD = other_TD.double() - reference_TD
    rms_T = reference_TD.square().mean(dim=-1).sqrt()
    worst = (difference_TD.abs().amax(dim=-1) / rms_T).max()
    return RowErrors(float(worst), float((difference_TD.square().mean(dim=-1).sqrt() / rms_T).median()))


@dataclass(frozen=True)
class LayerDifference:
    """Output of one layer on both sides at one scale.

    Attributes:
        name: llama.cpp's name of the tensor.
        scale: Of the adapter; None without it.
        ours: Ours from llama.cpp's.
        noise: llama.cpp's from itself, the largest of its variations.
    """

    name: str
    scale: float | None
    ours: RowErrors
    noise: RowErrors


def compare_layers(
    llama_cpp: LlamaCpp, ours: OurModel, tokens: Sequence[int], *, strict: bool
) -> tuple[list[LayerDifference], list[str]]:
    """Compare the output of every layer on one document, without and with the adapter.

    Returns:
        The differences in order of computation, base first, and the names that llama.cpp's graph does not have.
    """
    scales = [BASE] if llama_cpp.adapter is None else [BASE, ADAPTED]
    ours_at = {scale: ours.layer_outputs(tokens, scale=scale) for scale in scales}
    names = ours.layer_names

    def theirs(settings: RuntimeSettings) -> dict[float | None, dict[str, torch.Tensor]]:
        with llama_cpp.opened(settings) as (runtime, _):
            return {scale: runtime.tensors(tokens, names, scale=scale) for scale in scales}

    plain = theirs(llama_cpp.settings)
    varied = [theirs(settings) for settings in llama_cpp.variations(strict=strict).values()]
    shown = [name for name in names if name in plain[BASE]]
    differences = []
    for scale in scales:
        for name in shown:
            reference_TD = plain[scale][name]
            own = [compare_rows(reference_TD, layers[scale][name]) for layers in varied]
            noise = RowErrors(
                max((errors.worst for errors in own), default=0.0), max((errors.typical for errors in own), default=0.0)
            )
            differences.append(LayerDifference(name, scale, compare_rows(reference_TD, ours_at[scale][name]), noise))
    return differences, [name for name in names if name not in shown]


@dataclass(frozen=True)
class LayerEffect:
    """What the pairs of one layer change in its output on both sides, the same input given.

    Attributes:
        name: llama.cpp's name of the output.
        scale: Of the adapter.
        size: Size of llama.cpp's change in units of ours; median over the rows.
        cosine: Between the two changes; median over the rows.
    """

    name: str
    scale: float
    size: float
    cosine: float


def measure_layer_effects(
    llama_cpp: LlamaCpp, ours: OurModel, tokens: Sequence[int], scales: Sequence[float], clear: float
) -> tuple[list[LayerEffect], list[str]]:
    """Compare the effect of the adapter layer by layer.

    Each of our layers is given llama.cpp's own output of the layer before it. What happened earlier is thus out of the
    comparison; this layer's pairs and this layer's rounding are left, and a scale can be chosen at which the pairs
    drown the rounding. Even on a quantised file, where whole models drift apart, equal pairs then agree to 1e-3.

    Args:
        llama_cpp: The files.
        ours: Our side.
        tokens: The text.
        scales: Scales to try, in order; each layer is judged at the first one that makes its effect clear.
        clear: How many times its rounding a layer's effect must be.

    Returns:
        One entry per layer with a clear effect, in order of computation, and the names of those whose effect is never
        clear, though not zero.
    """
    names = ours.layer_names
    effects: dict[str, LayerEffect] = {}
    with llama_cpp.opened() as (runtime, _):
        base = runtime.tensors(tokens, names, scale=BASE)
        our_base = ours.layer_outputs(tokens, scale=BASE, inputs=base)
        rounding = {name: max(compare_rows(base[name], our_base[name]).typical, MIN_ROUNDING) for name in base}
        waiting = [name for name in names if name in base]
        for scale in scales:
            theirs = runtime.tensors(tokens, names, scale=scale)
            adapted = ours.layer_outputs(tokens, scale=scale, inputs=theirs)
            without = ours.layer_outputs(tokens, scale=BASE, inputs=theirs)
            for name in list(waiting):
                change = _compare_changes(without[name], adapted[name], theirs[name])
                if change is None or change.strength > clear * rounding[name]:
                    waiting.remove(name)
                if change is not None and name not in waiting:
                    effects[name] = LayerEffect(name, scale, change.size, change.cosine)
            if not waiting:
                break
    return [effects[name] for name in names if name in effects], waiting


@dataclass(frozen=True)
class _Change:
    """Medians over rows: our change relative to the row, llama.cpp's change in units of ours, cosine of the two."""

    strength: float
    size: float
    cosine: float


def _compare_changes(
    without_TD: torch.Tensor, adapted_TD: torch.Tensor, their_adapted_TD: torch.Tensor
) -> _Change | None:
    """Compare our and llama.cpp's step away from our output without the adapter; None if our step is zero."""
    ours_TD, theirs_TD = adapted_TD - without_TD, their_adapted_TD - without_TD
    # A row without effect tells nothing: the first token attends to itself, whatever its query. NaN stays.
    acts_T = ours_TD.norm(dim=-1) != 0
    if not acts_T.any():
        return None
    ours_TD, theirs_TD, their_adapted_TD = ours_TD[acts_T], theirs_TD[acts_T], their_adapted_TD[acts_T]
    size_T = ours_TD.norm(dim=-1)
    return _Change(
        strength=float((size_T / their_adapted_TD.norm(dim=-1)).median()),
        size=float(((ours_TD * theirs_TD).sum(dim=-1) / size_T.square()).median()),
        cosine=float(torch.cosine_similarity(ours_TD, theirs_TD, dim=-1).median()),
    )
