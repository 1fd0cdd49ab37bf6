"""Adapters as vectors: scale one, add several, cut the rank.

Everything here keeps the meaning that llama.cpp gives a file, alpha / r per pair. Scaling changes alpha alone. Adding
puts the ranks side by side, [A1; A2] and [B1, B2], which is the sum and no approximation of it; only where the factors
of the parts differ must a quotient go into lora_b, one rounding to float32 (none for powers of two). Cutting the rank
loses what the smaller rank cannot hold, and says how much.

Shape letters: R rank, K columns and N rows of the weight, E experts.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.adapters.lora import scale_of
from pyggtrain.errors import AdapterError

logger = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]

_INVOCATION = "adapter.alora.invocation_tokens"


def factors(name: str, pair: Pair) -> Pair:
    """A pair as (A [..., R, K], B [..., N, R]) whatever its name: llama.cpp wants lora_a of the embedding the other way
    round.
    """
    lora_a, lora_b = pair
    return (lora_b.mT, lora_a) if name.endswith("token_embd.weight") else (lora_a, lora_b)


def as_stored(name: str, pair: Pair) -> Pair:
    """The opposite of `factors`."""
    lora_a, lora_b = pair
    return (lora_b, lora_a.mT) if name.endswith("token_embd.weight") else (lora_a, lora_b)


def update_norm(adapter: AdapterFile, name: str) -> float:
    """Frobenius norm of what a pair adds to its weight: ||s B A||, over all experts. 0: it was never trained."""
    lora_a, lora_b = (half.double() for half in factors(name, adapter.pairs[name]))
    # ||B A||^2 is the trace of (B^T B) (A A^T), which needs no N x K product.
    squared = ((lora_b.mT @ lora_b) * (lora_a @ lora_a.mT).mT).sum()
    return abs(adapter.scale(name)) * math.sqrt(max(float(squared), 0.0))


def scale(adapter: AdapterFile, factor: float) -> AdapterFile:
    """The adapter `factor` times as strong: bit for bit what llama.cpp makes of `--lora-scaled FILE:factor`.

    Raises:
        AdapterError: the factor is 0 or not finite, or float32 cannot hold the product.
    """
    if not math.isfinite(factor) or factor == 0:
        raise AdapterError(f"{adapter.path} cannot be scaled by {factor}: needed a finite number other than 0.")
    adapter = with_alpha(adapter, adapter.alpha or float(_usual_rank(adapter)))
    # llama.cpp's own product, of two float32.
    alpha = adapter.alpha * abs(_f32(factor))
    if not torch.finfo(torch.float32).tiny <= abs(alpha) <= torch.finfo(torch.float32).max:
        raise AdapterError(f"{adapter.path} has alpha {adapter.alpha:g}; times {factor:g} is out of float32's range.")
    scaled = replace(adapter, alpha=_f32(alpha))
    # Readers other than llama.cpp take a negative alpha for a mistake, so the sign goes into lora_b.
    return scaled if factor > 0 else replace(scaled, pairs={n: (a, -b) for n, (a, b) in adapter.pairs.items()})


def add(adapters: Sequence[AdapterFile], weights: Sequence[float] | None = None) -> AdapterFile:
    """The weighted sum of adapters of one model, its ranks put side by side.

    Args:
        adapters: at least one, of one architecture. A pair that only some of them hold is taken from those.
        weights: factor of each; 1 by default.

    Raises:
        AdapterError: architectures or shapes differ, a weight is 0 or not finite, or one of them is only switched on by
            certain tokens.
    """
    weights = list(weights) if weights is not None else [1.0] * len(adapters)
    if not adapters or len(weights) != len(adapters):
        raise AdapterError(f"Found {len(adapters)} adapters and {len(weights)} weights: needed as many, at least one.")
    first = adapters[0]
    for adapter, weight in zip(adapters, weights, strict=True):
        if adapter.architecture != first.architecture:
            raise AdapterError(
                f"{adapter.path} is for architecture '{adapter.architecture}', {first.path} for "
                f"'{first.architecture}': needed the same."
            )
        if not math.isfinite(weight) or weight == 0:
            raise AdapterError(f"{adapter.path} has weight {weight}: needed a finite number other than 0.")
        if _INVOCATION in adapter.other_metadata:
            raise AdapterError(
                f"{adapter.path} is switched on by certain tokens only ({_INVOCATION}): a sum cannot keep that."
            )
    names = dict.fromkeys(name for adapter in adapters for name in adapter.pairs)
    pairs, scales = {}, {}
    for name in names:
        parts = [(factors(name, a.pairs[name]), w * a.scale(name), a) for a, w in _holders(name, adapters, weights)]
        _check_shapes(name, [(pair, adapter) for pair, _, adapter in parts])
        # The factor that most of the rank has anyway: what carries it needs no rounding.
        common = Counter(factor for _, factor, _ in parts).most_common(1)[0][0]
        lora_a = torch.cat([lora_a for (lora_a, _), _, _ in parts], dim=-2)
        lora_b = torch.cat([_times(lora_b, factor / common) for (_, lora_b), factor, _ in parts], dim=-1)
        pairs[name], scales[name] = as_stored(name, (lora_a, lora_b)), common
    return with_scales(_joined(adapters, pairs), scales)


def reduce_rank(adapter: AdapterFile, rank: int) -> "Reduction":
    """The adapter of at most `rank` that is nearest to this one (least squares, by SVD of each B A). It is lossy.

    Pairs of that rank or less stay as they are.

    Raises:
        AdapterError: rank below 1.
    """
    if rank < 1:
        raise AdapterError(f"The wanted rank is {rank}: needed 1 or more.")
    pairs, scales, lost, norms = {}, {}, {}, {}
    for name, stored in adapter.pairs.items():
        pairs[name], scales[name] = stored, adapter.scale(name)
        lora_a, lora_b = factors(name, stored)
        # B A = Qb (Rb Ra^T) Qa^T: the SVD of the small middle is that of the large product.
        q_b, r_b = torch.linalg.qr(lora_b.double())
        q_a, r_a = torch.linalg.qr(lora_a.double().mT)
        u, s, vh = torch.linalg.svd(r_b @ r_a.mT)
        factor = adapter.scale(name) ** 2
        norms[name] = factor * float(s.square().sum())
        lost[name] = 0.0
        if lora_a.shape[-2] <= rank:
            continue
        lost[name] = factor * float(s[..., rank:].square().sum())
        root = s[..., :rank].sqrt()
        small_a = (root[..., :, None] * vh[..., :rank, :]) @ q_a.mT
        small_b = (q_b @ u[..., :, :rank]) * root[..., None, :]
        pairs[name] = as_stored(name, (small_a.float().contiguous(), small_b.float().contiguous()))
    reduced = with_scales(replace(adapter, pairs=pairs), scales)
    worst = max(lost, key=lambda name: lost[name] / norms[name] if norms[name] else 0.0)
    return Reduction(
        reduced,
        relative_error=math.sqrt(sum(lost.values()) / (sum(norms.values()) or 1.0)),
        worst_pair=worst,
        worst_relative_error=math.sqrt(lost[worst] / (norms[worst] or 1.0)),
    )


@dataclass(frozen=True, eq=False)
class Reduction:
    """An adapter cut to a smaller rank.

    Attributes:
        adapter: the result.
        relative_error: Frobenius norm of what was lost over that of the whole update, over all pairs.
        worst_pair, worst_relative_error: the pair that lost most of its own, and how much.
    """

    adapter: AdapterFile
    relative_error: float
    worst_pair: str
    worst_relative_error: float


def with_alpha(adapter: AdapterFile, alpha: float) -> AdapterFile:
    """The same update written with another alpha; what that changes in a pair's factor goes into its lora_b."""
    if alpha == adapter.alpha:
        return adapter
    return with_scales(adapter, {name: adapter.scale(name) for name in adapter.pairs}, alpha)


