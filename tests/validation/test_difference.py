import math

import pytest
import torch

from pyggtrain.validation import difference
from pyggtrain.validation.difference import (
    EffectMoments,
    compare_logits,
    effect_moments,
    merge_differences,
    target_losses,
)


def random_logits(seed: int, rows: int = 7, vocab: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_numbers_follow_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two rows a chunk, so that the sums run over several chunks and a last one that is not full.
    monkeypatch.setattr(difference, "CHUNK_BYTES", 2 * 8 * 50)
    reference, other = random_logits(0), random_logits(1)
    p, q = reference.double().softmax(-1), other.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    gap = (other - reference).double()
    found = compare_logits(reference, other)
    assert found.num_positions == 7
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-12)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-12)
    assert found.kl_standard_error == pytest.approx(float(kl.std() / math.sqrt(7)), rel=1e-9)
    assert found.max_abs == pytest.approx(float(gap.abs().max()), rel=1e-6)
    assert found.rms == pytest.approx(float(gap.square().mean().sqrt()), rel=1e-6)
    assert found.reference_rms == pytest.approx(float(reference.double().square().mean().sqrt()), rel=1e-6)
    assert found.top1_agreement == float((reference.argmax(-1) == other.argmax(-1)).double().mean())


def test_a_tiny_divergence_is_not_lost_to_rounding() -> None:
    logits = random_logits(0, rows=2, vocab=150_000)
    shifted = logits.clone()
    shifted[:, 0] += 1e-3
    p = logits[:, 0].double() - logits.double().logsumexp(-1)
    # KL of a change d of one logit with probability p is p (1 - p) d^2 / 2 to leading order.
    expected = float((p.exp() * (1 - p.exp()) * 0.5e-6).mean())
    assert expected < 1e-9
    assert compare_logits(logits, shifted).mean_kl == pytest.approx(expected, rel=2e-3)


def test_a_shift_of_whole_rows_is_no_divergence() -> None:
    logits = random_logits(0)
    assert abs(compare_logits(logits, logits + torch.arange(7.0).unsqueeze(1)).mean_kl) < 1e-12


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "other"])
def test_numbers_that_are_not_finite_are_within_no_bound(bad: float, side: str) -> None:
    reference, other = random_logits(0), random_logits(0)
    (reference if side == "reference" else other)[3, 4] = bad
    found = merge_differences([compare_logits(random_logits(2), random_logits(2)), compare_logits(reference, other)])
    assert not found.mean_kl <= 1e30
    assert not found.max_abs <= 1e30


def test_merged_documents_equal_their_concatenation() -> None:
    parts = [(random_logits(seed, rows), random_logits(seed + 10, rows)) for seed, rows in [(0, 3), (1, 8), (2, 1)]]
    merged = merge_differences([compare_logits(*part) for part in parts])
    whole = compare_logits(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
    for name, value in vars(whole).items():
        assert getattr(merged, name) == pytest.approx(value, rel=1e-12), name
    assert merged.kl_standard_error == pytest.approx(whole.kl_standard_error, rel=1e-9)


def test_loss_counts_only_learnt_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "CHUNK_BYTES", 2 * 8 * 50)
    logits, targets = random_logits(0), torch.tensor([3, -100, 49, 0, -100, 7, 7])
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, ignore_index=-100, reduction="none")
    assert torch.allclose(target_losses(logits, targets), expected[targets != -100], rtol=1e-12)
    assert target_losses(logits, torch.full((7,), -100)).numel() == 0


def blurred_effect(size: float, noise: float) -> EffectMoments:
    effect = random_logits(0, rows=40, vocab=500)
    base = random_logits(1, rows=40, vocab=500)
    ours, theirs = (noise * random_logits(seed, rows=40, vocab=500) for seed in (2, 3))
    # A shift of a row is no effect, and must not count as one.
    shift = torch.arange(40.0).unsqueeze(1)
    return effect_moments(base, base + effect + ours, base, base + size * effect + theirs + shift)


@pytest.mark.parametrize("size", [-1.0, 0.5, 1.0, 2.0, 100.0])
def test_slope_is_the_ratio_of_two_exact_effects(size: float) -> None:
    assert blurred_effect(size, noise=0).slope == pytest.approx(size, rel=1e-5)
    assert blurred_effect(size, noise=0).correlation == pytest.approx(math.copysign(1, size), rel=1e-5)


def test_slope_of_equal_effects_is_one_in_noise() -> None:
    moments = blurred_effect(1.0, noise=0.5)
    assert moments.slope == pytest.approx(1.0, abs=0.02)
    # What ordinary least squares would say: 1 / (1 + noise^2).
    assert moments.xy / moments.xx == pytest.approx(0.8, abs=0.02)
    assert moments.correlation == pytest.approx(0.8, abs=0.02)


def test_an_ignored_adapter_has_neither_slope_nor_correlation() -> None:
    moments = EffectMoments(xx=5.0, xy=0.0, yy=0.0)
    assert (moments.slope, moments.correlation) == (0.0, 0.0)
    moments = EffectMoments(xx=0.0, xy=0.0, yy=5.0)
    assert (moments.slope, moments.correlation) == (math.inf, 0.0)
