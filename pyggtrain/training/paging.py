"""Gradients and moments that wait in host memory, so that a GPU holds only weights, masters and activations.

Pairs of all experts of a mixture are hundreds of millions of numbers: 4 bytes a master, 4 a gradient and 8 (or 2) of
moments each. Only masters are read by every kernel of a step; a gradient is written once and read once, moments are
touched once. So

- a gradient goes to the host as soon as backward has finished it, beside the products of the layers that follow, and
  its norm is taken on the way;
- at the update, a window of parameters at a time gets gradients and moments back, takes the optimiser's own step and
  sends the moments home, while the next window is on its way;
- moments stay on the device as far as the first step has shown that there is room;
- an update may run beside the next step: what reads a parameter waits for its window alone.

Masters of a window lie side by side (a parameter is a view of its part), and so do gradients and moments: a window is a
few copies and one call of the optimiser, however many parameters it has. Parts begin at multiples of 256 numbers, the
blocks that 8-bit moments have a scale for, so every number is that of the same optimiser without paging.

The price is copies: 4 bytes a number up for the gradient, and both ways 8 for 32-bit moments or 2 for 8-bit ones that
do not stay, at what the bus carries (55 GB/s each way on an H200's host).

bitsandbytes has paged optimisers too; theirs move moments alone, through managed memory that torch's allocator neither
counts nor caps.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from pyggtrain.nn import Lane

# Gradients that may be on the way to the host before backward waits for the oldest.
_MAX_BEHIND_BYTES = 64 << 20
# Gradients of a window. Its moments are up to twice that, and three windows are there at a time.
_WINDOW_BYTES = 32 << 20
# Numbers that 8-bit moments have one scale for. Parameters of fewer than 16 such blocks keep 32-bit moments
# (bitsandbytes' own rule).
_BLOCK = 256
_SMALL = 4096
# Pinned memory is asked for in pieces that torch's allocator does not round up.
_SLAB_BYTES = 256 << 20
_ALIGNMENT = 256
# Of the room on a device what moments leave alone, besides what activations took: a graph's pool is fuller of holes.
_SPARE_BYTES, _SPARE_SHARE = 512 << 20, 0.15


def window_bytes(state_bytes: int) -> int:
    """What an update takes on the device.

    Args:
        state_bytes: of an optimiser, for each number.
    """
    return 3 * _WINDOW_BYTES * (4 + state_bytes) // 4


def room_for_state(device: torch.device) -> int:
    """Bytes that moments may take on a device for good, as a first step's peak shows."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    allocated = torch.cuda.memory_allocated(device)
    passing = torch.cuda.max_memory_allocated(device) - allocated
    limit = min(allowed, free + torch.cuda.memory_reserved(device))
    return max(0, int(limit - allocated - (1 + _SPARE_SHARE) * passing - _SPARE_BYTES))


