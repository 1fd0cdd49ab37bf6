"""The one buffer that dequantised rows pass through.

A weight is never dequantised as a whole. Each matrix product takes as many of its rows as fit in this buffer, turns
them into float32, multiplies, and goes on. The buffer is reused by every layer and both directions, so its size is the
whole cost in memory of computing exactly on quantised blocks. Its limit is set here and nowhere else.

One buffer per thread: two threads that compute at the same time must not share rows (torch releases the GIL inside a
matrix product).
"""

import threading

import torch

from pyggtrain.errors import ConfigError

DEFAULT_LIMIT_BYTES = 16 * 2**20
MIN_LIMIT_BYTES = 2**16

# Matrix products with fewer rows than this lose more to call overhead than a small buffer saves (measured: 128 rows
# cost 5 % against 512 at K = 576), so rows are taken in multiples of it where the limit allows.
_ROW_GRANULE = 64


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Tensor] = {}


_buffers = _Buffers()
_limit_bytes = DEFAULT_LIMIT_BYTES


def limit_bytes() -> int:
    """Bytes that the buffer of one thread and device may take."""
    return _limit_bytes


def set_limit_bytes(num_bytes: int) -> None:
    """Set the largest size of the buffer; buffers that exist already are dropped.

    Raises:
        ConfigError: below 64 KiB, where every product would fall apart into single rows.
    """
    global _limit_bytes
    if num_bytes < MIN_LIMIT_BYTES:
        raise ConfigError(
            f"workspace of {num_bytes} bytes: needed at least {MIN_LIMIT_BYTES}. "
            f"Give more, or leave the default of {DEFAULT_LIMIT_BYTES}."
        )
    _limit_bytes = num_bytes
    _buffers.by_device.clear()


def rows_per_chunk(num_rows: int, num_columns: int) -> int:
    """How many rows of `num_columns` float32 values one pass takes: at least 1, at most `num_rows`."""
    fitting = max(1, _limit_bytes // (4 * num_columns))
    if fitting >= num_rows:
        return num_rows
    return fitting - fitting % _ROW_GRANULE if fitting > _ROW_GRANULE else fitting


def rows(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised float32 [num_rows, num_columns] inside the buffer. The next call hands out the same memory."""
    needed = num_rows * num_columns
    buffer = _buffers.by_device.get(device)
    if buffer is None or buffer.numel() < needed:
        buffer = torch.empty(needed, dtype=torch.float32, device=device)
        _buffers.by_device[device] = buffer
    return buffer[:needed].view(num_rows, num_columns)
