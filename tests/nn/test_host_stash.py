"""Activations on the host: the same gradients, few parts on the device at a time, and in which order they move."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def sharing(weight: torch.Tensor, x: torch.Tensor, stash: HostStash | None) -> torch.Tensor:
    """A layer whose parts save what others do: x the first and the last, the normed y the half and the last, each in
    its own shape, and the half one product twice. Eight saved tensors, five different ones.
    """
    x = x[None, None]
    with nullcontext() if stash is None else stash.part(is_half=False):
        y = checkpoint(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), x, use_reentrant=False)
    with nullcontext() if stash is None else stash.part():
        z = y.flatten(0, 2) @ weight
        z = z * z
    with nullcontext() if stash is None else stash.part(is_half=False):
        x = checkpoint(lambda x, y, z: x + torch.sigmoid(y) * z, x, y, z[None, None], use_reentrant=False)
    return x.flatten(0, 2)


Layer = Callable[[torch.Tensor, torch.Tensor, HostStash | None], torch.Tensor]


def gradients(device: str, stash: HostStash | None, steps: int = 1, layer: Layer = halves) -> list[torch.Tensor]:
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
            x = layer(weight, x, stash)
        x.square().sum().backward()
        if stash is not None:
            stash.join()
    return [weight.grad for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("layer", [halves, sharing])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_without(device: str, layer: Layer) -> None:
    expected = gradients(device, None, steps=4, layer=layer)
    found = gradients(device, HostStash(torch.device(device)), steps=4, layer=layer)
    assert len(found) == len(expected) == NUM_LAYERS
    for one, other in zip(found, expected, strict=True):
        # What comes back has no gaps, so the library may add up in another order.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


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
            {
                entry.host.pieces[0].data_ptr()
                for part in stash._parts
                for entry in part.entries
                if entry.host is not None
            }
        )
    assert places[0] == places[1] == places[2]


@given(num_bytes=st.integers(1, 1 << 36))
def test_pieces_hold_what_they_should_and_little_more(num_bytes: int) -> None:
    pieces = host_stash._pieces(num_bytes)
    assert num_bytes <= sum(pieces) < num_bytes + max(4096, num_bytes / 16)
    assert len(pieces) <= 5 and sorted(pieces, reverse=True) == pieces
    assert all(piece & (piece - 1) == 0 and piece >= 4096 for piece in pieces)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_in_several_pieces_comes_back_whole(device: str) -> None:
    # 20, 16 and 12 KiB of numbers: two pieces, one that a smaller tensor leaves partly unused, and a row with gaps.
    tensors = [
        torch.arange(5 * 1024, dtype=torch.float32),
        torch.arange(8 * 1024, dtype=torch.bfloat16),
        torch.arange(2 * 3 * 1024, dtype=torch.float32).view(2, 3 * 1024)[1],
    ]
    stash = HostStash(torch.device(device))
    for tensor in [*tensors, *tensors]:
        stash.begin()
        x = torch.ones(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=True)
        with stash.part():
            y = x * tensor.to(device)
        # What no later half asks for never leaves.
        for _ in range(3):
            with stash.part():
                y = y * 1
        assert all(entry.source is None for entry in stash._parts[0].entries)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found.cpu(), tensor)


def test_the_hosts_memory_is_counted_and_given_back() -> None:
    stash = HostStash(CPU)
    assert stash.num_bytes == 0
    for num_rows in (64, 128):
        stash.begin()
        x = torch.ones(num_rows, 64, requires_grad=True)
        y = halves(torch.nn.Parameter(torch.eye(64)), x, stash)
        places = {id(entry.host): entry.host for part in stash._parts for entry in part.entries}
        there = sum(place.num_bytes for place in places.values() if place is not None)
        assert stash.num_bytes >= there > 64 * num_rows * 4
        held = stash.num_bytes
        y.sum().backward()
        # Places that came back are used again, not given back.
        assert stash.num_bytes == held
    stash.release()
    assert stash.num_bytes == 0


def count_sends(stash: HostStash, monkeypatch: pytest.MonkeyPatch) -> list[host_stash._Entry]:
    """A list of what is sent from now on."""
    sent: list[host_stash._Entry] = []
    send = stash._send

    def counted(*args: Any) -> host_stash._Entry:
        sent.append(send(*args))
        return sent[-1]

    monkeypatch.setattr(stash, "_send", counted)
    return sent


@pytest.mark.parametrize("device", DEVICES)
def test_what_parts_share_goes_once_and_comes_back_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stash = HostStash(torch.device(device))
    sent = count_sends(stash, monkeypatch)
    uses: list[host_stash._Use] = []
    save = stash._save

    def saved(*args: Any) -> host_stash._Use:
        uses.append(save(*args))
        return uses[-1]

    monkeypatch.setattr(stash, "_save", saved)
    stash.begin()
    x = torch.ones(3, 16, device=device, requires_grad=True)
    for _ in range(NUM_LAYERS):
        x = sharing(torch.nn.Parameter(torch.eye(16, device=device)), x, stash)
    x.sum().backward()
    stash.join()
    assert len(uses) == 8 * NUM_LAYERS and len(sent) == 5 * NUM_LAYERS
    # Each place on the host is free again, once, and nothing is left on the device.
    assert len({place.pieces[0].data_ptr() for place in stash._free}) == len(stash._free) == len(sent)
    assert all(entry.fetched is None and entry.source is None and entry.num_uses == 0 for entry in sent)
    assert not stash._known


class Keep(torch.autograd.Function):
    """x, and in backward a tensor of any kind that was saved goes to `found`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.found.extend(ctx.saved_tensors)
        return grads[0], None, None


