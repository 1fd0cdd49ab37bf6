"""What a GGUF file holds, from its header alone; needs neither torch nor the weights."""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from pyggtrain.gguf import GGUFFile


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of the file; `shape` in torch order."""

    name: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class ModelInfo:
    """Contents of a GGUF file.

    Attributes:
        path: the file.
        file_bytes: its size.
        metadata: key -> value, arrays left out.
        tensors: in file order.
    """

    path: Path
    file_bytes: int
    metadata: dict[str, str | int | float | bool]
    tensors: list[TensorFacts]

    def facts(self) -> dict[str, str]:
        """The file for a person: name -> value. Long texts are cut."""
        size = f"{self.file_bytes / 2**20:,.1f} MiB in {len(self.tensors)} tensors"
        return {
            "file": str(self.path),
            "size": size,
            **{key: _shortened(str(value)) for key, value in self.metadata.items()},
        }

    def type_rows(self) -> list[list[str]]:
        """Header row and one row for each tensor type: tensors, weights, MiB, bits for a weight."""
        by_type: dict[str, list[TensorFacts]] = defaultdict(list)
        for tensor in self.tensors:
            by_type[tensor.type].append(tensor)
        rows = [["type", "tensors", "weights", "MiB", "bits"]]
        for type, tensors in sorted(by_type.items(), key=lambda item: -sum(tensor.num_bytes for tensor in item[1])):
            num_weights = sum(_num_weights(tensor.shape) for tensor in tensors)
            num_bytes = sum(tensor.num_bytes for tensor in tensors)
            rows.append(
                [
                    type,
                    f"{len(tensors)}",
                    f"{num_weights:,}",
                    f"{num_bytes / 2**20:,.1f}",
                    f"{8 * num_bytes / max(1, num_weights):.2f}",
                ]
            )
        return rows

    def tensor_rows(self) -> list[list[str]]:
        """Header row and one row for each tensor: name, type, shape, bytes."""
        rows = [
            [tensor.name, tensor.type, " x ".join(map(str, tensor.shape)), f"{tensor.num_bytes:,}"]
            for tensor in self.tensors
        ]
        return [["tensor", "type", "shape", "bytes"], *rows]


def info(path: str | os.PathLike[str]) -> ModelInfo:
    """Read the header of a GGUF file.

    Raises:
        GGUFError: not a readable GGUF file.
    """
    file = GGUFFile.open(path)
    values = {key: file.metadata[key] for key in file.metadata if not file.metadata.value_type(key).startswith("arr")}
    return ModelInfo(
        path=file.path,
        file_bytes=file.file_bytes,
        metadata={key: value for key, value in values.items() if not isinstance(value, list)},
        tensors=[
            TensorFacts(facts.name, facts.type, tuple(facts.shape), facts.num_bytes)
            for facts in file.tensor_infos.values()
        ],
    )


def _num_weights(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _shortened(text: str) -> str:
    """One line without what a terminal could obey: the file may come from a stranger."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return line if len(line) <= 100 else f"{line[:97]}... ({len(text)} characters)"
