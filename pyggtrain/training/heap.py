"""How much memory glibc's malloc holds for a sequence of blocks.

A process's memory is not the sum of its tensors: a freed block becomes a hole, and a hole that fits no later block
stays empty and resident. So the sequence itself is played, with the rules of glibc (malloc/malloc.c) that matter for
large blocks: the smallest hole that is large enough is taken and its rest stays a hole; neighbouring holes become one;
what no hole can hold comes from the end of the heap, or from the system if it has at least `mmap_threshold` bytes; the
free end goes back once it has `trim_threshold` bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

# torch asks for blocks at multiples of 64 bytes, and malloc keeps 16 more in front; the system's own begin a page.
_ALIGNMENT, _PAGE = 64, 4096
# malloc looks for this much more to be sure of an aligned place inside.
_SLACK = _ALIGNMENT + 32


class Heap:
    """An empty heap. Addresses count from its start; blocks of the system's own have negative ones."""

    def __init__(self, *, mmap_threshold: int, trim_threshold: int) -> None:
        self.peak_bytes = 0
        self._mmap_threshold, self._trim_threshold = mmap_threshold, trim_threshold
        # Memory below `_top` is in use or a hole; up to `_end` it is resident.
        self._top = self._end = self._mapped = 0
        self._holes: list[tuple[int, int]] = []
        self._hole_at: dict[int, int] = {}
        self._hole_before: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int:
        """Return the address of a new block."""
        size = -(-(num_bytes + 16) // _ALIGNMENT) * _ALIGNMENT
        place = bisect_left(self._holes, (size + _SLACK, 0))
        if place < len(self._holes):
            hole_size, address = self._holes[place]
            self._remove_hole(address, hole_size)
            self._add_hole(address + size, hole_size - size)
        elif self._end - self._top < size + _SLACK and size + _SLACK >= self._mmap_threshold:
            size = -(-size // _PAGE) * _PAGE
            address = -1 - len(self._sizes)
            while address in self._sizes:
                address -= 1
            self._mapped += size
        else:
            address, self._top = self._top, self._top + size
            self._end = max(self._end, self._top)
        self._sizes[address] = size
        self.peak_bytes = max(self.peak_bytes, self._end + self._mapped)
        return address

    def free(self, address: int) -> None:
        """Give a block back."""
        size = self._sizes.pop(address)
        if address < 0:
            self._mapped -= size
            return
        if address in self._hole_before:
            start = self._hole_before[address]
            self._remove_hole(start, address - start)
            address, size = start, address - start + size
        if address + size in self._hole_at:
            following = self._hole_at[address + size]
            self._remove_hole(address + size, following)
            size += following
        if address + size == self._top:
            self._top = address
            if self._end - self._top >= self._trim_threshold:
                self._end = self._top
        else:
            self._add_hole(address, size)

    def _add_hole(self, address: int, size: int) -> None:
        if size > 0:
            insort(self._holes, (size, address))
            self._hole_at[address], self._hole_before[address + size] = size, address

    def _remove_hole(self, address: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, address))]
        del self._hole_at[address], self._hole_before[address + size]


def heap_peak_bytes(sizes: Sequence[int], events: Iterable[int], *, mmap_threshold: int, trim_threshold: int) -> int:
    """Play a sequence and return the most memory that it held.

    Args:
        sizes: bytes of each block.
        events: n >= 0: block n is made; -1 - n: it is given back.
        mmap_threshold, trim_threshold: bytes, as `mallopt` takes them.
    """
    heap = Heap(mmap_threshold=mmap_threshold, trim_threshold=trim_threshold)
    addresses: dict[int, int] = {}
    for event in events:
        if event >= 0:
            addresses[event] = heap.allocate(sizes[event])
        else:
            heap.free(addresses.pop(-1 - event))
    return heap.peak_bytes
