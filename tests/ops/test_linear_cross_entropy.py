"""ops.linear_cross_entropy: the chunked loss and the gradient it makes in forward."""

import subprocess
import sys

import pytest
import torch

from pyggtrain.ops import linear_cross_entropy, quant_matmul
from pyggtrain.ops.linear_cross_entropy import default_chunk

VOCAB, WIDTH = 203, 64


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def targets_of(num_tokens, *, ignored, seed=3):
    """Random targets; every position p with p % 2 == 1 ignored if asked for."""
    targets = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    if ignored:
        targets[1::2] = -100
    return targets


def reference(x, w, targets, a=None, b=None, scale=1.0, mask=None):
    logits = x @ w.t()
    if a is not None:
        logits = logits + scale * ((x if mask is None else x * mask) @ a.t()) @ b.t()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("ignored", [False, True])
def test_loss_and_gradient_are_as_near_as_plain_torch(make_weight, earned, chunk, type, ignored):
    weight, exact = make_weight(type, VOCAB, WIDTH)
    x, targets = random(64, WIDTH), targets_of(64, ignored=ignored)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        given = x.to(dtype or torch.float32, copy=True).requires_grad_()
        if dtype is None:
            loss, num_targets = linear_cross_entropy(given, weight, targets, chunk=chunk, compute="exact")
            assert num_targets == (32 if ignored else 64)
        else:
            loss = reference(given, exact.to(dtype), targets)
        # The caller divides by the number of targets of the whole step.
        (loss / 10).backward()
        outcomes.append((loss.detach(), given.grad))
    for result, plain, exact_result in zip(*outcomes, strict=True):
        earned(result, plain, exact_result)
    if ignored:
        assert torch.equal(outcomes[0][1][1::2], torch.zeros(32, WIDTH)), "an ignored position has a gradient"


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("has_dropout", [False, True])
def test_head_with_lora_is_as_near_as_plain_torch(make_weight, earned, chunk, has_dropout):
    weight, exact = make_weight("Q8_0", VOCAB, WIDTH)
    targets = targets_of(20, ignored=True)
    mask = torch.rand(20, WIDTH, generator=torch.Generator().manual_seed(9)) < 0.7 if has_dropout else None
    inputs = random(20, WIDTH), random(4, WIDTH, seed=2), random(VOCAB, 4, seed=4)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        x, a, b = (tensor.to(dtype or torch.float32, copy=True).requires_grad_() for tensor in inputs)
        if dtype is None:
            loss, _ = linear_cross_entropy(
                x,
                weight,
                targets,
                chunk=chunk,
                lora_a_RD=a,
                lora_b_VR=b,
                scale=0.6,
                dropout_mask_TD=mask,
                compute="exact",
            )
        else:
            loss = reference(x, exact.to(dtype), targets, a, b, 0.6, mask)
        loss.backward()
        outcomes.append((loss.detach(), x.grad, a.grad, b.grad))
    for result, plain, exact_result in zip(*outcomes, strict=True):
        earned(result, plain, exact_result)


def test_gradcheck_of_the_operation_itself(make_weight):
    weight, _ = make_weight("Q8_0", 11, 32)
    shapes = [(4, 32), (2, 32), (11, 2)]
    inputs = [random(*shape, seed=seed, dtype=torch.float64).requires_grad_() for seed, shape in enumerate(shapes)]
    targets = torch.tensor([3, -100, 0, 10])
    assert torch.autograd.gradcheck(
        lambda x, a, b: linear_cross_entropy(x, weight, targets, chunk=2, lora_a_RD=a, lora_b_VR=b, scale=1.5)[0],
        inputs,
    )


def test_large_vocabulary_and_half_the_rows_ignored(make_weight, earned):
    # 64 positions, half of them ignored, 262,144 tokens: the case in which fused losses went wrong elsewhere.
    weight, exact = make_weight("Q4_0", 262_144, 32)
    targets = torch.randint(0, 262_144, (64,), generator=torch.Generator().manual_seed(0))
    targets[::2] = -100
    x = (random(64, 32) * 3).requires_grad_()
    loss, _ = linear_cross_entropy(x, weight, targets, compute="exact")
    loss.backward()
    x64 = x.detach().double().requires_grad_()
    reference(x64, exact, targets).backward()
    assert float((x.grad - x64.grad).norm() / x64.grad.norm()) < 1e-5


def test_mean_over_the_step_does_not_depend_on_its_cuts(make_weight):
    weight, _ = make_weight("Q8_0", VOCAB, WIDTH)
    x, targets = random(12, WIDTH).requires_grad_(), targets_of(12, ignored=False)
    targets[10:] = -100
    whole, num_whole = linear_cross_entropy(x, weight, targets, compute="exact")
    (whole_gradient,) = torch.autograd.grad(whole / num_whole, x)
    # 2 targets, 8 targets, and none at all.
    total, count = torch.zeros(()), 0
    for rows in (slice(0, 2), slice(2, 10), slice(10, 12)):
        loss, num_targets = linear_cross_entropy(x[rows], weight, targets[rows], compute="exact")
        total, count = total + loss, count + num_targets
    (cut_gradient,) = torch.autograd.grad(total / count, x)
    assert count == num_whole == 10
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-5, atol=1e-6)