@dataclass(eq=False)
class _Member:
    """A parameter's place in its window: `start`, counted in numbers."""

    index: int
    parameter: torch.Tensor
    start: int

    @property
    def num_numbers(self) -> int:
        return self.parameter.numel()

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.start + -(-self.num_numbers // _BLOCK) * _BLOCK


@dataclass(eq=False)
class _Run:
    """Members side by side that are trained, as the optimiser sees them: one parameter.

    Attributes:
        members: at least one.
        parameter: their masters.
        state: what the optimiser keeps, its large tensors on the host or, if there was room, on the device.
        is_resident: whether large tensors stay on the device.
    """

    members: list[_Member]
    parameter: torch.Tensor
    state: dict[str, Any] = field(default_factory=dict)
    is_resident: bool = False

    @property
    def start(self) -> int:
        return self.members[0].start

    @property
    def end(self) -> int:
        return self.members[-1].end

    def part_of(self, member: _Member, name: str, value: Any) -> Any:
        """What a member has of a value of the state: its numbers, its blocks' scales, or all of it."""
        numbers_each = _numbers_each(name, value, self.end - self.start)
        if numbers_each is None:
            return value
        first = (member.start - self.start) // numbers_each
        part = value[first : first - (-member.num_numbers // numbers_each)]
        return part.view(member.parameter.shape) if numbers_each == 1 else part


@dataclass(eq=False)
class _Window:
    """Parameters of one group whose update is one step: their masters on the device, their gradients on the host.

    Attributes:
        updated: after the last update.
    """

    group: dict[str, Any]
    members: list[_Member]
    masters: torch.Tensor
    gradients: torch.Tensor
    updated: "torch.cuda.Event | None"
    runs: list[_Run] = field(default_factory=list)


class Pages:
    """Where gradients and moments of parameters are while nobody computes with them.

    Registers a hook with each parameter, which takes its gradient away: `parameter.grad` is always None. A parameter
    that has no gradient at the first update is never changed; one that has none later has a gradient of zero.

    Args:
        parameters: trained tensors, all on one device. On a CPU nothing is gained, but it works. Their memory moves.
        optimizer: over the same parameters, before its first step; afterwards only `update` may step it.

    Attributes:
        norms: float32 [number of parameters], L2 norm of each gradient; 0 without one.
        written: indices of parameters that have a gradient.
        room: device -> bytes that moments may take there for good; asked at the first update.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = list(parameters), optimizer
        device = self._parameters[0].device
        self._memory = _HostMemory(is_pinned=device.type == "cuda")
        self._up, self._down = Lane(device), Lane(device)
        # For updates beside the next step, and what such a one reads.
        self._beside = Lane(device)
        self._read_beside: list[Any] = []
        self._is_beside = False
        self._behind: deque[_Behind] = deque()
        self.norms = torch.zeros(len(self._parameters), device=device)
        self.written: set[int] = set()
        self.room: Callable[[torch.device], int] = room_for_state
        self._loaded: dict[int, Mapping[str, Any]] = {}
        self._has_runs = False
        # In the order in which a step reads them: parameters come first to last.
        self._windows = sorted(self._make_windows(), key=lambda window: window.members[0].index)
        self._places = {member.parameter: (window, member) for window in self._windows for member in window.members}
        take = _taking_for(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
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

    def update(self, *, factor: float | torch.Tensor = 1.0, beside: bool = False) -> None:
        """Take the optimiser's step, gradients multiplied by `factor` before.

        Args:
            factor: scalar; a tensor lies on the device.
            beside: let what is launched next not wait. Then whoever reads a parameter calls `wait_for` or `settle`.
        """
        self.settle()
        if not beside:
            self._update(factor)
            return
        self._is_beside = True
        self._beside.follow()
        # Not to be freed, on the stream that made it, before the update has read it.
        self._read_beside = [factor, *(getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf"))]
        with self._beside.use():
            self._update(factor)

    def wait_for(self, number: int) -> None:
        """Let what is computed from now on come after the last update of the windows up to `number`. In a CUDA graph it
        stands for the last update before each time that the graph runs.
        """
        if self._is_beside or self._beside.is_capturing:
            self._beside.wait(self._windows[number].updated)

    def settle(self) -> None:
        """Let what is computed from now on come after all of the last update."""
        if self._is_beside:
            self._beside.catch_up()
            self._is_beside = False

    def number_of(self, parameter: torch.Tensor) -> int:
        """Of a parameter's window, in the order in which they are updated."""
        return self._windows.index(self._places[parameter][0])

    def _update(self, factor: float | torch.Tensor) -> None:
        if not self._has_runs:
            self._make_runs()
        groups = self._optimizer.param_groups
        windows = [window for window in self._windows if window.runs]
        coming: deque[_Fetched] = deque()
        # Moments come from where the last update has sent them, gradients from where backward has.
        self._up.follow(self._down)
        try:
            for number, window in enumerate(windows):
                if not coming:
                    coming.append(self._fetch(window))
                if number + 1 < len(windows):
                    coming.append(self._fetch(windows[number + 1]))
                self._optimizer.param_groups = [window.group]
                self._step(window, coming.popleft(), factor)
                if window.updated is not None:
                    window.updated.record()
        finally:
            self._optimizer.param_groups = groups
        self.join()

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What the optimiser keeps for a parameter, as it would without paging, in ordinary host memory."""
        self.settle()
        self._down.finish()
        window, member = self._places[parameter]
        for run in window.runs:
            if member in run.members:
                state = {name: run.part_of(member, name, value) for name, value in run.state.items()}
                return {
                    name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                    for name, value in state.items()
                }
        return dict(self._loaded.get(member.index, {}))

    def states(self) -> Iterator[dict[str, Any]]:
        """What the optimiser keeps, of all runs of parameters."""
        return (run.state for window in self._windows for run in window.runs if run.state)

    def set_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Take over what `state_of` returned in another run, before the first update."""
        assert not self._has_runs, "a state is taken over before the first update"
        if state:
            self._loaded[self._places[parameter][1].index] = state

    def _make_windows(self) -> Iterator[_Window]:
        """Lay the parameters of each group side by side, those with 32-bit moments by themselves."""
        index_of = {parameter: index for index, parameter in enumerate(self._parameters)}
        groups = []
        for group in self._optimizer.param_groups:
            params, group["params"] = group["params"], []
            small = [parameter for parameter in params if parameter.numel() < _SMALL]
            large = [parameter for parameter in params if parameter.numel() >= _SMALL]
            for some, its_group in ((large, group), (small, {**group, "params": [], "optim_bits": 32})):
                if some or its_group is group:
                    groups.append(its_group)
                for members in _packed(some, index_of):
                    yield self._make_window(its_group, members)
        self._optimizer.param_groups = groups

    @torch.no_grad()
    def _make_window(self, group: dict[str, Any], members: list[_Member]) -> _Window:
        masters = _side_by_side(members)
        if masters is None:
            masters = members[0].parameter.new_zeros(members[-1].end)
            for member in members:
                place = masters[member.start : member.start + member.num_numbers].view(member.parameter.shape)
                place.copy_(member.parameter)
                member.parameter.data = place
        # Zero between members, for good: a block's scale is that of its largest number.
        gradients = self._memory.like(masters).zero_()
        return _Window(group, members, masters, gradients, self._beside.lasting_mark())

    def _make_runs(self) -> None:
        """Find out which members are trained: those that have a gradient at the first update, or a state already."""
        self._has_runs = True
        for window in self._windows:
            trained = groupby(window.members, lambda one: one.index in self.written or one.index in self._loaded)
            for is_trained, members in trained:
                if is_trained:
                    some = list(members)
                    masters = window.masters[some[0].start : some[-1].end]
                    window.runs.append(_Run(some, torch.nn.Parameter(masters), self._joined(some)))
        self._loaded.clear()
        self._room = self.room(self._parameters[0].device)

    def _joined(self, members: Sequence[_Member]) -> dict[str, Any]:
        """The state of a run from what its members had."""
        start, num_numbers = members[0].start, members[-1].end - members[0].start
        joined: dict[str, Any] = {}
        for member in members:
            for name, value in self._loaded.get(member.index, {}).items():
                numbers_each = _numbers_each(name, value, member.num_numbers)
                if numbers_each is None:
                    joined[name] = value.to(member.parameter.device) if isinstance(value, torch.Tensor) else value
                    continue
                if name not in joined:
                    whole = value.new_empty(num_numbers // numbers_each)
                    # What is too small to be paged stays with the parameter.
                    joined[name] = self._memory.like(whole) if _is_paged(whole) else whole.to(member.parameter.device)
                    joined[name].zero_()
                first = (member.start - start) // numbers_each
                joined[name][first : first + value.numel()].copy_(value.flatten())
        return joined

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """Copy a finished gradient to the host, or add it to the one that is there."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        window, member = self._places[parameter]
        index = member.index
        place = window.gradients[member.start : member.start + member.num_numbers].view(gradient.shape)
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

    def _fetch(self, window: _Window) -> "_Fetched":
        """Begin to bring gradients and moments of a window to the device."""
        device = window.masters.device
        gradients = torch.empty_like(window.masters)
        states = []
        for run in window.runs:
            away = {} if run.is_resident else {name: value for name, value in run.state.items() if _is_paged(value)}
            states.append({name: torch.empty_like(value, device=device) for name, value in away.items()})
        self._up.follow()
        with self._up.use():
            gradients.copy_(window.gradients, non_blocking=True)
            for run, there in zip(window.runs, states, strict=True):
                for name, value in there.items():
                    value.copy_(run.state[name], non_blocking=True)
        return _Fetched(gradients, states, self._up.mark())

    @torch.no_grad()
    def _step(self, window: _Window, fetched: "_Fetched", factor: float | torch.Tensor) -> None:
        """The optimiser's step of a window whose gradients and moments are on their way, and the moments home."""
        self._up.wait(fetched.arrived)
        gradients = fetched.gradients
        for member in window.members:
            if member.index not in self.written:
                gradients[member.start : member.end].zero_()
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            gradients.mul_(factor)
        for run, there in zip(window.runs, fetched.states, strict=True):
            run.parameter.grad = gradients[run.start : run.end]
            if run.state:
                self._optimizer.state[run.parameter] = run.state | there
        window.group["params"] = [run.parameter for run in window.runs]
        self._optimizer.step()
        window.group["params"] = []
        left = [gradients]
        self._down.follow()
        for run in window.runs:
            run.parameter.grad = None
            state = self._optimizer.state.pop(run.parameter)
            if not run.is_resident and not any(_is_paged(value) for value in run.state.values()):
                # Its first step, or one without moments.
                num_bytes = sum(value.nbytes for value in state.values() if _is_paged(value))
                run.is_resident = num_bytes <= self._room
                self._room -= num_bytes if run.is_resident else 0
            left += self._keep(run, state)
        self._leave_behind(left)

    def _keep(self, run: _Run, state: Mapping[str, Any]) -> list[torch.Tensor]:
        """Send the moments of a run home, unless they stay; returns what is on the way."""
        left = []
        with self._down.use():
            for name, value in state.items():
                if run.is_resident or not _is_paged(value):
                    run.state[name] = value
                    continue
                if name not in run.state:
                    run.state[name] = self._memory.like(value)
                run.state[name].copy_(value, non_blocking=True)
                left.append(value)
        return left


def _taking_for(pages: Pages) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep its pages alive: parameters hold hooks where the garbage collector does not look, and
    pages hold parameters.
    """
    reference = weakref.ref(pages)

    def take(parameter: torch.Tensor) -> None:
        there = reference()
        if there is not None:
            there._take(parameter)

    return take


def _packed(parameters: Sequence[torch.Tensor], index_of: Mapping[torch.Tensor, int]) -> Iterator[list[_Member]]:
    """Windows of about `_WINDOW_BYTES`."""
    members: list[_Member] = []
    for parameter in parameters:
        member = _Member(index_of[parameter], parameter, members[-1].end if members else 0)
        if members and member.end * parameter.itemsize > _WINDOW_BYTES:
            yield members
            members, member = [], _Member(member.index, parameter, 0)
        members.append(member)
    if members:
        yield members


def _side_by_side(members: Sequence[_Member]) -> torch.Tensor | None:
    """The masters of a window whose parameters lie as it wants them already."""
    first = members[0].parameter.detach()
    size = first.untyped_storage().nbytes() // first.itemsize - first.storage_offset()
    for member in members:
        other = member.parameter
        is_there = other.untyped_storage()._cdata == first.untyped_storage()._cdata and other.is_contiguous()
        if not is_there or other.storage_offset() != first.storage_offset() + member.start:
            return None
    return first.as_strided((members[-1].end,), (1,)) if members[-1].end <= size else None


def _numbers_each(name: str, value: Any, num_numbers: int) -> int | None:
    """For how many numbers of the parameter an element of a state's tensor stands; None: the tensor is not cut."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or name.startswith("qmap"):
        return None
    if value.numel() == num_numbers:
        return 1
    return _BLOCK if value.numel() == -(-num_numbers // _BLOCK) else None


class _Behind:
    """Tensors that are still being copied to the host."""

    def __init__(self, tensors: list[torch.Tensor], sent: "torch.cuda.Event | None") -> None:
        self.tensors, self.sent = tensors, sent
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)


@dataclass(eq=False)
class _Fetched:
    """What a window's update needs, on its way to the device."""

    gradients: torch.Tensor
    states: list[dict[str, torch.Tensor]]
    arrived: "torch.cuda.Event | None"


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
    # Not a step's number, nor a table of codes.
    return isinstance(value, torch.Tensor) and value.numel() > _BLOCK
