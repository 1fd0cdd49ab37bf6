"""Saved activations that wait in pinned host memory until backward wants them.

A model's saved tensors are stashed in parts, first to last: halves of layers, and what stands between them. Copies run
on a lane of their own beside the products: to the host while the next halves run forward, back while the half above
runs backward. So a step is slower only where a half takes less time than its copies: 5.5 ms each way for 288 MiB at
55 GB/s (8,192 tokens of an 8B model on an H200), where a layer's products take 6 and 12. What several parts save, a
residual or a normed input, goes once and comes back once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pyggtrain.nn.lane import Lane

# Smaller tensors (rank-sized products, sums of attention) stay: a copy costs more than the memory is worth.
_MIN_BYTES = 4 << 20
# What the host's memory comes in.
_PAGE_BYTES = 4096
# Halves that may be on the way to the host at once, before compute waits for the oldest.
_MAX_BEHIND = 2


def goes_to_host(num_bytes: int) -> bool:
    """Whether a saved tensor of so many bytes is sent."""
    return num_bytes >= _MIN_BYTES


def pinned_bytes(num_bytes: int) -> int:
    """What a saved tensor takes of the host."""
    return sum(_pieces(num_bytes))


def _pieces(num_bytes: int) -> list[int]:
    """Sizes of the pieces that hold so many bytes: powers of two, as torch's allocator rounds pinned memory up to one.
    At most five, whole pages, and less than a sixteenth or a page too much.
    """
    pieces, missing = [], -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
    while missing > 0 and missing * 16 >= num_bytes:
        pieces.append(1 << missing.bit_length() - 1)
        missing -= pieces[-1]
    return [*pieces, 1 << (missing - 1).bit_length()] if missing > 0 else pieces


# Storage, offset, number of elements, dtype and version: equal for two tensors of the same values.
_Memory = tuple[int, int, int, torch.dtype, int]


@dataclass(eq=False, frozen=True)
class _Place:
    """Host memory for a tensor, in pieces (see `_pieces`); `num_bytes` is all of them."""

    pieces: list[torch.Tensor]
    num_bytes: int

    @classmethod
    def of(cls, num_bytes: int, *, is_pinned: bool) -> "_Place":
        sizes = _pieces(num_bytes)
        return cls([torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in sizes], sum(sizes))

    def beside(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of the place and those of a tensor of one dimension that belong there."""
        start = 0
        for piece in self.pieces:
            part = flat[start : start + piece.numel() // flat.itemsize]
            if part.numel() == 0:
                return
            yield piece[: part.numel() * part.itemsize].view(flat.dtype), part
            start += part.numel()


@dataclass(eq=False)
class _Entry:
    """What was saved, once or several times: on its way to the host, there, on its way back, or taken by all (then
    nothing is left of it).

    Attributes:
        num_elements, dtype: its values lie on the host flat, piece after piece; each use has its own shape.
        memory: by which it is known while it holds its source; None: it is not shared.
        host: its place there, until it has begun to come back.
        source: the GPU's copy until it may go. Without its graph, whose hooks hold the stash: autograd's references
            are not the garbage collector's to see, and a pass that fails would never be freed.
        num_uses: that have not been taken.
    """

    num_elements: int
    dtype: torch.dtype
    memory: _Memory | None
    host: "_Place | None"
    source: torch.Tensor | None
    sent: "torch.cuda.Event | None"
    num_uses: int = 0
    fetched: torch.Tensor | None = None
    arrived: "torch.cuda.Event | None" = None


@dataclass(eq=False)
class _Use:
    """One saved tensor, which autograd holds in its stead; without entry once taken."""

    entry: _Entry | None
    shape: torch.Size


@dataclass(eq=False)
class _Part:
    """What one half saved, or what stands between two; `entries` may be an earlier part's too, or one twice."""

    is_half: bool
    entries: list[_Entry] = field(default_factory=list)


class HostStash:
    """Where saved tensors wait. One for a model; it keeps its host memory from step to step.

    Args:
        device: the GPU. On a CPU nothing is gained, but it works.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = Lane(device)
        self._free: list[_Place] = []
        # Places that a captured CUDA graph copies to and from: never to be freed.
        self._captured: list[_Place] = []
        self._parts: list[_Part] = []
        # Entries that hold their source, so that no other tensor can have its memory.
        self._known: dict[_Memory, _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the host that it holds."""
        waiting = {entry for part in self._parts for entry in part.entries}
        places = [*self._free, *(entry.host for entry in waiting if entry.host is not None)]
        return sum(place.num_bytes for place in places)

    def begin(self) -> None:
        """Start a forward pass; forget one that never had its backward."""
        for entry in (entry for part in self._parts for entry in part.entries):
            self._give_back(entry)
        self._parts = []
        self._known = {}

    def release(self) -> None:
        """Give the host's memory back, but what captured CUDA graphs use. Between two passes."""
        self.begin()
        self._free = []

    @contextmanager
    def part(self, *, is_half: bool = True) -> Iterator[None]:
        """Whatever autograd saves inside goes to the host, if it is large.

        Args:
            is_half: it takes long enough for copies to run beside it. What stands between two halves does not: neither
                direction waits for its sake.
        """
        if is_half:
            halves = [index for index, part in enumerate(self._parts) if part.is_half]
            for part in self._parts[: halves[-_MAX_BEHIND] + 1] if len(halves) >= _MAX_BEHIND else ():
                self._release(part)
        index = len(self._parts)
        self._parts.append(_Part(is_half))

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Use:
            is_large = goes_to_host(tensor.numel() * tensor.itemsize)
            return self._save(tensor, index) if is_large and tensor.device.type == self.device.type else tensor

        def unpack(packed: torch.Tensor | _Use) -> torch.Tensor:
            return self._take(packed, index) if isinstance(packed, _Use) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def join(self) -> None:
        """Let what is launched from now on wait for all copies, those too that no backward has asked for: a layer that
        nothing trained stands before needs none.
        """
        self._copies.catch_up()

    def _save(self, tensor: torch.Tensor, index: int) -> _Use:
        memory = _memory(tensor)
        entry = self._known.get(memory) if memory is not None else None
        if entry is None:
            entry = self._send(tensor, memory)
        entry.num_uses += 1
        self._parts[index].entries.append(entry)
        return _Use(entry, tensor.shape)

    def _send(self, tensor: torch.Tensor, memory: _Memory | None) -> _Entry:
        host = self._place(tensor.numel() * tensor.itemsize)
        self._copies.follow()
        with self._copies.use():
            for place, values in host.beside(tensor.detach().reshape(-1)):
                place.copy_(values, non_blocking=True)
        entry = _Entry(tensor.numel(), tensor.dtype, memory, host, tensor.detach(), self._copies.mark())
        if memory is not None:
            self._known[memory] = entry
        return entry

    def _release(self, part: _Part) -> None:
        """Let the GPU's copies of a part go: what is computed from now on comes after they have left. Those too that a
        later part has saved again.
        """
        for entry in part.entries:
            self._let_go(entry)

    def _let_go(self, entry: _Entry) -> torch.Tensor | None:
        """The GPU's copy of an entry that still holds it, which then is known by it no more."""
        source, entry.source = entry.source, None
        if source is not None:
            self._copies.wait(entry.sent)
            if entry.memory is not None:
                del self._known[entry.memory]
        return source

    def _fetch(self, part: _Part) -> None:
        """Begin to copy back what is still on the host of a part, wherever it was first saved."""
        for entry in part.entries:
            if entry.host is None:
                continue
            # What never had to leave the GPU stays: backward came before its memory was wanted. Waiting costs nothing
            # by now, and a CUDA graph wants every copy to have an end.
            entry.fetched = self._let_go(entry)
            if entry.fetched is None:
                # Allocated on the stream that computes, and freed there after that stream has waited for the copy.
                entry.fetched = torch.empty(entry.num_elements, dtype=entry.dtype, device=self.device)
                self._copies.follow()
                with self._copies.use():
                    for place, values in entry.host.beside(entry.fetched):
                        values.copy_(place, non_blocking=True)
                entry.arrived = self._copies.mark()
            self._give_back(entry)

    def _take(self, use: _Use, index: int) -> torch.Tensor:
        # With the half before it and all between: what stands there is over too soon for copies of its own.
        first = next((before for before in reversed(range(index)) if self._parts[before].is_half), 0)
        for part in reversed(self._parts[first : index + 1]):
            self._fetch(part)
        entry, use.entry = use.entry, None
        if entry is None or entry.fetched is None:
            raise RuntimeError("activations on the host are handed out once: backward cannot run a second time")
        self._copies.wait(entry.arrived)
        tensor = entry.fetched.view(use.shape)
        entry.num_uses -= 1
        if entry.num_uses == 0:
            entry.fetched = None
        return tensor

    def _place(self, num_bytes: int) -> _Place:
        """Pinned memory of at least `num_bytes`. Micro-batches differ in length, so places are not of one size."""
        place = self._fitting_place(num_bytes)
        if self._copies.is_capturing:
            self._captured.append(place)
        return place

    def _fitting_place(self, num_bytes: int) -> _Place:
        self._free.sort(key=lambda place: place.num_bytes)
        for index, place in enumerate(self._free):
            if place.num_bytes >= num_bytes:
                return self._free.pop(index)
        if self._free:
            # In its stead, so that the number of places never exceeds what one step needs.
            self._free.pop()
        return _Place.of(num_bytes, is_pinned=self.device.type == "cuda")

    def _give_back(self, entry: _Entry) -> None:
        # Copies from and to a place are ordered: they share one lane.
        if entry.host is not None:
            self._free.append(entry.host)
            entry.host = None


def _memory(tensor: torch.Tensor) -> _Memory | None:
    """By what two tensors are known to have the same values in the same order; None: by nothing. The storage stands for
    its address, which tensors of a rehearsal have none of.
    """
    if not tensor.is_contiguous():
        return None
    storage = tensor.untyped_storage()
    return storage._cdata, int(tensor.storage_offset()), tensor.numel(), tensor.dtype, tensor._version
