"""Gradients and moments that wait in host memory, so that a GPU holds only weights, masters and activations.

Pairs of all experts of a mixture are hundreds of millions of numbers: 4 bytes a master, 4 a gradient and 8 (or 2) of
moments each. Only masters are read by every kernel of a step; a gradient is written once and read once, moments are
touched once. So

- a gradient goes to the host as soon as backward has finished it, beside the products of the layers that follow, and
  its norm is taken on the way;
- at the update, a window of parameters at a time gets gradients and moments back, takes the optimiser's own step and
  sends the moments home, while the next window is on its way.

The numbers are those of the same optimiser without paging, bit for bit. The price is copies: 12 bytes a number up and 8
down for 32-bit moments, 6 and 2 for 8-bit ones, at what the bus carries (55 GB/s each way on an H200's host).

bitsandbytes has paged optimisers too; theirs move moments alone, through managed memory that torch's allocator neither
counts nor caps.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Gradients that may be on the way to the host before backward waits for the oldest.
_MAX_BEHIND_BYTES = 64 << 20
# Gradients of a window. Its moments are up to twice that, and three windows are there at a time.
_WINDOW_BYTES = 32 << 20
# Smaller tensors of an optimiser's state (a step's number, a table of codes) stay on the device.
_MIN_STATE_BYTES = 4096
# Pinned memory is asked for in pieces that torch's allocator does not round up.
_SLAB_BYTES = 256 << 20
_ALIGNMENT = 256


def window_bytes(state_bytes: int) -> int:
    """What an update takes on the device.

    Args:
        state_bytes: of an optimiser, for each number.
    """
    return 3 * _WINDOW_BYTES * (4 + state_bytes) // 4


class Pages:
    """Where gradients and moments of parameters are while nobody computes with them.

    Registers a hook with each parameter, which takes its gradient away: `parameter.grad` is None but during `update`.

    Args:
        parameters: trained tensors, all on one device. On a CPU nothing is gained, but it works.
        optimizer: over the same parameters; its state is held here.

    Attributes:
        norms: float32 [number of parameters], L2 norm of each gradient; 0 without one.
        written: indices of parameters that have a gradient.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = list(parameters), optimizer
        device = self._parameters[0].device
        self._memory = _HostMemory(is_pinned=device.type == "cuda")
        self._up, self._down = _Lane(device), _Lane(device)
        self._gradients = [self._memory.like(parameter) for parameter in self._parameters]
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._kept: list[dict[str, Any]] = [{} for _ in self._parameters]
        self._behind: deque[_Behind] = deque()
        self.norms = torch.zeros(len(self._parameters), device=device)
        self.written: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]

    def close(self) -> None:
        """Take gradients no more."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget all gradients."""
        self.written.clear()
        self.norms.zero_()

    def join(self) -> None:
        """Let what is computed from now on see all gradients' norms, and the host's copies be whole for what comes
        after it on the device. Ends a backward pass.
        """
        while self._behind:
            self._release()
        self._down.catch_up()

    def update(self, *, factor: float | torch.Tensor = 1.0) -> None:
        """Take the optimiser's step for every parameter that has a gradient, gradients multiplied by `factor` before.

        Args:
            factor: scalar; a tensor lies on the device.
        """
        groups = self._optimizer.param_groups
        members = [group["params"] for group in groups]
        windows = [
            (group, window) for group, params in zip(groups, members, strict=True) for window in self._windows(params)
        ]
        fetched: deque[list[_Fetched]] = deque()
        # Moments come from where the last update has sent them, gradients from where backward has.
        self._up.follow(self._down)
        try:
            for number, (group, window) in enumerate(windows):
                if not fetched:
                    fetched.append(self._fetch(window))
                if number + 1 < len(windows):
                    fetched.append(self._fetch(windows[number + 1][1]))
                self._optimizer.param_groups, group["params"] = [group], window
                self._step(window, fetched.popleft(), factor)
        finally:
            self._optimizer.param_groups = groups
            for group, params in zip(groups, members, strict=True):
                group["params"] = params
        self.join()

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What the optimiser keeps for a parameter, its large tensors copied, in ordinary host memory."""
        self._down.finish()
        kept = self._kept[self._index[parameter]]
        return {name: value.clone() if _is_paged(value) else value for name, value in kept.items()}

    def set_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Take over what `state_of` returned in another run."""
        kept = self._kept[self._index[parameter]]
        kept.clear()
        for name, value in state.items():
            if _is_paged(value):
                kept[name] = self._memory.like(value)
                kept[name].copy_(value)
            else:
                kept[name] = value.to(parameter.device) if isinstance(value, torch.Tensor) else value

    def _hook(self, index: int) -> Any:
        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self._send(index, gradient)

        return take

    @torch.no_grad()
    def _send(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a finished gradient to the host, or add it to the one that is there."""
        place = self._gradients[index]
        # Allocated on the stream that computes, and freed there after that stream has waited for the copy.
        earlier = torch.empty_like(gradient) if index in self.written else None
        self._down.follow()
        with self._down.use():
            total = gradient
            if earlier is not None:
                earlier.copy_(place, non_blocking=True)
                total = earlier.add_(gradient)
            torch.linalg.vector_norm(total, out=self.norms[index])
            place.copy_(total, non_blocking=True)
        self.written.add(index)
        self._leave_behind([gradient, total])

    def _leave_behind(self, tensors: list[torch.Tensor]) -> None:
        """Hold tensors on the device until they have left it."""
        self._behind.append(_Behind(tensors, self._down.mark()))
        while len(self._behind) > 1 and sum(one.num_bytes for one in self._behind) > _MAX_BEHIND_BYTES:
            self._release()

    def _release(self) -> None:
        oldest = self._behind.popleft()
        self._down.wait(oldest.sent)

    def _windows(self, parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Parameters that have a gradient, in groups of about the size of a window."""
        window: list[torch.Tensor] = []
        num_bytes = 0
        for parameter in parameters:
            if self._index[parameter] not in self.written:
                continue
            if window and num_bytes + parameter.nbytes > _WINDOW_BYTES:
                yield window
                window, num_bytes = [], 0
            window.append(parameter)
            num_bytes += parameter.nbytes
        if window:
            yield window

    def _fetch(self, window: Sequence[torch.Tensor]) -> "list[_Fetched]":
        """Begin to bring gradients and moments of a window to the device."""
        found = []
        for parameter in window:
            index = self._index[parameter]
            home = {"": self._gradients[index]}
            home |= {name: value for name, value in self._kept[index].items() if _is_paged(value)}
            there = {name: torch.empty_like(value, device=parameter.device) for name, value in home.items()}
            found.append((home, there))
        self._up.follow()
        with self._up.use():
            for home, there in found:
                for name, value in home.items():
                    there[name].copy_(value, non_blocking=True)
        arrived = self._up.mark()
        return [_Fetched(there.pop(""), there, arrived) for _, there in found]

    def _step(
        self, window: Sequence[torch.Tensor], fetched: "Sequence[_Fetched]", factor: float | torch.Tensor
    ) -> None:
        """The optimiser's step of a window whose gradients and moments are on their way, and the moments home."""
        self._up.wait(fetched[-1].arrived)
        is_scaled = isinstance(factor, torch.Tensor) or factor != 1.0
        for parameter, one in zip(window, fetched, strict=True):
            parameter.grad = one.gradient.mul_(factor) if is_scaled else one.gradient
            kept = self._kept[self._index[parameter]]
            if kept:
                self._optimizer.state[parameter] = kept | one.moments
        self._optimizer.step()
        self._down.follow()
        left = []
        with self._down.use():
            for parameter in window:
                parameter.grad = None
                kept = self._kept[self._index[parameter]]
                for name, value in self._optimizer.state.pop(parameter).items():
                    if not _is_paged(value):
                        kept[name] = value
                        continue
                    if name not in kept:
                        kept[name] = self._memory.like(value)
                    kept[name].copy_(value, non_blocking=True)
                    left.append(value)
        left += [one.gradient for one in fetched]
        self._leave_behind(left)


class _Behind:
    """Tensors that are still being copied to the host."""

    def __init__(self, tensors: list[torch.Tensor], sent: "torch.cuda.Event | None") -> None:
        self.tensors, self.sent = tensors, sent
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)


