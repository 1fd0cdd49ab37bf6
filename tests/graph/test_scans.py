"""Chunks of tokens give what one token after another gives, in values and gradients, whatever the decay."""

import pytest
import torch

from pyggtrain.graph import scans
from pyggtrain.graph.scans import gated_delta_rule, rwkv_6, rwkv_7, state_space, state_space_by_state

LENGTHS = [1, 15, 16, 17, 64, 65, 130]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def state_space_steps(x, log_decay, b, c, state):  # type: ignore[no-untyped-def]
    outputs = []
    for time in range(x.shape[1]):
        entering = x[:, time, :, :, None] * b[:, time, :, None]
        state = log_decay[:, time].exp()[..., None, None] * state + entering
        outputs.append((state @ c[:, time].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def state_space_by_state_steps(x, log_decay, b, c, state):  # type: ignore[no-untyped-def]
    outputs = []
    for time in range(x.shape[1]):
        entering = x[:, time, :, :, None] * b[:, time, :, None]
        state = log_decay[:, time].exp().unsqueeze(-2) * state + entering
        outputs.append((state @ c[:, time].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def delta_rule_steps(q, k, v, log_decay, beta, state):  # type: ignore[no-untyped-def]
    outputs = []
    for time in range(q.shape[1]):
        state = state * log_decay[:, time].exp().unsqueeze(-2)
        seen = (state @ k[:, time].unsqueeze(-1)).squeeze(-1)
        change = (v[:, time] - seen) * beta[:, time]
        state = state + change.unsqueeze(-1) * k[:, time].unsqueeze(-2)
        outputs.append((state @ q[:, time].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def rwkv_6_steps(k, v, r, decay, bonus, state):  # type: ignore[no-untyped-def]
    outputs = []
    for time in range(k.shape[1]):
        own = v[:, time].unsqueeze(-1) * (bonus * k[:, time]).unsqueeze(-2)
        outputs.append(((state + own) @ r[:, time].unsqueeze(-1)).squeeze(-1))
        state = state * decay[:, time].unsqueeze(-2) + v[:, time].unsqueeze(-1) * k[:, time].unsqueeze(-2)
    return torch.stack(outputs, 1), state


def rwkv_7_steps(r, decay, k, v, a, b, state):  # type: ignore[no-untyped-def]
    outputs = []
    for time in range(k.shape[1]):
        taken = (state @ a[:, time].unsqueeze(-1)) * b[:, time].unsqueeze(-2)
        state = state * decay[:, time].unsqueeze(-2) + taken + v[:, time].unsqueeze(-1) * k[:, time].unsqueeze(-2)
        outputs.append((state @ r[:, time].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def assert_equal_with_gradients(found_of, wanted_of, inputs) -> None:  # type: ignore[no-untyped-def]
    found, wanted = found_of(*inputs), wanted_of(*inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    seeds = [random(*part.shape, seed=9 + index).detach() for index, part in enumerate(wanted)]
    for one, other in zip(
        torch.autograd.grad(found, inputs, seeds), torch.autograd.grad(wanted, inputs, seeds), strict=True
    ):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


# Of the log decay: hardly any, usual, and one that underflows within a chunk.
SIZES = [0.01, 1.0, 40.0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_state_space(length: int, size: float) -> None:
    decay = (-size * random(2, length, 3, seed=1).abs()).detach().requires_grad_()
    inputs = [random(2, length, 3, 4, seed=0), decay, random(2, length, 3, 5, seed=2), random(2, length, 3, 5, seed=3)]
    assert_equal_with_gradients(state_space, state_space_steps, [*inputs, random(2, 3, 4, 5, seed=4)])


def test_state_space_of_heads_in_groups_and_of_several_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "SPAN", 128)
    decay = -random(1, 200, 4, seed=1).abs().detach()
    x, b, c = (random(1, 200, heads, size, seed=heads + size) for heads, size in ((4, 3), (2, 5), (2, 6)))
    c = c[..., :5]

    def steps(x, decay, b, c, state):  # type: ignore[no-untyped-def]
        b, c = (part.repeat_interleave(2, 2) for part in (b, c))
        return state_space_steps(x, decay, b, c, state)

    assert_equal_with_gradients(state_space, steps, [x, decay.requires_grad_(), b, c, random(1, 4, 3, 5, seed=4)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_state_space_by_state(length: int, size: float) -> None:
    decay = (-size * random(2, length, 3, 5, seed=1).abs()).detach().requires_grad_()
    inputs = [random(2, length, 3, 4, seed=0), decay, random(2, length, 3, 5, seed=2), random(2, length, 3, 5, seed=3)]
    assert_equal_with_gradients(state_space_by_state, state_space_by_state_steps, [*inputs, random(2, 3, 4, 5, seed=4)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_by_channel", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("length", LENGTHS)
def test_gated_delta_rule(length: int, is_by_channel: bool, size: float) -> None:
    width = 5 if is_by_channel else 1
    decay = (-size * random(2, length, 3, width, seed=1).abs()).detach().requires_grad_()
    q, k = (torch.nn.functional.normalize(random(2, length, 3, 5, seed=seed), dim=-1).detach() for seed in (0, 2))
    beta = random(2, length, 3, 1, seed=5).sigmoid().detach().requires_grad_()
    inputs = [q.requires_grad_(), k.requires_grad_(), random(2, length, 3, 4, seed=3), decay, beta]
    assert_equal_with_gradients(gated_delta_rule, delta_rule_steps, [*inputs, random(2, 3, 4, 5, seed=4)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_rwkv_6(length: int, size: float) -> None:
    log_decay = (-size * random(2, length, 3, 5, seed=1).abs()).clamp(min=-60).detach().requires_grad_()
    k, v, r = (random(2, length, 3, 5, seed=seed) for seed in (0, 2, 3))
    inputs = [k, v, r, log_decay, random(3, 5, seed=5), random(2, 3, 5, 5, seed=4)]
    # A model's decay is exp(-exp(x)): what counts is its logarithm's gradient.
    found, wanted = (
        lambda k, v, r, log_decay, *rest, scan=scan: scan(k, v, r, log_decay.exp(), *rest)
        for scan in (rwkv_6, rwkv_6_steps)
    )
    assert_equal_with_gradients(found, wanted, inputs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_rwkv_7(length: int, size: float) -> None:
    log_decay = (-size * random(2, length, 3, 5, seed=1).abs()).clamp(min=-60).detach().requires_grad_()
    r, k, v = (random(2, length, 3, 5, seed=seed) for seed in (0, 2, 3))
    # As the model has it: what is taken out lies along one direction, a share of which is put back.
    direction = torch.nn.functional.normalize(random(2, length, 3, 5, seed=5), dim=-1).detach()
    share = random(2, length, 3, 5, seed=6).sigmoid().detach()
    a, b = (-direction).requires_grad_(), (direction * share).requires_grad_()
    found, wanted = (
        lambda r, log_decay, *rest, scan=scan: scan(r, log_decay.exp(), *rest) for scan in (rwkv_7, rwkv_7_steps)
    )
    assert_equal_with_gradients(found, wanted, [r, log_decay, k, v, a, b, random(2, 3, 5, 5, seed=4)])
