"""The one buffer that dequantised rows pass through.

A model is never dequantised as a whole. Each matrix product takes as many of a weight's rows as fit in this buffer,
turns them into numbers of its dtype, multiplies, and goes on. The buffer is reused by every layer and both directions,
so its size is the whole cost in memory of computing on quantised blocks. Its limit is set here and nowhere else.

One buffer per thread: two threads that compute at the same time must not share rows (torch releases the GIL inside a
matrix product).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyggtrain.errors import ConfigError

DEFAULT_LIMIT_BYTES = 16 * 2**20
# A GPU wants whole products: this holds any layer's weight of an 8B model in bfloat16, and a third of its head.
DEFAULT_GPU_LIMIT_BYTES = 352 * 2**20
MIN_LIMIT_BYTES = 2**16

# Matrix products with fewer rows than this lose more to call overhead than a small buffer saves (measured: 128 rows
# cost 5 % against 512 at K = 576), so rows are taken in multiples of it where the limit allows.
_ROW_GRANULE = 64


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Tensor] = {}  # uint8, one dimension


_buffers = _Buffers()
_limit_bytes = {"cpu": DEFAULT_LIMIT_BYTES, "cuda": DEFAULT_GPU_LIMIT_BYTES}


def limit_bytes(device_type: str = "cpu") -> int:
    """Bytes that the buffer of one thread and device may take."""
    return _limit_bytes[device_type]


def set_limit_bytes(num_bytes: int, device_type: str = "cpu") -> None:
    """Set the largest size of the buffer on the CPU or on each GPU; buffers that exist already are dropped.

    Raises:
        ConfigError: below 64 KiB, where every product would fall apart into single rows.
    """
    if num_bytes < MIN_LIMIT_BYTES:
        raise ConfigError(
            f"workspace of {num_bytes} bytes: needed at least {MIN_LIMIT_BYTES}. "
            f"Give more, or leave the default of {DEFAULT_LIMIT_BYTES}."
        )
    _limit_bytes[device_type] = num_bytes
    _buffers.by_device.clear()


def held() -> list[torch.Tensor]:
    """The buffers of this thread."""
    return list(_buffers.by_device.values())


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, this thread begins without a buffer; afterwards it has those that it had before."""
    held, _buffers.by_device = _buffers.by_device, {}
    try:
        yield
    finally:
        _buffers.by_device = held


def rows_per_chunk(
    num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32, device_type: str = "cpu"
) -> int:
    """How many rows of `num_columns` numbers one pass takes: at least 1, at most `num_rows`."""
    # Tensors without memory stand for a CPU's (`ops.rehearsal`).
    limit = _limit_bytes["cpu" if device_type == "meta" else device_type]
    fitting = max(1, limit // (dtype.itemsize * num_columns))
    if fitting >= num_rows:
        return num_rows
    return fitting - fitting % _ROW_GRANULE if fitting > _ROW_GRANULE else fitting


def rows(num_rows: int, num_columns: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uninitialised [num_rows, num_columns] inside the buffer. The next call hands out the same memory.

    On a GPU each call hands out memory of its own: torch's allocator keeps and reuses it, and what a loss needs serves
    a layer's backward a moment later.
    """
    if device.type == "cuda":
        return torch.empty(num_rows, num_columns, dtype=dtype, device=device)
    needed = num_rows * num_columns * dtype.itemsize
    buffer = _buffers.by_device.get(device)
    if buffer is None or buffer.numel() < needed:
        # The old buffer goes first: both at once would be a peak of their own.
        buffer = None
        _buffers.by_device.pop(device, None)
        buffer = torch.empty(needed, dtype=torch.uint8, device=device)
        _buffers.by_device[device] = buffer
    return buffer[:needed].view(dtype).view(num_rows, num_columns)
