"""Does a merged file compute what base + adapters compute? llama.cpp runs both.

They cannot agree exactly: merging encodes W + s B A anew, and a quantised type cannot hold it exactly. So the yardstick
is measured. The merge has noted, tensor by tensor, how far the written weights are from the wanted ones
(`adapters.merge.Rounding`), and llama.cpp runs base + adapters once more with as much error put in *at random*: one
more adapter with, for each tensor, a pair of random factors whose product has the RMS of that tensor's rounding, so
that an input which favours no columns sees the same error of the product as from the rounding. The head of a tied model
takes no adapter; its logits get the noise directly, since they are the product.

Bound on the mean KL(base + adapters || merged):

    ROUNDING_FACTOR * KL(base + adapters || the same with the random error)
    + NOISE_FACTOR * the larger of llama.cpp's own noise on either file (docs/parity.md)
    + two standard errors

A merge with a wrong factor, a transposed pair or a lost adapter is off by the whole effect of the adapter, which has
another direction than noise: where the effect is clear of the rounding, its size and direction must be right too.

Shape letters: T tokens, P compared positions, V vocabulary, R rank, N rows and K columns of a weight.
"""

import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

from pyggtrain import _bridge
from pyggtrain.adapters.arithmetic import as_stored
from pyggtrain.adapters.gguf_adapter import AdapterFile, write
from pyggtrain.adapters.merge import Rounding
from pyggtrain.gguf import GGUFFile
from pyggtrain.validation.difference import (
    EffectMoments,
    LogitsDifference,
    compare_logits,
    effect_moments,
    merge_differences,
)
from pyggtrain.validation.evidence import Excerpt, select_excerpts
from pyggtrain.validation.parity import (
    CLEAR_EFFECT,
    MAX_SLOPE_ERROR,
    MIN_CORRELATION,
    NOISE_FACTOR,
    NUM_STANDARD_ERRORS,
    STRICT_KL,
    ParitySettings,
)
from pyggtrain.validation.parity_report import Check, ParityReport
from pyggtrain.validation.runtime import RuntimeSettings

# Rounding is not quite noise: it is bound to the weight it rounds, and some columns see larger inputs than others.
# Where it rules, its KL was measured to be 0.67 to 1.36 times that of as much random error (docs/adapters.md).
ROUNDING_FACTOR = 3.0
# More averages better over inputs; a stack of experts needs one for each of them.
_NOISE_RANK, _NOISE_RANK_OF_EXPERTS = 8, 1

Scaled = Sequence[tuple[Path, float]]
"""Adapter files with the scale that each is served with."""


