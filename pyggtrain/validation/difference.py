"""How far apart two sets of logits are: KL divergence, largest and RMS difference, top-1 agreement, loss.

Logits arrive as float32. Every sum here runs in float64, a few rows at a time: the divergences of interest (1e-6 and
less) drown in the rounding of a float32 softmax over 150,000 entries. Shape letters: P positions, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pyggtrain.ops.linear_cross_entropy import IGNORED

# One float64 copy of a chunk of rows stays below this size; about six are alive at once.
CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class LogitsDifference:
    """Difference of `other` from `reference` over `num_positions` next-token distributions.

    Attributes:
        num_positions: Rows compared.
        mean_kl: Mean of KL(reference || other), in nats.
        mean_squared_kl: Mean of its square.
        max_kl: Largest KL of one position, in nats.
        max_abs: Largest |other - reference| of a single logit.
        rms: Root mean square of other - reference over all logits.
        reference_rms: Root mean square of the reference's logits; the scale that `max_abs` is judged by.
        top1_agreement: Share of positions whose largest logit is the same token, 0 to 1.
    """

    num_positions: int
    mean_kl: float
    mean_squared_kl: float
    max_kl: float
    max_abs: float
    rms: float
    reference_rms: float
    top1_agreement: float

    @property
    def kl_standard_error(self) -> float:
        """Standard error of `mean_kl`, positions taken as a sample; 0 for a single one, which tells nothing of it."""
        if self.num_positions < 2:
            return 0.0
        variance = self.mean_squared_kl - self.mean_kl**2
        # Rounding can leave a tiny negative variance; a NaN must stay one.
        return math.sqrt(0.0 if variance < 0 else variance / (self.num_positions - 1))


def compare_logits(reference_PV: torch.Tensor, other_PV: torch.Tensor) -> LogitsDifference:
    """Compare two sets of logits row by row.

    A NaN or infinity on either side makes the numbers NaN or infinite, which no bound accepts.

    Args:
        reference_PV: [P, V] float32, P >= 1.
        other_PV: [P, V] float32.

    Returns:
        The difference over all P rows.
    """
    shapes = tuple(reference_PV.shape), tuple(other_PV.shape)
    assert shapes[0] == shapes[1], f"logits of one shape are needed, got {shapes[0]} and {shapes[1]}"
    kl, max_abs, same_top1 = [], [], 0
    sum_squared_difference = sum_squared_reference = 0.0
    for reference, other in _chunks(reference_PV, other_PV):
        log_p, log_q = reference.log_softmax(dim=-1), other.log_softmax(dim=-1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
        same_top1 += int((reference.argmax(dim=-1) == other.argmax(dim=-1)).sum())
        difference = other - reference
        max_abs.append(difference.abs().max())
        sum_squared_difference += float(difference.square().sum())
        sum_squared_reference += float(reference.square().sum())
    kl_P = torch.cat(kl)
    num_positions, num_logits = reference_PV.shape[0], reference_PV.numel()
    return LogitsDifference(
        num_positions=num_positions,
        mean_kl=float(kl_P.mean()),
        mean_squared_kl=float(kl_P.square().mean()),
        max_kl=float(kl_P.max()),
        max_abs=float(torch.stack(max_abs).max()),
        rms=math.sqrt(sum_squared_difference / num_logits),
        reference_rms=math.sqrt(sum_squared_reference / num_logits),
        top1_agreement=same_top1 / num_positions,
    )


def merge_differences(parts: Sequence[LogitsDifference]) -> LogitsDifference:
    """Join the differences of several documents (same vocabulary) into the one that their concatenation would give."""
    num_positions = sum(part.num_positions for part in parts)

    def mean(values: Iterator[float]) -> float:
        return sum(value * part.num_positions for value, part in zip(values, parts, strict=True)) / num_positions

    def largest(values: list[float]) -> float:
        # torch's max keeps a NaN; Python's drops it, depending on the order.
        return float(torch.tensor(values, dtype=torch.float64).max())

    return LogitsDifference(
        num_positions=num_positions,
        mean_kl=mean(part.mean_kl for part in parts),
        mean_squared_kl=mean(part.mean_squared_kl for part in parts),
        max_kl=largest([part.max_kl for part in parts]),
        max_abs=largest([part.max_abs for part in parts]),
        rms=math.sqrt(mean(part.rms**2 for part in parts)),
        reference_rms=math.sqrt(mean(part.reference_rms**2 for part in parts)),
        top1_agreement=mean(part.top1_agreement for part in parts),
    )


@dataclass(frozen=True)
class EffectMoments:
    """Second moments of two changes of the logits: ours (x) and llama.cpp's (y), both adapter minus base.

    Each row is centred first, since a shift common to a whole row does not change its softmax.
    """

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def __add__(self, other: "EffectMoments") -> "EffectMoments":
        return EffectMoments(self.xx + other.xx, self.xy + other.xy, self.yy + other.yy)

    @property
    def slope(self) -> float:
        """Size of llama.cpp's change in units of ours, by total least squares; 0 if llama.cpp changes nothing.

        Rounding blurs both changes alike. Ordinary least squares would then read below 1 for equal effects; total
        least squares (Deming regression with equal variances) stays at 1.
        """
        if self.yy == 0.0:
            return 0.0
        gap = self.yy - self.xx
        root = math.hypot(gap, 2 * self.xy)
        if gap >= 0:
            return math.inf if self.xy == 0.0 else (gap + root) / (2 * self.xy)
        # The same number, written so that nothing cancels when x is far larger than y.
        return 2 * self.xy / (root - gap)

    @property
    def correlation(self) -> float:
        """Cosine between the two changes, -1 to 1; 0 if one side changes nothing."""
        return 0.0 if self.xx == 0.0 or self.yy == 0.0 else self.xy / math.sqrt(self.xx * self.yy)


def effect_moments(
    our_base_PV: torch.Tensor, our_adapted_PV: torch.Tensor, base_PV: torch.Tensor, adapted_PV: torch.Tensor
) -> EffectMoments:
    """Moments of what the adapter does to the logits on our side and in llama.cpp; all [P, V] float32."""
    moments = EffectMoments()
    for our_base, our_adapted, base, adapted in _chunks(our_base_PV, our_adapted_PV, base_PV, adapted_PV):
        x, y = our_adapted - our_base, adapted - base
        x, y = x - x.mean(dim=-1, keepdim=True), y - y.mean(dim=-1, keepdim=True)
        moments += EffectMoments(float((x * x).sum()), float((x * y).sum()), float((y * y).sum()))
    return moments


def target_losses(logits_PV: torch.Tensor, targets_P: torch.Tensor) -> torch.Tensor:
    """-log p(target) in nats, float64, of the targets that are not -100, in order.

    Args:
        logits_PV: [P, V] float32.
        targets_P: [P] int64, the token that each row predicts.
    """
    learnt_P = targets_P != IGNORED
    logits_PV, targets_P = logits_PV[learnt_P], targets_P[learnt_P]
    losses = torch.empty(len(targets_P), dtype=torch.float64)
    step = _rows_per_chunk(logits_PV)
    for start in range(0, len(targets_P), step):
        log_p = logits_PV[start : start + step].double().log_softmax(dim=-1)
        losses[start : start + step] = -log_p.gather(1, targets_P[start : start + step].unsqueeze(1)).squeeze(1)
    return losses


def _rows_per_chunk(rows_PV: torch.Tensor) -> int:
    return max(1, CHUNK_BYTES // (8 * rows_PV.shape[1]))


def _chunks(*matrices_PV: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same few rows of each matrix, as float64."""
    step = _rows_per_chunk(matrices_PV[0])
    for start in range(0, matrices_PV[0].shape[0], step):
        yield tuple(matrix_PV[start : start + step].double() for matrix_PV in matrices_PV)
