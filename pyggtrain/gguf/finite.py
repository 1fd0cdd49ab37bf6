"""Weights that are NaN or infinite: one of them makes every result NaN, and ggml carries it without a word.

Every tensor is read once, at the speed of memory; training reads them anyway.
"""

import math
from dataclasses import dataclass

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf.file import GGUFFile

_SHOWN = 10
# Reading less than this takes a few ms, and threads begin and end together: on a busy machine that takes longer.
_PARALLEL_BYTES = 64 << 20


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor with weights that are not finite.

    Attributes:
        num_bad, num_blocks: how many of its blocks (single weights, for F32, F16 and BF16) decode to NaN or infinity.
        first_row: row of the first one, counted over all leading dimensions.
    """

    name: str
    type: str
    num_bad: int
    num_blocks: int
    first_row: int

    def __str__(self) -> str:
        block_size = _bridge.quant_types()[self.type].block_size
        unit = "weights" if block_size == 1 else f"blocks of {block_size} weights"
        return (
            f"{self.name} ({self.type}): {self.num_bad:,} of {self.num_blocks:,} {unit} hold NaN or infinity, the "
            f"first in row {self.first_row:,}"
        )


def find_nonfinite(file: GGUFFile, *, num_threads: int) -> list[NonFiniteTensor]:
    """All tensors with weights that are not finite, in the order of the file."""
    known = _bridge.quant_types()
    found = []
    for tensor in file.tensors.values():
        # Integers are indices.
        if tensor.type not in known:
            continue
        rows, threads = (
            tensor.blocks.reshape(-1, tensor.row_bytes),
            1 if tensor.num_bytes < _PARALLEL_BYTES else num_threads,
        )
        num_bad, first = _bridge.count_nonfinite(tensor.type, rows, threads)
        if num_bad:
            in_row = tensor.shape[-1] // known[tensor.type].block_size
            num_blocks = math.prod(tensor.shape[:-1]) * in_row
            found.append(NonFiniteTensor(tensor.name, tensor.type, num_bad, num_blocks, first // in_row))
    return found


def check_finite(file: GGUFFile, *, num_threads: int) -> None:
    """Refuse a file with weights that are not finite.

    Raises:
        GGUFError: names the tensors and how much of each is bad.
    """
    found = find_nonfinite(file, num_threads=num_threads)
    if found:
        rest = [f"and {len(found) - _SHOWN} more tensors"] if len(found) > _SHOWN else []
        lines = "\n".join(f"  {line}" for line in [*map(str, found[:_SHOWN]), *rest])
        raise GGUFError(
            f"{file.path} holds weights that are not finite, which would make every result NaN:\n{lines}\n"
            "Compare its SHA-256 with the source's and download it again; if they are equal, the file was made "
            "broken: take another quantisation of the model."
        )
