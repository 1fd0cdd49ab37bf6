"""Prove that llama.cpp, given the base file and the adapter, computes what was trained.

A difference of logits means nothing without a yardstick. llama.cpp rounds activations to 8 bits before a quantised
product, and rounding is a step function: changing only the order of a sum, or the type of the KV cache, moves its own
logits on a quantised file by KL 1e-3 to 1e-2. So there are two modes:

- *strict*, for a file whose tensors are all F32: nothing is rounded, and both sides must agree to 1e-3 of the logits'
  RMS, to KL 1e-6, and in the output of every layer.
- *statistical*, for any other file: llama.cpp is run against itself (tokens one by one; products in float32 instead of
  8 bits; F16 KV; F16 KV with flash attention) on the same text with the same adapter, and we may differ from it by
  twice the largest mean KL of those. Two standard errors are added, since now and then one position sits on a tipping
  point and holds most of the sum.

Agreement alone proves nothing: it is perfect when both sides ignore the adapter. So the *effect* of the adapter (logits
with it minus logits without) must be more than noise, and llama.cpp's effect must be ours in size and direction. If the
effect drowns in the noise, both sides are run at a larger scale, where the same pairs on the same tensors can be heard.
Last, the effect is compared layer by layer with llama.cpp's own inputs: there one pair on one tensor cannot hide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from pyggtrain import ops
from pyggtrain.errors import ConfigError
from pyggtrain.gguf import GGUFFile
from pyggtrain.validation import evidence
from pyggtrain.validation.evidence import ADAPTED, BASE, Agreement, Excerpt, LlamaCpp, OurModel, Spread
from pyggtrain.validation.layers import LayerDifference, LayerEffect, compare_layers, measure_layer_effects
from pyggtrain.validation.parity_report import Check, ParityReport
from pyggtrain.validation.runtime import BridgeRuntime, OpenRuntime, Runtime, RuntimeSettings

STRICT_KL = 1e-6
STRICT_RELATIVE_ERROR = 1e-3
# We may differ from llama.cpp by this much of what llama.cpp differs from itself.
NOISE_FACTOR = 2.0
NUM_STANDARD_ERRORS = 2.0

# The effect is judged at the first scale that lifts its KL this far above the noise. KL goes with the square of a small
# change, so the change is then 5 times the noise, and the two sides' changes should correlate by 25/26 or better.
CLEAR_EFFECT = 25.0
EFFECT_SCALES = tuple(4.0**power for power in range(9))
MAX_SLOPE_ERROR = 0.1
MIN_CORRELATION = 0.9

# The same for one layer with equal inputs: an effect of 20 times the rounding leaves a cosine of 0.9988.
CLEAR_LAYER_EFFECT = 20.0
MAX_LAYER_SIZE_ERROR = 0.02
MIN_LAYER_COSINE = 0.995

# By scale: [P, V] of each excerpt. By variation and scale.
Logits = Mapping[float | None, Sequence[torch.Tensor]]
Noise = Mapping[str, Mapping[float | None, Spread]]


@dataclass(frozen=True)
class ParitySettings:
    """How much is compared, and how strictly.

    Attributes:
        mode: "auto" takes "strict" if every tensor of the base is F32, else "statistical".
        max_tokens: Tokens compared at most. 16 * max_tokens * V bytes of logits are held meanwhile.
        max_served_positions: Positions compared at most with a runtime that needs one request for each.
        num_threads: CPU threads of llama.cpp.
    """

    mode: Literal["auto", "strict", "statistical"] = "auto"
    max_tokens: int = 256
    max_served_positions: int = 16
    num_threads: int = 1


def verify_adapter(
    base_path: Path,
    adapter_path: Path | None,
    documents: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    ours: OurModel,
    settings: ParitySettings | None = None,
    open_runtime: OpenRuntime = BridgeRuntime,
    served: Runtime | None = None,
    is_causal: bool = True,
) -> ParityReport:
    """Compare our logits with llama.cpp's, without and with the adapter.

    Args:
        base_path: The GGUF file that was trained on.
        adapter_path: The exported adapter; None compares the base alone.
        documents: Held-out documents as (token ids, labels): labels aligned with the ids, -100 where nothing is learnt.
            As many whole documents as fit are compared, in order.
        ours: The model in training.
        settings: How much, how strictly.
        open_runtime: Opens llama.cpp with given settings.
        served: A runtime with settings of its own, such as a running llama-server. It is compared in place of
            `open_runtime`'s, which still measures the noise; the mode is "statistical".
        is_causal: No token of the model sees a later one.

    Returns:
        The report; `passed` is False if any bound is broken. To fail is the caller's part.

    Raises:
        DataError: No document has two tokens or more.
        AdapterError, BridgeError: llama.cpp refuses the adapter.
        ConfigError: `served` serves another model, or decodes token by token what the model computes as a whole.
    """
    settings = settings or ParitySettings()
    if served is not None and not is_causal:
        raise ConfigError(
            f"runtime: {served.name} decodes one token after another, and this model computes a text as a whole. "
            "Set runtime to bridge."
        )
    text, notes = evidence.select_excerpts(documents, max_tokens=settings.max_tokens)
    excerpts = text if served is None else evidence.spread_positions(text, settings.max_served_positions)
    strict = served is None and _is_strict(settings, base_path)
    longest = max(len(excerpt.tokens) for excerpt in text)
    plain = RuntimeSettings(num_ctx=longest, num_ubatch=longest, num_threads=settings.num_threads)
    llama_cpp = LlamaCpp(base_path, adapter_path, open_runtime, plain, is_causal)
    theirs = _run_llama_cpp(llama_cpp, served, text, excerpts)
    noise = evidence.measure_noise(llama_cpp, text, theirs.reference, strict=strict)
    our_logits: Logits = {
        scale: evidence.our_logits(ours, excerpts, scale, as_log_probs=theirs.as_log_probs) for scale in theirs.logits
    }

    checks: list[Check] = []
    effects: list[LayerEffect] = []
    for scale, logits in theirs.logits.items():
        agreement = evidence.measure_agreement(excerpts, our_logits[scale], logits)
        checks += _agreement_checks(scale, agreement, [at[scale] for at in noise.values()], strict=strict)
    if adapter_path is not None:
        checks.append(Check("pairs that llama.cpp loaded", theirs.num_pairs, ours.num_pairs, "equal to"))
        checks.append(Check("logits that scale 0 changes", theirs.num_changed, 0, "equal to"))
        noise_kl = max((own.difference.mean_kl for at in noise.values() for own in at.values()), default=0.0)
        effect_checks, effect_notes = _effect_checks(
            llama_cpp, served, excerpts, ours, our_logits, theirs.logits, noise_kl
        )
        effects, faint = measure_layer_effects(llama_cpp, ours, text[0].tokens, EFFECT_SCALES, CLEAR_LAYER_EFFECT)
        checks += [*effect_checks, *_layer_effect_checks(effects)]
        notes += [*effect_notes, *_faint_notes(faint)]
    checks += _noise_rows(noise)
    first_difference = None
    if strict or not all(check.passed for check in checks):
        layers, missing = compare_layers(llama_cpp, ours, text[0].tokens, strict=strict)
        checks += _layer_checks(layers, missing) if strict else []
        first_difference = _first_difference(layers, effects, strict=strict)
    return ParityReport(
        base=str(base_path),
        adapter=None if adapter_path is None else str(adapter_path),
        runtime=theirs.name,
        mode="strict" if strict else "statistical",
        num_documents=len(excerpts),
        num_tokens=sum(len(excerpt.tokens) for excerpt in excerpts),
        num_positions=sum(len(excerpt.positions) for excerpt in excerpts),
        checks=tuple(checks),
        first_difference=first_difference,
        notes=(*notes, *theirs.limits),
    )


@dataclass(frozen=True)
class _Theirs:
    """What llama.cpp computed.

    Attributes:
        name: Which runtime is compared.
        limits: What it cannot prove.
        as_log_probs: Whether its rows are log-probabilities.
        logits: Of the compared rows, by scale.
        reference: Of all rows, by scale, from the runtime that measures the noise.
        num_pairs: Pairs that it took from the adapter file.
        num_changed: Logits that differ between no adapter and the adapter at scale 0.
    """

    name: str
    limits: tuple[str, ...]
    as_log_probs: bool
    logits: Logits
    reference: Logits
    num_pairs: int
    num_changed: int


def _run_llama_cpp(
    llama_cpp: LlamaCpp, served: Runtime | None, text: Sequence[Excerpt], excerpts: Sequence[Excerpt]
) -> _Theirs:
    scales = [BASE] if llama_cpp.adapter is None else [BASE, ADAPTED]
    with llama_cpp.opened() as (runtime, num_pairs):
        reference = {scale: evidence.their_logits(runtime, text, scale) for scale in scales}
        compared, logits = runtime, reference
        if served is not None:
            if llama_cpp.adapter is not None:
                served.load_adapter(llama_cpp.adapter)
            compared, logits = served, {scale: evidence.their_logits(served, excerpts, scale) for scale in scales}
            _check_same_vocabulary(served, logits[BASE][0].shape[1], llama_cpp.base, reference[BASE][0].shape[1])
        return _Theirs(
            name=compared.name,
            limits=compared.limits,
            as_log_probs=compared.gives_log_probs,
            logits=logits,
            reference=reference,
            num_pairs=num_pairs,
            num_changed=0
            if llama_cpp.adapter is None
            else evidence.num_changed_logits(compared, excerpts, logits[BASE]),
        )


def _check_same_vocabulary(served: Runtime, num_served: int, base: Path, num_tokens: int) -> None:
    if num_served != num_tokens:
        raise ConfigError(
            f"{served.name} has a vocabulary of {num_served} tokens, {base} one of {num_tokens}: it serves another "
            f"model. Start it with -m {base}."
        )


def _is_strict(settings: ParitySettings, base_path: Path) -> bool:
    if settings.mode != "auto":
        return settings.mode == "strict"
    return all(tensor.type == "F32" for tensor in GGUFFile.open(base_path).tensors.values())


def _label(scale: float | None) -> str:
    return "base" if scale is BASE else "adapter"


def _agreement_checks(
    scale: float | None, agreement: Agreement, noise: Sequence[Spread], *, strict: bool
) -> list[Check]:
    label, difference = _label(scale), agreement.difference
    max_kl = max(STRICT_KL, NOISE_FACTOR * max((own.difference.mean_kl for own in noise), default=0.0))
    if not strict:
        max_kl += NUM_STANDARD_ERRORS * difference.kl_standard_error
    # Even an F32 file meets steps: ggml reads GELU from an F16 table, and a router picks its experts.
    own_abs = max((own.difference.max_abs for own in noise), default=0.0)
    max_abs = max(STRICT_RELATIVE_ERROR * difference.reference_rms, NOISE_FACTOR * own_abs)
    checks = [
        Check(f"{label}: mean KL(llama.cpp || ours)", difference.mean_kl, max_kl, unit="nats"),
        Check(f"{label}: largest KL of one position", difference.max_kl, unit="nats"),
        Check(f"{label}: largest difference of a logit", difference.max_abs, max_abs if strict else None),
        Check(f"{label}: RMS difference of the logits", difference.rms),
        Check(f"{label}: RMS of the logits", difference.reference_rms),
        Check(f"{label}: same most likely token", difference.top1_agreement, unit="%"),
    ]
    if agreement.num_targets:
        # log p - log q of near distributions has variance 2 KL for tokens drawn from them, so its mean over n tokens
        # wanders by sqrt(2 KL / n) around at most KL: four standard deviations. Tokens that the model does not expect
        # vary more; by how much is measured (KL goes with the square of a small change).
        variance = max(2 * max_kl, NOISE_FACTOR * max((own.mean_squared_gap for own in noise), default=0.0))
        max_gap = max_kl + 4 * math.sqrt(variance / agreement.num_targets)
        gap = abs(agreement.our_loss - agreement.their_loss)
        checks += [
            Check(f"{label}: held-out loss, ours", agreement.our_loss, unit="nats"),
            Check(f"{label}: held-out loss, llama.cpp", agreement.their_loss, unit="nats"),
            Check(f"{label}: gap between the two losses", gap, max_gap, unit="nats"),
        ]
    return checks


def _effect_checks(
    llama_cpp: LlamaCpp,
    served: Runtime | None,
    excerpts: Sequence[Excerpt],
    ours: OurModel,
    our_logits: Logits,
    their_logits: Logits,
    noise_kl: float,
) -> tuple[list[Check], list[str]]:
    assert llama_cpp.adapter is not None
    if _is_untrained(llama_cpp.adapter):
        return [], ["Every lora_b of the adapter is zero: it changes nothing, so no effect can be shown."]
    floor = max(noise_kl, STRICT_KL)
    scale = evidence.find_effect_scale(ours, excerpts[0], EFFECT_SCALES, CLEAR_EFFECT * floor)
    our_adapted, their_adapted, notes = our_logits[ADAPTED], their_logits[ADAPTED], []
    if scale != ADAPTED:
        notes.append(f"At scale 1 the adapter's effect drowns in the noise; it was compared at scale {scale:g}.")
        as_log_probs = served is not None and served.gives_log_probs
        our_adapted = evidence.our_logits(ours, excerpts, scale, as_log_probs=as_log_probs)
        if served is not None:
            their_adapted = evidence.their_logits(served, excerpts, scale)
        else:
            with llama_cpp.opened() as (runtime, _):
                their_adapted = evidence.their_logits(runtime, excerpts, scale)
    effect = evidence.measure_effect(our_logits[BASE], our_adapted, their_logits[BASE], their_adapted)
    checks = [
        Check(f"effect at scale {scale:g}: mean KL, ours", effect.our_kl, floor, "more than", "nats"),
        Check(f"effect at scale {scale:g}: mean KL, llama.cpp", effect.their_kl, floor, "more than", "nats"),
        Check("effect: llama.cpp's size over ours, off 1 by", abs(effect.moments.slope - 1), MAX_SLOPE_ERROR),
        Check("effect: correlation of the two", effect.moments.correlation, MIN_CORRELATION, "more than"),
    ]
    return checks, notes


def _is_untrained(adapter: Path) -> bool:
    tensors = GGUFFile.open(adapter).tensors
    return not any(bool(ops.dequantize(tensor).any()) for name, tensor in tensors.items() if name.endswith(".lora_b"))


def _layer_checks(layers: Sequence[LayerDifference], missing: Sequence[str]) -> list[Check]:
    checks = [Check("layers that llama.cpp does not show", len(missing), 0, "equal to")]
    for scale in dict.fromkeys(layer.scale for layer in layers):
        own = [layer for layer in layers if layer.scale == scale]
        # A NaN must win.
        worst = max((layer.ours.worst for layer in own), key=lambda error: (math.isnan(error), error))
        num_differing = sum(_differs_strictly(layer) for layer in own)
        checks.append(Check(f"{_label(scale)}: largest error in a layer, of its row's RMS", worst))
        checks.append(Check(f"{_label(scale)}: layers that differ, of {len(own)}", num_differing, 0, "equal to"))
    return checks


def _noise_rows(noise: Noise) -> list[Check]:
    return [
        Check(f"{_label(scale)}: llama.cpp from itself, {variation}: mean KL", own.difference.mean_kl, unit="nats")
        for variation, at in noise.items()
        for scale, own in at.items()
    ]


def _faint_notes(faint: Sequence[str]) -> list[str]:
    return [f"The adapter's effect in {', '.join(faint)} is too small to be compared at any scale."] if faint else []


def _layer_effect_checks(effects: Sequence[LayerEffect]) -> list[Check]:
    if not effects:
        return []
    num_differing = sum(_has_other_effect(effect) for effect in effects)
    return [
        Check("effect in one layer: lowest cosine", min(effect.cosine for effect in effects)),
        Check("effect in one layer: size, off 1 by", max(abs(effect.size - 1) for effect in effects)),
        Check(f"layers whose effect differs, of {len(effects)}", num_differing, 0, "equal to"),
    ]


def _has_other_effect(effect: LayerEffect) -> bool:
    return not (effect.cosine >= MIN_LAYER_COSINE and abs(effect.size - 1) <= MAX_LAYER_SIZE_ERROR)


def _first_difference(layers: Sequence[LayerDifference], effects: Sequence[LayerEffect], *, strict: bool) -> str | None:
    for layer in layers:
        if strict and _differs_strictly(layer):
            kind, found, own = "worst", layer.ours.worst, layer.noise.worst
        elif not strict and layer.scale is BASE and _differs_clearly(layer, layers):
            kind, found, own = "typical", layer.ours.typical, layer.noise.typical
        else:
            continue
        where = "without the adapter" if layer.scale is BASE else "with the adapter"
        return f"{layer.name} {where}: {kind} row off by {found:.1e} of its RMS; llama.cpp from itself by {own:.1e}"
    for effect in effects:
        if _has_other_effect(effect):
            return (
                f"{effect.name} with the adapter: at scale {effect.scale:g} llama.cpp's effect is {effect.size:.3f} "
                f"times ours, with cosine {effect.cosine:.4f}"
            )
    return None


def _differs_strictly(layer: LayerDifference) -> bool:
    # `not <=` instead of `>`: a NaN is a difference.
    return not layer.ours.worst <= max(STRICT_RELATIVE_ERROR, NOISE_FACTOR * layer.noise.worst)


def _differs_clearly(layer: LayerDifference, layers: Sequence[LayerDifference]) -> bool:
    """Whether a layer of a quantised file is off by more than rounding explains.

    The yardstick is llama.cpp's noise in all layers: in the first ones a variation has hardly begun to act.
    """
    return not layer.ours.typical <= NOISE_FACTOR * max(
        other.noise.typical for other in layers if other.scale == layer.scale
    )
