"""Importance matrices: which columns of a weight matter, as llama.cpp's llama-imatrix measured it on a text.

Two formats, told apart by the first bytes. GGUF: tensors `<weight>.in_sum2` (sums of squared activations) and
`<weight>.counts` (tokens summed over, one number or one per expert). The older .dat: a count of entries, then for each
its name, a number of calls, a number of values and the values, little-endian (tools/imatrix/imatrix.cpp and
common/imatrix-loader.cpp at 0c1e57098). Both come from strangers: every length is checked against the file before it is
believed.
"""

import math
import os
import struct
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf.file import GGUFFile

if TYPE_CHECKING:
    import torch


def read_imatrix(path: str | os.PathLike[str]) -> "dict[str, torch.Tensor]":
    """Mean squared activation of each column by tensor name: float32 [M, K], M matrices of K columns.

    The older format does not say where one expert ends: there M is 1 and K all values; `importance_of` cuts them.

    Raises:
        GGUFError: no importance matrix, or a damaged one.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                file.seek(0)
                return _read_dat(path, file)
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror}.") from error
    return _read_gguf(path)


def needs_imatrix(type: str) -> bool:
    """Whether ggml's quantiser refuses to make this type without an importance matrix."""
    return _bridge.quant_types()[type].needs_imatrix


def importance_of(weights: "Mapping[str, torch.Tensor]", name: str, shape: tuple[int, ...]) -> "torch.Tensor | None":
    """What `read_imatrix` knows of one tensor: positive float32 [1, K], or [E, K] for a stack of E experts; None if
    nothing.

    An expert or column that no token reached still has to be stored somehow: an expert without data counts all columns
    alike, as in llama.cpp, and a column without data counts as the least important one.

    Args:
        weights: from `read_imatrix`.
        name: tensor name.
        shape: of the tensor, [..., K].

    Raises:
        GGUFError: the matrix is of another model.
    """
    if name not in weights:
        return None
    num_values, columns = weights[name].numel(), shape[-1]
    num_experts = math.prod(shape[:-2])
    if num_values not in (columns, num_experts * columns):
        raise GGUFError(
            f"The importance matrix has {num_values} values for {name} {list(shape)}; needed: {columns}, or "
            f"{columns} for each of {num_experts} experts. It is of another model."
        )
    means = weights[name].reshape(-1, columns).clone()
    for row in means:
        is_known = row > 0
        row[~is_known] = row[is_known].min() if bool(is_known.any()) else 1.0
    return means


def _read_gguf(path: Path) -> "dict[str, torch.Tensor]":
    import torch

    file = GGUFFile(path)
    sums = [name for name in file.tensors if name.endswith(".in_sum2")]
    if not sums:
        raise GGUFError(f"{path}: holds no tensor named *.in_sum2; needed: an importance matrix made by llama-imatrix.")
    result = {}
    for name in sums:
        base = name.removesuffix(".in_sum2")
        count = file.tensors.get(f"{base}.counts")
        if count is None or file.tensors[name].type != "F32" or count.type != "F32":
            raise GGUFError(f"{path}: '{base}' lacks F32 tensors .in_sum2 and .counts; the file is damaged.")
        total = file.tensors[name].blocks.view(torch.float32).reshape(-1, file.tensors[name].shape[-1])
        counts = count.blocks.view(torch.float32).reshape(-1, 1)
        if len(counts) not in (1, len(total)):
            raise GGUFError(
                f"{path}: '{base}' has {len(counts)} counts for {len(total)} matrices; the file is damaged."
            )
        result[base] = _checked(path, base, total / counts.clamp_min(1))
    return result


def _read_dat(path: Path, file: BufferedReader) -> "dict[str, torch.Tensor]":
    import torch

    remaining = os.fstat(file.fileno()).st_size

    def take(num_bytes: int, what: str) -> bytearray:
        nonlocal remaining
        if not 0 <= num_bytes <= remaining:
            raise GGUFError(
                f"{path}: {what} would take {num_bytes} bytes, {remaining} are left; it is no importance matrix of "
                "llama-imatrix (GGUF or .dat), or it is cut off."
            )
        remaining -= num_bytes
        taken = bytearray(num_bytes)
        if file.readinto(taken) != num_bytes:
            raise GGUFError(f"{path}: became shorter while it was read. Start again once nothing writes to it.")
        return taken

    def number(what: str) -> int:
        value: int = struct.unpack("<i", take(4, what))[0]
        return value

    num_entries = number("the number of entries")
    if num_entries < 1:
        raise GGUFError(f"{path}: says it has {num_entries} entries; needed: an importance matrix of llama-imatrix.")
    result = {}
    for index in range(num_entries):
        name = take(number(f"the name of entry {index}"), f"the name of entry {index}").decode("utf-8", "replace")
        num_calls, num_values = number(f"the calls of {name}"), number(f"the size of {name}")
        if num_values < 1:
            raise GGUFError(f"{path}: {name} has {num_values} values; needed: one per column. The file is damaged.")
        values = torch.frombuffer(take(4 * num_values, name), dtype=torch.float32)
        result[name] = _checked(path, name, values[None].div_(max(num_calls, 1)))
    return result


def _checked(path: Path, name: str, means: "torch.Tensor") -> "torch.Tensor":
    if not bool((means >= 0).all()) or not bool(means.isfinite().all()):
        raise GGUFError(f"{path}: {name} holds numbers that are negative or not finite; the file is damaged.")
    return means