def started() -> tuple[HostStash, torch.Tensor, list[torch.Tensor]]:
    stash = HostStash(CPU)
    stash.begin()
    return stash, torch.ones(1, requires_grad=True), []


@pytest.mark.parametrize("is_released", [False, True])
def test_tensors_of_other_values_in_the_same_storage_go_themselves(
    is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stash, x, found = started()
    sent = count_sends(stash, monkeypatch)
    square = torch.arange(16.0).view(4, 4)
    kept = [square, square.t(), square[:2], square[2:], square.view(torch.int32), square.t()]
    with stash.part():
        for one in kept:
            x = Keep.apply(x, one, found)
        x = Keep.apply(x, square.view(1, 2, 8), found)
    # A tensor whose values do not lie in order is known by nothing.
    assert len(sent) == len(kept)
    for _ in range(2 if is_released else 0):
        with stash.part():
            pass
    x.backward()
    for one, other in zip(reversed(found), [*kept, square.view(1, 2, 8)], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_change_between_two_saves_sends_two(monkeypatch: pytest.MonkeyPatch) -> None:
    stash, x, found = started()
    sent = count_sends(stash, monkeypatch)
    kept = torch.zeros(16)
    with stash.part():
        x = Keep.apply(x, kept, found)
    with stash.part():
        x = Keep.apply(x, kept.add_(1), found)
    assert len(sent) == 2
    for _ in range(2):
        with stash.part():
            pass
    x.backward()
    assert [one[0].item() for one in found] == [1, 0]


def test_what_was_sent_away_is_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    stash, x, found = started()
    sent = count_sends(stash, monkeypatch)
    num_sent, kept = [], torch.full((16,), -1.0)
    for value in range(2 * NUM_LAYERS):
        with stash.part():
            # Memory of one that has gone is given to the next.
            x = Keep.apply(Keep.apply(x, kept, found), torch.full((16,), float(value)), found)
        num_sent.append(len(sent))
    # Every third half is the first to begin after `kept` has gone.
    assert num_sent == [2, 3, 5, 6, 8, 9, 11, 12, 14, 15]
    x.backward()
    assert [one[0].item() for one in reversed(found)] == [
        value for pair in zip([-1] * 2 * NUM_LAYERS, range(2 * NUM_LAYERS), strict=True) for value in pair
    ]


def test_each_use_is_handed_out_once_and_the_last_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stash, x, found = started()
    sent = count_sends(stash, monkeypatch)
    kept = torch.arange(16.0)
    with stash.part():
        one = Keep.apply(x, kept, found)
    with stash.part():
        other = Keep.apply(x, kept.view(4, 4), found)
    for _ in range(2):
        with stash.part():
            pass
    other.backward(retain_graph=True)
    (entry,) = sent
    assert entry.host is None and entry.fetched is not None and len(stash._free) == 1
    with pytest.raises(RuntimeError, match="handed out once"):
        other.backward()
    one.backward()
    assert entry.fetched is None and len(stash._free) == 1
    assert torch.equal(found[0], kept.view(4, 4)) and torch.equal(found[1], kept)


def test_a_use_that_nobody_takes_lasts_until_the_next_pass() -> None:
    stash, x, found = started()
    kept = torch.arange(16.0)
    for _ in range(3):
        stash.begin()
        with stash.part():
            one, _other = Keep.apply(x, kept, found), Keep.apply(x, kept, found)
        one.backward()
        assert torch.equal(found.pop(), kept)
        assert len(stash._free) == 1 and not stash._known


def test_the_next_pass_knows_nothing_of_one_without_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    stash, x, found = started()
    sent = count_sends(stash, monkeypatch)
    kept = torch.arange(16.0)
    for num_sent in (1, 2):
        stash.begin()
        with stash.part():
            y = Keep.apply(x, kept, found)
        assert len(sent) == num_sent
    y.backward()
    assert torch.equal(found[0], kept)


def test_a_pass_that_fails_is_freed() -> None:
    """A saved tensor's graph holds hooks, which hold the stash: it must not hold the graph."""
    stash, weight = HostStash(CPU), torch.nn.Parameter(torch.eye(16))
    stash.begin()
    with suppress(MemoryError):
        x = halves(weight, torch.ones(3, 16, requires_grad=True), stash)
        with stash.part():
            x = torch.tanh(x @ weight)
            raise MemoryError
    left = weakref.ref(stash), weakref.ref(weight)
    del stash, weight, x
    gc.collect()
    assert [one() for one in left] == [None, None]
