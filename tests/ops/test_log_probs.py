"""ops.log_probs: per-token log-probabilities in chunks, and a gradient that differs from token to token."""

import os
import subprocess
import sys

import pytest
import torch

from pyggtrain.ops import linear_cross_entropy, log_probs, lora_linear, quant_linear

VOCAB, WIDTH = 203, 64


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def targets_of(num_tokens, *, ignored, seed=3):
    targets = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    if ignored:
        targets[1::2] = -100
    return targets


def reference(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found = torch.log_softmax(logits, dim=1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(targets < 0, torch.zeros_like(found), found)


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("ignored", [False, True])
def test_values_and_weighted_gradient_are_as_near_as_plain_torch(make_weight, earned, chunk, type, ignored):
    weight, exact = make_weight(type, VOCAB, WIDTH)
    x, targets, weights = random(64, WIDTH), targets_of(64, ignored=ignored), random(64, seed=8)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        given = x.to(dtype or torch.float32, copy=True).requires_grad_()
        if dtype is None:
            found = log_probs(
                lambda rows, x: quant_linear(x, weight, compute="exact"), given, targets, VOCAB, chunk=chunk
            )
        else:
            found = reference(given @ exact.to(dtype).t(), targets)
        # Every token has a weight of its own, known only after the values.
        (found * weights.to(found.dtype) * found.detach()).sum().backward()
        outcomes.append((found.detach(), given.grad))
    for result, plain, exact_result in zip(*outcomes, strict=True):
        earned(result, plain, exact_result)
    if ignored:
        assert torch.equal(outcomes[0][0][1::2], torch.zeros(32)), "an ignored position has a value"
        assert torch.equal(outcomes[0][1][1::2], torch.zeros(32, WIDTH)), "an ignored position has a gradient"


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_head_with_lora_is_as_near_as_plain_torch(make_weight, earned, chunk):
    weight, exact = make_weight("Q8_0", VOCAB, WIDTH)
    targets, weights = targets_of(20, ignored=True), random(20, seed=8)
    inputs = random(20, WIDTH), random(4, WIDTH, seed=2), random(VOCAB, 4, seed=4)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        x, a, b = (tensor.to(dtype or torch.float32, copy=True).requires_grad_() for tensor in inputs)
        if dtype is None:

            def head(rows, x, a=a, b=b):
                return lora_linear(x, weight, a, b, scale=0.6, compute="exact")

            found = log_probs(head, x, targets, VOCAB, chunk=chunk)
        else:
            found = reference(x @ exact.to(dtype).t() + 0.6 * (x @ a.t()) @ b.t(), targets)
        (found * weights.to(found.dtype)).sum().backward()
        outcomes.append((found.detach(), x.grad, a.grad, b.grad))
    for result, plain, exact_result in zip(*outcomes, strict=True):
        earned(result, plain, exact_result)


def test_gradcheck(make_weight):
    weight, _ = make_weight("Q8_0", 11, 32)
    x, targets = random(4, 32, dtype=torch.float64).requires_grad_(), torch.tensor([3, -100, 0, 10])
    assert torch.autograd.gradcheck(
        lambda x: log_probs(lambda rows, x: quant_linear(x, weight), x, targets, 11, chunk=2), (x,)
    )


def test_the_sum_is_the_negative_cross_entropy(make_weight):
    weight, _ = make_weight("Q8_0", VOCAB, WIDTH)
    x, targets = random(30, WIDTH), targets_of(30, ignored=True)
    found = log_probs(lambda rows, x: quant_linear(x, weight, compute="exact"), x, targets, VOCAB)
    loss, _ = linear_cross_entropy(x, weight, targets, compute="exact")
    torch.testing.assert_close(-found.sum(), loss)


def test_the_head_is_told_which_rows_it_computes():
    x, targets = random(6, 4), torch.tensor([-100, 1, 2, -100, 3, 0])
    asked = []
    log_probs(lambda rows, x: asked.append(rows.tolist()) or x, x, targets, 4, chunk=3)
    assert asked == [[1, 2, 4], [5]]


def test_no_target_gives_zeros_and_a_zero_gradient(make_weight):
    x = random(5, WIDTH).requires_grad_()
    found = log_probs(lambda rows, x: x, x, torch.full((5,), -100), VOCAB)
    found.sum().backward()
    assert torch.equal(found, torch.zeros(5)) and torch.equal(x.grad, torch.zeros(5, WIDTH))


def test_logits_far_apart_give_finite_values():
    x, targets = (random(8, VOCAB) * 1e4).requires_grad_(), targets_of(8, ignored=False)
    found = log_probs(lambda rows, x: x, x, targets, VOCAB)
    found.sum().backward()
    torch.testing.assert_close(found.double(), reference(x.detach().double(), targets), rtol=1e-5, atol=0)
    assert torch.isfinite(x.grad).all()


def test_without_gradients_the_head_runs_once(make_weight):
    weight, _ = make_weight("Q8_0", VOCAB, WIDTH)
    x, targets = random(9, WIDTH).requires_grad_(), targets_of(9, ignored=False)
    calls = []

    def head(rows, x):
        calls.append(len(rows))
        return quant_linear(x, weight)

    with torch.no_grad():
        log_probs(head, x, targets, VOCAB, chunk=5)
    assert calls == [5, 4]
    log_probs(head, x, targets, VOCAB, chunk=5).sum().backward()
    assert sorted(calls) == [4, 4, 4, 5, 5, 5]


PEAK_SCRIPT = """
import re, sys, torch
from pathlib import Path
from pyggtrain.gguf import quantize_tensor
from pyggtrain.ops import log_probs, quant_linear
weight = quantize_tensor("w", torch.randn(65_536, 32), "F32")
x, targets = torch.randn(256, 32, requires_grad=True), torch.randint(0, 65_536, (256,))
def peak_mib(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
def head(rows, x): return quant_linear(x, weight)
def run(x, targets, chunk): log_probs(head, x, targets, 65_536, chunk=chunk).sum().backward()
run(x[:16], targets[:16], 16)
before = peak_mib()
run(x, targets, int(sys.argv[1]))
print(peak_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_is_that_of_a_chunk(tmp_path):
    # All logits of 256 tokens take 64 MiB, those of 16 take 4.
    def peak_mib(chunk):
        command = [sys.executable, "-c", PEAK_SCRIPT, str(chunk)]
        # glibc would keep freed blocks of this size; what is wanted is what is alive.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        return float(done.stdout)

    assert peak_mib(16) < 12
    assert peak_mib(256) > 96, "the measurement does not see the logits"


@pytest.mark.parametrize(
    ("targets", "chunk", "needed"),
    [
        (torch.tensor([1, 2, VOCAB]), None, f"needed 0 to {VOCAB - 1}"),
        (torch.tensor([1, 2, -5]), None, "needed 0 to"),
        (torch.tensor([1, 2]), None, r"needed \[3\]"),
        (torch.tensor([1, 2, 3]), 0, "at least 1 token"),
    ],
)
def test_wrong_arguments_are_named(targets, chunk, needed):
    with pytest.raises(ValueError, match=needed):
        log_probs(lambda rows, x: x, random(3, VOCAB), targets, VOCAB, chunk=chunk)
