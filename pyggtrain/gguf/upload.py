"""From the mapped file to a GPU, through two pinned slabs.

The processor reads the file into one slab while the other is on its way: copying from the mapping itself would wait for
each page in turn, at a third of the speed. Pages that have been read are given back, so the process never holds more of
the file than a slab.
"""

import ctypes
import mmap
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 32 << 20
_MADV_DONTNEED = 4


@dataclass(eq=False)
class _Slabs:
    """Two places, each with the mark of its last copy."""

    places: "list[torch.Tensor]" = field(default_factory=list)
    copied: "list[torch.cuda.Event | None]" = field(default_factory=lambda: [None, None])
    turn: int = 0


_slabs = _Slabs()


def upload(blocks: "torch.Tensor", device: "torch.device | str") -> "torch.Tensor":
    """A copy of uint8 `blocks` on a GPU. The host's copy of what was read is released.

    Args:
        blocks: contiguous, on the host; a view of a mapped file or any other memory.
        device: a CUDA device.
    """
    import torch

    if not _slabs.places:
        _slabs.places = [torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    target = torch.empty(blocks.shape, dtype=torch.uint8, device=device)
    source, flat = blocks.view(-1), target.view(-1)
    for first in range(0, source.numel(), SLAB_BYTES):
        part = source[first : first + SLAB_BYTES]
        turn = _slabs.turn
        _slabs.turn = 1 - turn
        mark = _slabs.copied[turn]
        if mark is not None:
            mark.synchronize()
        slab = _slabs.places[turn][: part.numel()]
        slab.copy_(part)
        flat[first : first + SLAB_BYTES].copy_(slab, non_blocking=True)
        with torch.cuda.device(target.device):
            _slabs.copied[turn] = torch.cuda.current_stream().record_event()
    return target


def release(blocks: "torch.Tensor") -> None:
    """Give back the memory of whole pages inside `blocks`, a view of a mapped file that nobody has written to.

    They are read from the file again if anybody asks. Nothing happens where the system has no such call.
    """
    if sys.platform != "linux":
        return
    first = -(-blocks.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (blocks.data_ptr() + blocks.numel()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)