def verify_merge(
    base: GGUFFile,
    adapters: Scaled,
    merged: GGUFFile,
    rounding: Mapping[str, Rounding],
    documents: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    adaptable: Collection[str],
    settings: ParitySettings | None = None,
    is_causal: bool = True,
) -> ParityReport:
    """Compare a merged file with its base and adapters in llama.cpp.

    Args:
        base: the model that was merged into.
        adapters: what was merged, with its scales.
        merged: the new file.
        rounding: what encoding did to each tensor.
        documents: (token ids, labels) to compare on, as in `parity.verify_adapter`.
        adaptable: tensors that llama.cpp applies an adapter to.
        settings: tokens and threads; its mode is not looked at.
        is_causal: no token of the model sees a later one.

    Returns:
        The report; `passed` is False if a bound is broken.
    """
    settings = settings or ParitySettings()
    excerpts, notes = select_excerpts(documents, max_tokens=settings.max_tokens)
    longest = max(len(excerpt.tokens) for excerpt in excerpts)
    plain = RuntimeSettings(num_ctx=longest, num_ubatch=longest, num_threads=settings.num_threads)
    is_float = all(info.type == "F32" for file in (base, merged) for info in file.tensor_infos.values())

    with tempfile.TemporaryDirectory() as folder:
        random_error = Path(folder) / "random-error.gguf"
        _write_random_error(random_error, base, rounding, adaptable)
        with closing(_Served(base.path, adapters, plain)) as served:
            wanted = served.logits(excerpts)
            without = served.logits(excerpts, scale=0.0)
            disturbed = served.logits(excerpts, also=random_error)
            if (head := rounding.get("token_embd.weight")) is not None and "output.weight" not in base.tensor_infos:
                disturbed = _with_head_error(disturbed, served.head_inputs(excerpts), head.rms)
    with closing(_Served(merged.path, [], plain)) as served:
        found = served.logits(excerpts)
    noise = {
        f"{label}, {variation}": _difference(reference, _logits(file.path, held, changed, excerpts))
        for label, file, held, reference in (("base + adapter", base, adapters, wanted), ("merged", merged, [], found))
        for variation, changed in _variations(plain, is_float=is_float, is_causal=is_causal).items()
    }

    difference, of_rounding = _difference(wanted, found), _difference(wanted, disturbed)
    noise_kl = max((own.mean_kl for own in noise.values()), default=0.0)
    bound = max(STRICT_KL, ROUNDING_FACTOR * of_rounding.mean_kl + NOISE_FACTOR * noise_kl)
    bound += NUM_STANDARD_ERRORS * difference.kl_standard_error
    checks = [
        Check("mean KL(base + adapter || merged)", difference.mean_kl, bound, unit="nats"),
        Check("largest KL of one position", difference.max_kl, unit="nats"),
        Check("RMS difference of the logits", difference.rms),
        Check("RMS of the logits", difference.reference_rms),
        Check("same most likely token", difference.top1_agreement, unit="%"),
        Check("yardstick: KL of as much random error", of_rounding.mean_kl, unit="nats"),
        *(Check(f"yardstick: {name}: mean KL", own.mean_kl, unit="nats") for name, own in noise.items()),
    ]
    effect_checks, effect_notes = _effect(without, wanted, found, max(difference.mean_kl, noise_kl, STRICT_KL))
    return ParityReport(
        base=str(base.path),
        adapter=f"{' + '.join(str(path) for path, _ in adapters)} = {merged.path}",
        runtime=f"llama.cpp {_bridge.LLAMA_CPP_COMMIT} in the bridge",
        mode="strict" if is_float else "statistical",
        num_documents=len(excerpts),
        num_tokens=sum(len(excerpt.tokens) for excerpt in excerpts),
        num_positions=sum(len(excerpt.positions) for excerpt in excerpts),
        checks=(*checks, *effect_checks),
        first_difference=None,
        notes=(*notes, *effect_notes, *_uncovered(base, rounding, adaptable)),
    )


class _Served:
    """llama.cpp with one model and any number of adapters."""

    def __init__(self, model: Path, adapters: Scaled, settings: RuntimeSettings) -> None:
        self._session = _bridge.Session(
            str(model),
            num_ctx=settings.num_ctx,
            num_ubatch=settings.num_ubatch,
            num_threads=settings.num_threads,
            kv_type=settings.kv_type,
            flash_attention=settings.flash_attention,
        )
        self._adapters = [(self._session.load_adapter(str(path)), scale) for path, scale in adapters]

    def logits(
        self, excerpts: Sequence[Excerpt], *, scale: float = 1.0, also: Path | None = None
    ) -> list[torch.Tensor]:
        """Logits [P, V] of each excerpt with all adapters, `scale` times as strong; `also`: one more adapter."""
        active = [(handle, scale * own) for handle, own in self._adapters] if scale else []
        if also is not None:
            active.append((self._session.load_adapter(str(also)), 1.0))
        self._session.set_adapters(active)
        return [from_dlpack(self._session.logits(excerpt.tokens)) for excerpt in excerpts]

    def head_inputs(self, excerpts: Sequence[Excerpt]) -> list[torch.Tensor]:
        """What the output head multiplies, [T, D] of each excerpt."""
        return [
            from_dlpack(self._session.eval_tensors(excerpt.tokens, ["result_norm"])[-1][2]).reshape(
                len(excerpt.tokens), -1
            )
            for excerpt in excerpts
        ]

    def close(self) -> None:
        self._session.close()