def test_no_target_gives_zero_and_a_zero_gradient(make_weight):
    weight, _ = make_weight("Q8_0", VOCAB, WIDTH)
    x = random(5, WIDTH).requires_grad_()
    loss, num_targets = linear_cross_entropy(x, weight, torch.full((5,), -100))
    loss.backward()
    assert num_targets == 0
    assert loss.item() == 0.0
    assert torch.equal(x.grad, torch.zeros(5, WIDTH))


def test_one_target(make_weight):
    weight, exact = make_weight("Q8_0", VOCAB, WIDTH)
    x, targets = random(5, WIDTH), torch.full((5,), -100)
    targets[3] = 7
    loss, num_targets = linear_cross_entropy(x, weight, targets, compute="exact")
    assert num_targets == 1
    torch.testing.assert_close(loss.double(), reference(x.double(), exact, targets), rtol=1e-5, atol=1e-5)


def test_logits_far_apart_give_a_finite_loss(make_weight):
    # The target's probability underflows float32, its logarithm does not.
    weight, exact = make_weight("F32", VOCAB, WIDTH)
    x, targets = (random(8, WIDTH) * 1000).requires_grad_(), targets_of(8, ignored=False)
    loss, _ = linear_cross_entropy(x, weight, targets)
    loss.backward()
    torch.testing.assert_close(loss.double(), reference(x.double(), exact, targets), rtol=1e-5, atol=0)
    assert torch.isfinite(x.grad).all()


def test_gradient_is_never_made_in_evaluation(make_weight, monkeypatch):
    weight, _ = make_weight("Q8_0", VOCAB, WIDTH)
    x, targets = random(9, WIDTH).requires_grad_(), targets_of(9, ignored=True)
    expected, _ = linear_cross_entropy(x, weight, targets)

    def refuse(*args, **kwargs):
        raise AssertionError("a gradient was made without gradients enabled")

    monkeypatch.setattr(quant_matmul, "backward", refuse)
    with torch.no_grad():
        loss, _ = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("num_vocab", "num_targets", "chunk"),
    [
        (49_152, 1024, 341),  # 64 MiB
        (49_152, 600, 200),  # a third
        (49_152, 200, 85),  # 16 MiB
        (151_936, 100, 64),  # enough rows
        (10**6, 1024, 16),  # 64 MiB are fewer rows than that
        (10**9, 1024, 1),
    ],
)
def test_default_chunk_is_a_third_of_the_targets_within_bounds(num_vocab, num_targets, chunk):
    assert default_chunk(num_vocab, num_targets) == chunk


PEAK_SCRIPT = """
import re, sys, torch
from pathlib import Path
from pyggtrain.gguf import quantize_tensor
from pyggtrain.ops import linear_cross_entropy
weight = quantize_tensor("w", torch.randn(65_536, 32), "F32")
x, targets = torch.randn(256, 32, requires_grad=True), torch.randint(0, 65_536, (256,))
def peak_mib(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
linear_cross_entropy(x[:16], weight, targets[:16], chunk=16)[0].backward()
before = peak_mib()
linear_cross_entropy(x, weight, targets, chunk=int(sys.argv[1]))[0].backward()
print(peak_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_is_that_of_a_chunk(tmp_path):
    # All logits of 256 tokens take 64 MiB, those of 16 take 4.
    def peak_mib(chunk):
        command = [sys.executable, "-c", PEAK_SCRIPT, str(chunk)]
        # Away from the project's folder, where Python would find the source instead of the installed package.
        return float(subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout)

    assert peak_mib(16) < 16
    assert peak_mib(256) > 48, "the measurement does not see the logits"


@pytest.mark.parametrize("needs_lora", [False, True])
def test_opcheck(make_weight, needs_lora):
    weight, _ = make_weight("Q8_0", 40, 32)
    x, targets = random(5, 32).requires_grad_(), torch.arange(5)
    pair = (random(3, 32).requires_grad_(), random(40, 3).requires_grad_()) if needs_lora else (None, None)
    arguments = (x, weight.blocks, "Q8_0", targets, *pair, 0.5, None, 2, "exact", True, needs_lora)
    torch.library.opcheck(torch.ops.pyggtrain.linear_cross_entropy.default, arguments)


@pytest.mark.parametrize(
    ("targets", "options", "needed"),
    [
        (torch.tensor([1, 2, VOCAB]), {}, f"needed 0 to {VOCAB - 1}"),
        (torch.tensor([1, 2, -5]), {}, "needed 0 to"),
        (torch.tensor([1, 2]), {}, r"needed \[3\]"),
        (torch.tensor([1, 2, 3]), {"chunk": 0}, "at least 1 token"),
        (torch.tensor([1, 2, 3]), {"lora_a_RD": torch.zeros(2, WIDTH)}, "come together"),
    ],
)
def test_wrong_arguments_are_named(make_weight, targets, options, needed):
    weight, _ = make_weight("Q8_0", VOCAB, WIDTH)
    with pytest.raises(ValueError, match=needed):
        linear_cross_entropy(random(3, WIDTH), weight, targets, **options)