def with_scales(adapter: AdapterFile, scales: Mapping[str, float], alpha: float | None = None) -> AdapterFile:
    """`adapter` with pairs that shall count `scales` times: one alpha for all, and quotients in lora_b where one alpha
    cannot say it.

    Args:
        adapter: its own alpha is not looked at.
        scales: factor of each pair, by tensor name; float32 numbers.
        alpha: the alpha to write; 0 for none, which makes every factor 1. By default the one that suits most pairs.
    """
    ranks = {name: stored[1].shape[-1] for name, stored in adapter.pairs.items()}
    if alpha is None:
        alpha = Counter(scales[name] * rank for name, rank in ranks.items()).most_common(1)[0][0]
        # Readers other than llama.cpp take a negative alpha for a mistake.
        alpha = alpha if alpha > 0 else float(_usual_rank(adapter))
    alpha = _f32(alpha)
    pairs, num_rounded = {}, 0
    for name, (lora_a, lora_b) in adapter.pairs.items():
        quotient = scales[name] / (scale_of(alpha, ranks[name]) if alpha else 1.0)
        num_rounded += math.frexp(abs(quotient))[0] != 0.5
        pairs[name] = (lora_a, _times(lora_b, quotient))
    if num_rounded:
        logger.info(
            "%d of %d pairs need another factor than alpha / r = %g / r; the quotient is in their lora_b, rounded once",
            num_rounded,
            len(pairs),
            alpha,
        )
    return replace(adapter, alpha=alpha, pairs=pairs)


def _times(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values if factor == 1 else (values.double() * factor).float()


def _holders(name: str, adapters: Sequence[AdapterFile], weights: Sequence[float]) -> list[tuple[AdapterFile, float]]:
    return [(adapter, weight) for adapter, weight in zip(adapters, weights, strict=True) if name in adapter.pairs]


def _check_shapes(name: str, parts: Sequence[tuple[Pair, AdapterFile]]) -> None:
    shapes = [((*b.shape[:-1], a.shape[-1]), adapter.path) for (a, b), adapter in parts]
    for shape, path in shapes[1:]:
        if shape != shapes[0][0]:
            raise AdapterError(
                f"{name} changes a weight of {list(shapes[0][0])} in {shapes[0][1]}, one of {list(shape)} in {path}: "
                "needed the same. The adapters are of different models."
            )


def _joined(adapters: Sequence[AdapterFile], pairs: dict[str, Pair]) -> AdapterFile:
    """The first adapter with these pairs, and of the metadata only what all of them say."""
    first, *others = adapters
    provenance = {k: v for k, v in first.provenance.items() if all(o.provenance.get(k) == v for o in others)}
    metadata = {k: v for k, v in first.other_metadata.items() if all(o.other_metadata.get(k) == v for o in others)}
    return replace(first, pairs=pairs, provenance=provenance, other_metadata=metadata)


def _usual_rank(adapter: AdapterFile) -> int:
    return Counter(lora_b.shape[-1] for _, lora_b in adapter.pairs.values()).most_common(1)[0][0]


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
