"""Write adapters into a copy of their base model: W becomes W + sum of scale * alpha / r * B A, tensor by tensor.

Each changed tensor is decoded to float32 a few rows at a time, added to, and encoded again by ggml's own quantiser, in
its own type or another. All other tensors are copied byte for byte. Memory: the blocks of the largest tensor, and
`CHUNK_BYTES` of float32. What the second rounding of a quantised weight costs is measured here as it happens (`Merged.
rounding`) and is the yardstick of `validation.merge_parity`.

Shape letters: N rows and K columns of a weight, R rank, E experts.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from pyggtrain._version import __version__
from pyggtrain.adapters.arithmetic import factors
from pyggtrain.adapters.gguf_adapter import AdapterFile, check_against_base
from pyggtrain.errors import AdapterError, BridgeError, ConfigError, UnsupportedError
from pyggtrain.gguf import (
    DeferredTensor,
    GGUFFile,
    QuantTensor,
    TypedValue,
    quantize_tensor,
    typed_metadata,
    write_gguf,
)
from pyggtrain.gguf.imatrix import importance_of, needs_imatrix
from pyggtrain.gguf.requantize import FILE_TYPES, plan
from pyggtrain.gguf.writer import WritableTensor, row_bytes
from pyggtrain.ops import dequantize

# float32 rows that are worked on at a time; about three such pieces are alive at once.
CHUNK_BYTES = 32 * 2**20

PROVENANCE = "pyggtrain.merged"
"""Metadata key of a merged file: a JSON list with one entry per merge."""


@dataclass(frozen=True)
class Rounding:
    """How far the written weights of one tensor are from the wanted ones.

    Attributes:
        found, made: its type in the base, and in the merged file.
        rms: root mean square of written - wanted, over all its weights.
        relative: that over the root mean square of the wanted weights.
    """

    found: str
    made: str
    rms: float
    relative: float


@dataclass(eq=False)
class Merged:
    """What a merge did.

    Attributes:
        path: the new file.
        rounding: by tensor name, for every tensor that was encoded anew.
        num_copied: tensors copied byte for byte.
    """

    path: Path
    rounding: dict[str, Rounding] = field(default_factory=dict)
    num_copied: int = 0


def merge(
    base: GGUFFile,
    adapters: Sequence[tuple[AdapterFile, float]],
    output: str | os.PathLike[str],
    *,
    type: str | None = None,
    tensor_types: Mapping[str, str] | None = None,
    imatrix: Mapping[str, torch.Tensor] | None = None,
    is_uniform_allowed: bool = False,
    ignore_hash: bool = False,
    overwrite: bool = False,
    num_threads: int = 1,
) -> Merged:
    """Write `base` with `adapters` in it to `output`. The file appears complete or not at all.

    Args:
        base: the model; never changed.
        adapters: each with the scale it would be served with.
        output: GGUF file to write, in one piece.
        type: ggml type of all weights, as `requantize.plan` gives it; None: each tensor keeps its own.
        tensor_types: other types by pattern ("*attn_v*": "Q6_K"); the last pattern that matches counts.
        imatrix: importance of columns, see `gguf.imatrix.read_imatrix`.
        is_uniform_allowed: where a type needs an importance matrix and there is none, weigh all columns alike.
        ignore_hash: accept adapters that were trained on another file, such as another quantisation of the same model.
        overwrite: replace an existing file.
        num_threads: CPU threads of ggml's quantiser.

    Returns:
        What was rounded, and how much.

    Raises:
        AdapterError: an adapter does not fit the base, or none is given.
        ConfigError: an unknown type or pattern, a type that needs an importance matrix, an output that exists or is the
            base.
        UnsupportedError: a pair on a weight that has a scale of its own.
        OSError: the folder does not exist or is not writable, or the disk is full.
    """
    _check(base, adapters, Path(output), ignore_hash=ignore_hash, overwrite=overwrite)
    made = _types(base, type, tensor_types or {})
    updates = {name: _Update(name, adapters) for name in base.tensor_infos if any(name in a.pairs for a, _ in adapters)}
    anew = [name for name in base.tensor_infos if name in updates or made[name] != base.tensor_infos[name].type]
    weights = imatrix or {}
    lacking = [name for name in anew if needs_imatrix(made[name]) and name not in weights]
    if lacking and not is_uniform_allowed:
        raise ConfigError(
            f"{len(lacking)} tensors must be encoded as a type that needs an importance matrix, and none is given for "
            f"them (first: {lacking[0]}, {made[lacking[0]]}). Give one made by llama-imatrix, choose another type, or "
            "allow uniform weights at a cost in quality."
        )
    merged = Merged(Path(output), num_copied=len(base.tensor_infos) - len(anew))
    tensors: list[WritableTensor] = []
    for name, tensor in base.tensors.items():
        if name not in anew:
            tensors.append(tensor)
            continue
        importance = importance_of(weights, name, tensor.shape)
        produce = partial(_encode, tensor, made[name], updates.get(name), importance, num_threads, merged)
        tensors.append(DeferredTensor(name, made[name], tensor.shape, produce))
    write_gguf(output, _metadata(base, adapters, type), tensors)
    return merged


def _check(
    base: GGUFFile, adapters: Sequence[tuple[AdapterFile, float]], output: Path, *, ignore_hash: bool, overwrite: bool
) -> None:
    if not adapters:
        raise AdapterError("No adapter is given: needed one or more.")
    if any(output.exists() and output.samefile(path) for path in base.paths):
        raise ConfigError(f"{output} is the base file itself, which is never changed. Choose another output name.")
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists already. Choose another name, or overwrite it explicitly.")
    for adapter, scale in adapters:
        if not math.isfinite(scale) or scale == 0:
            raise ConfigError(f"{adapter.path} has scale {scale}: needed a finite number other than 0.")
        check_against_base(adapter, base, ignore_hash=ignore_hash)
        for name in adapter.pairs:
            own_scale = name.removesuffix(".weight") + ".scale"
            if own_scale in base.tensor_infos:
                raise UnsupportedError(
                    f"{name} in {adapter.path}: {base.path} multiplies this weight's product by {own_scale}, and "
                    "llama.cpp adds an adapter before or after that, depending on the layer. Merging it is not "
                    "implemented; serve the adapter beside its base."
                )


def _types(base: GGUFFile, type: str | None, tensor_types: Mapping[str, str]) -> dict[str, str]:
    planned = plan(base, type or "F32", tensor_types)
    if type is not None:
        return {change.name: change.made for change in planned}
    return {
        change.name: change.made if any(fnmatchcase(change.name, pattern) for pattern in tensor_types) else change.found
        for change in planned
    }


def _metadata(base: GGUFFile, adapters: Sequence[tuple[AdapterFile, float]], type: str | None) -> dict[str, TypedValue]:
    metadata = {key: value for key, value in typed_metadata(base).items() if not key.startswith("split.")}
    # How tensors lie in a file is the writer's own matter.
    metadata.pop("general.alignment", None)
    if type is not None:
        metadata["general.file_type"] = TypedValue("u32", FILE_TYPES[type])
    earlier = metadata.pop(PROVENANCE, None)
    entry = {
        "version": __version__,
        "base.header_sha256": base.header_sha256,
        "adapters": [
            {"file": adapter.path.name, "sha256": GGUFFile.open(adapter.path).sha256(), "scale": scale}
            for adapter, scale in adapters
        ],
    }
    entries = [*(json.loads(str(earlier.value)) if earlier is not None else []), entry]
    return {**metadata, PROVENANCE: TypedValue("str", json.dumps(entries, ensure_ascii=False))}


class _Update:
    """The sum of what all adapters add to one weight."""

    def __init__(self, name: str, adapters: Sequence[tuple[AdapterFile, float]]) -> None:
        held = [(adapter, scale) for adapter, scale in adapters if name in adapter.pairs]
        pairs = [factors(name, adapter.pairs[name]) for adapter, _ in held]
        self._factors = [scale * adapter.scale(name) for adapter, scale in held]
        # Experts one after another: A [E, R, K], B [E, N, R].
        self._pairs = [(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])) for a, b in pairs]

    def add_to(self, values: torch.Tensor, matrix: int, rows: slice) -> None:
        """Add the update of some rows of one matrix to `values` [rows, K] float32, in place."""
        for factor, (lora_a, lora_b) in zip(self._factors, self._pairs, strict=True):
            values.addmm_(lora_b[matrix, rows], lora_a[matrix], alpha=factor)


def _encode(
    tensor: QuantTensor,
    type: str,
    update: _Update | None,
    importance: torch.Tensor | None,
    num_threads: int,
    merged: Merged,
) -> torch.Tensor:
    """Blocks of one tensor after the update; notes in `merged` what rounding did to it."""
    columns = tensor.shape[-1]
    out = torch.empty(tensor.num_rows, row_bytes(type, columns), dtype=torch.uint8)
    if importance is None and needs_imatrix(type):
        importance = torch.ones(1, columns)
    squared_error = squared_wanted = 0.0
    for matrix, rows, in_matrix in _chunks(tensor):
        wanted = dequantize(tensor, rows=rows)
        if update is not None:
            update.add_to(wanted, matrix, in_matrix)
        of_columns = None if importance is None else importance[matrix if len(importance) > 1 else 0]
        try:
            written = quantize_tensor(tensor.name, wanted, type, imatrix=of_columns, num_threads=num_threads)
        except BridgeError as error:
            raise AdapterError(f"{tensor.name} cannot be written as {type} with the adapter in it: {error}") from error
        out[rows] = written.blocks
        squared_error += float((dequantize(written) - wanted).double().square().sum())
        squared_wanted += float(wanted.double().square().sum())
    rms = math.sqrt(squared_error / (tensor.num_rows * columns))
    relative = math.sqrt(squared_error / squared_wanted) if squared_wanted else 0.0
    merged.rounding[tensor.name] = Rounding(tensor.type, type, rms, relative)
    return out


def _chunks(tensor: QuantTensor) -> Iterator[tuple[int, slice, slice]]:
    """(matrix, its rows in the tensor, the same counted within the matrix) for bounded pieces of each matrix."""
    num_matrices = math.prod(tensor.shape[:-2])
    num_rows = tensor.num_rows // num_matrices
    step = max(1, CHUNK_BYTES // (4 * tensor.shape[-1]))
    for matrix in range(num_matrices):
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            yield matrix, slice(matrix * num_rows + first, matrix * num_rows + last), slice(first, last)