def _logits(
    model: Path, adapters: Scaled, settings: RuntimeSettings, excerpts: Sequence[Excerpt]
) -> list[torch.Tensor]:
    with closing(_Served(model, adapters, settings)) as served:
        return served.logits(excerpts)


def _variations(plain: RuntimeSettings, *, is_float: bool, is_causal: bool) -> dict[str, RuntimeSettings]:
    """Ways to compute that should not matter; see `evidence.LlamaCpp.variations`."""
    if not is_causal:
        return {} if is_float else {"flash attention": replace(plain, kv_type="F16", flash_attention=True)}
    one_by_one = {"ubatch 1": replace(plain, num_ubatch=1)}
    return one_by_one if is_float else {**one_by_one, "F16 KV": replace(plain, kv_type="F16")}


def _write_random_error(
    path: Path, base: GGUFFile, rounding: Mapping[str, Rounding], adaptable: Collection[str]
) -> None:
    """An adapter whose every B A has independent entries of the RMS that rounding left in that tensor."""
    pairs = {}
    generator = torch.Generator().manual_seed(0)
    for name, rounded in rounding.items():
        if name not in adaptable:
            continue
        *experts, num_out, num_in = base.tensor_infos[name].shape
        rank = _NOISE_RANK_OF_EXPERTS if experts else _NOISE_RANK
        # The sum of `rank` products of two numbers of this size has the wanted RMS.
        size = math.sqrt(rounded.rms / math.sqrt(rank))
        lora_a = torch.randn(*experts, rank, num_in, generator=generator) * size
        lora_b = torch.randn(*experts, num_out, rank, generator=generator) * size
        pairs[name] = as_stored(name, (lora_a, lora_b))
    # Without an alpha each pair counts as it is. llama.cpp refuses an adapter without a pair.
    write(path, AdapterFile(path, base.architecture, 0.0, pairs, {}))


def _with_head_error(logits: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], rms: float) -> list[torch.Tensor]:
    """Logits [T, V] as a head with independent errors of this RMS would give them."""
    generator = torch.Generator().manual_seed(1)
    return [
        logits_TV + torch.randn(logits_TV.shape, generator=generator) * (rms * x_TD.norm(dim=-1, keepdim=True))
        for logits_TV, x_TD in zip(logits, inputs, strict=True)
    ]


def _effect(
    without: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor], noise_kl: float
) -> tuple[list[Check], list[str]]:
    """Size and direction of what merging changed, against what the adapters change."""
    effect_kl = _difference(without, wanted).mean_kl
    checks = [Check("effect of the adapter: mean KL(base || base + adapter)", effect_kl, unit="nats")]
    if effect_kl <= CLEAR_EFFECT * noise_kl:
        return checks, [
            "The adapter's effect is not clear of the rounding: its size and direction could not be checked. "
            "Serve the adapter beside its base, or merge into a finer type."
        ]
    moments = EffectMoments()
    for base_PV, wanted_PV, found_PV in zip(without, wanted, found, strict=True):
        moments += effect_moments(base_PV, wanted_PV, base_PV, found_PV)
    return [
        *checks,
        Check("effect: merged file's size over the adapter's, off 1 by", abs(moments.slope - 1), MAX_SLOPE_ERROR),
        Check("effect: correlation of the two", moments.correlation, MIN_CORRELATION, "more than"),
    ], []


def _uncovered(base: GGUFFile, rounding: Mapping[str, Rounding], adaptable: Collection[str]) -> list[str]:
    is_tied = "output.weight" not in base.tensor_infos
    left = [
        name
        for name, rounded in rounding.items()
        if rounded.rms > 0 and name not in adaptable and not (is_tied and name == "token_embd.weight")
    ]
    return [f"The yardstick leaves out the rounding of {len(left)} tensors: {', '.join(left[:3])}."] if left else []


def _difference(reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> LogitsDifference:
    return merge_differences([compare_logits(*pair) for pair in zip(reference, other, strict=True)])