class _Fetched:
    """What a parameter's update needs, on its way to the device."""

    def __init__(
        self, gradient: torch.Tensor, moments: dict[str, torch.Tensor], arrived: "torch.cuda.Event | None"
    ) -> None:
        self.gradient, self.moments, self.arrived = gradient, moments, arrived


class _Lane:
    """A stream for copies in one direction, beside the stream that computes. On a CPU all is done in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        """Copies inside go this way."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self, other: "_Lane | None" = None) -> None:
        """Wait for what has been launched so far: on the stream that computes, or on another lane."""
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device) if other is None else other._stream
            assert stream is not None
            self._stream.wait_stream(stream)

    def mark(self) -> "torch.cuda.Event | None":
        """An event after what was launched here so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: "torch.cuda.Event | None") -> None:
        """Let the stream that computes wait for a mark."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def catch_up(self) -> None:
        """Let the stream that computes wait for all of it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Let the host wait for all of it."""
        if self._stream is not None:
            self._stream.synchronize()


class _HostMemory:
    """Host memory in slabs, since torch rounds each pinned piece up to a power of two."""

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A place for a tensor's numbers."""
        if self._used + tensor.nbytes > self._slab.numel():
            size = max(_SLAB_BYTES, tensor.nbytes)
            self._slab = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._used = 0
        place = self._slab[self._used : self._used + tensor.nbytes]
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return place.view(tensor.dtype).view(tensor.shape)


def _is_paged(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.nbytes >= _MIN_STATE_BYTES
