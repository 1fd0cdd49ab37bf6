"""Activations on the host: the same gradients, few parts on the device at a time, and in which order they move."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pyggtrain.nn import HostStash, host_stash

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]
NUM_LAYERS = 5


@pytest.fixture(autouse=True)
def _every_tensor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_stash, "_MIN_BYTES", 1)
    # Fresh memory is never right by chance.
    # Only warned: cuBLAS would want a workspace that is chosen before the process first uses the GPU.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def halves(weight: torch.Tensor, x: torch.Tensor, stash: HostStash | None) -> torch.Tensor:
    """A layer of a half, a few operations that are computed again, and a second half."""
    with nullcontext() if stash is None else stash.part():
        x = x + torch.tanh(x @ weight)
    with nullcontext() if stash is None else stash.part(is_half=False):
        z = checkpoint(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]) * 1.5, x, use_reentrant=False)
    with nullcontext() if stash is None else stash.part():
        return x + torch.sigmoid(z @ weight.t())


def gradients(device: str, stash: HostStash | None, steps: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(16, 16, generator=generator).mul_(0.2).to(device)) for _ in range(NUM_LAYERS)
    ]
    for step in range(steps):
        # Rows differ from step to step: places on the host are of several sizes.
        x = torch.randn(7 + step % 3, 16, generator=generator).to(device)
        if stash is not None:
            stash.begin()
        for weight in weights:
            x = halves(weight, x, stash)
        x.square().sum().backward()
        if stash is not None:
            stash.join()
    return [weight.grad for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_without(device: str) -> None:
    expected = gradients(device, None, steps=4)
    found = gradients(device, HostStash(torch.device(device)), steps=4)
    assert len(found) == len(expected) == NUM_LAYERS
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_only_halves_are_waited_for_and_two_are_held() -> None:
    stash = HostStash(CPU)
    stash.begin()
    weight, x = torch.nn.Parameter(torch.eye(16)), torch.ones(3, 16, requires_grad=True)
    held = []
    for _ in range(NUM_LAYERS):
        x = halves(weight, x, stash)
        held.append([any(entry.source is not None for entry in part.entries) for part in stash._parts])
    # Three parts a layer: when a layer's second half begins, all before that layer has left.
    for layer, parts in enumerate(held):
        first = 3 * layer
        assert not any(parts[:first])
        # What stands between two halves makes nobody wait.
        assert all(parts[first:])
    for part in stash._parts:
        assert part.entries


def test_what_comes_back_is_the_part_and_the_half_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stash = HostStash(CPU)
    stash.begin()
    weight, x = torch.nn.Parameter(torch.eye(16)), torch.ones(3, 16, requires_grad=True)
    for _ in range(NUM_LAYERS):
        x = halves(weight, x, stash)
    seen: list[int] = []
    most = 0
    fetch, take = stash._fetch, stash._take

    def taken(entry: host_stash._Entry, index: int) -> torch.Tensor:
        tensor = take(entry, index)
        if index >= 2 and stash._parts[index].is_half:
            before = next(one for one in reversed(range(index)) if stash._parts[one].is_half)
            assert all(entry.host is None for part in stash._parts[before:index] for entry in part.entries)
        return tensor

    monkeypatch.setattr(stash, "_take", taken)

    def watched(part: host_stash._Part) -> None:
        nonlocal most
        if any(entry.host is not None for entry in part.entries):
            seen.append(stash._parts.index(part))
        fetch(part)
        most = max(most, sum(any(entry.fetched is not None for entry in part.entries) for part in stash._parts))

    monkeypatch.setattr(stash, "_fetch", watched)
    x.sum().backward()
    assert seen == sorted(seen, reverse=True) and set(seen) == set(range(3 * NUM_LAYERS))
    # A half, what stands before it, and the half before that.
    assert most <= 3


def test_backward_runs_once() -> None:
    stash = HostStash(CPU)
    stash.begin()
    x = torch.ones(3, 16, requires_grad=True)
    y = halves(torch.nn.Parameter(torch.eye(16)), x, stash).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out once"):
        y.backward()


def test_places_of_a_forward_without_backward_are_used_again() -> None:
    stash = HostStash(CPU)
    places = []
    for _ in range(3):
        stash.begin()
        x = torch.ones(3, 16, requires_grad=True)
        halves(torch.nn.Parameter(torch.eye(16)), x, stash)
        places.append(
            {entry.host.data_ptr() for part in stash._parts for entry in part.entries if entry.host is not None}
        )
    assert places[0] == places[1] == places[2]
