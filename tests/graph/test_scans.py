"""Chunks of tokens give what one token after another gives, in values and gradients, whatever the decay."""

import pytest
import torch

from pyggtrain.graph.scans import gated_delta_rule, state_space

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


def delta_rule_steps(q, k, v, log_decay, beta, state):  # type: ignore[no-untyped-def]
    outputs = []
    for time in range(q.shape[1]):
        state = state * log_decay[:, time].exp().unsqueeze(-2)
        seen = (state @ k[:, time].unsqueeze(-1)).squeeze(-1)
        change = (v[:, time] - seen) * beta[:, time]
        state = state + change.unsqueeze(-1) * k[:, time].unsqueeze(-2)
        outputs.append((state @ q[:, time].unsqueeze(-1)).squeeze(-1))
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
