"""What a GGUF file holds and what can be trained of it, from its header alone; needs neither torch nor the weights."""

import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggtrain.errors import BridgeError, UnsupportedError
from pyggtrain.gguf import GGUFFile

SCHEMA = 1
"""Version of `ModelInfo.to_dict`: fields are added without notice; whatever else changes raises it."""

# The adapter that the memory is told for: the default of `train`.
_RANK = 16
# float32 weight, gradient and AdamW's two moments.
_BYTES_PER_TRAINED_NUMBER = 16


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of the file.

    Attributes:
        shape: in torch order.
        why_no_lora: why no adapter can train it, as the end of a sentence that begins with its name; None if one can.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int
    why_no_lora: str | None

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """The name without the layer: ``attn_q``."""
        return re.sub(r"^blk\.\d+\.", "", self.name).removesuffix(".weight")


@dataclass(frozen=True)
class ModelInfo:
    """Contents of a GGUF file.

    Attributes:
        path: the file, or the first of its parts.
        num_parts: files that it is split over.
        file_bytes: its size, all parts together.
        metadata: key -> value, arrays left out.
        num_tokens: size of the vocabulary, 0 without one.
        tensors: in file order.
        why_no_graph: why llama.cpp could not tell what an adapter reaches (no tensor then carries LoRA), or None.
    """

    path: Path
    num_parts: int
    file_bytes: int
    metadata: dict[str, str | int | float | bool]
    num_tokens: int
    tensors: list[TensorFacts]
    why_no_graph: str | None

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was made for, if the file says it."""
        value = self.metadata.get(f"{self.architecture}.context_length")
        return value if isinstance(value, int) else None

    @property
    def trainable(self) -> list[TensorFacts]:
        """Tensors that an adapter can train."""
        return [tensor for tensor in self.tensors if tensor.why_no_lora is None]

    @property
    def adapter_parameters(self) -> int:
        """Numbers of an adapter of rank 16 on every linear but the output head, `train`'s default."""
        shapes = [tensor.shape for tensor in self.trainable if tensor.name != "output.weight"]
        return sum(math.prod(shape[:-2]) * _RANK * (shape[-2] + shape[-1]) for shape in shapes if len(shape) > 1)

    def facts(self) -> dict[str, str]:
        """The file for a person: name -> value. Long texts are cut."""
        parts = f" in {self.num_parts} files" if self.num_parts > 1 else ""
        num_weights = sum(tensor.num_weights for tensor in self.tensors)
        facts = {
            "file": _shortened(str(self.path), 1000),
            "size": f"{_mib(self.file_bytes)} in {len(self.tensors)} tensors{parts}, {num_weights:,} weights",
            "context": "not said" if self.context_length is None else f"{self.context_length:,} tokens",
            "vocabulary": f"{self.num_tokens:,} tokens",
            "chat template": "yes" if "tokenizer.chat_template" in self.metadata else "none",
            "LoRA on": self._lora_text(),
            "memory": f"to train: {_mib(self.file_bytes)} base file, read only, + "
            f"{_mib(_BYTES_PER_TRAINED_NUMBER * self.adapter_parameters)} adapter of rank {_RANK} with its optimiser + "
            "activations, which `pyggtrain train ... --dry-run` measures",
        }
        return facts | {key: _shortened(str(value)) for key, value in self.metadata.items()}

    def _lora_text(self) -> str:
        if self.why_no_graph is not None:
            return f"nothing: {_shortened(self.why_no_graph, 400)}"
        kinds = Counter(tensor.kind for tensor in self.trainable)
        return ", ".join(f"{kind} x {count}" for kind, count in kinds.items()) or "nothing"

    def untrainable_rows(self) -> list[list[str]]:
        """Header row and one row for each reason why tensors carry no LoRA: how many, which kinds, why."""
        kinds: dict[str, Counter[str]] = defaultdict(Counter)
        for tensor in self.tensors:
            if tensor.why_no_lora is not None:
                kinds[tensor.why_no_lora][tensor.kind] += 1
        rows = [
            [f"{counts.total()}", _shortened(", ".join(counts)), f"each {reason}"] for reason, counts in kinds.items()
        ]
        return [["no LoRA", "kinds", "because"], *rows]

    def type_rows(self) -> list[list[str]]:
        """Header row and one row for each tensor type: tensors, weights, MiB, bits for a weight."""
        return [
            ["type", "tensors", "weights", "MiB", "bits"],
            *(
                [
                    facts["type"],
                    f"{facts['tensors']}",
                    f"{facts['weights']:,}",
                    f"{facts['bytes'] / 2**20:,.1f}",
                    f"{8 * facts['bytes'] / max(1, facts['weights']):.2f}",
                ]
                for facts in self._types()
            ),
        ]

    def tensor_rows(self) -> list[list[str]]:
        """Header row and one row for each tensor: name, type, shape, bytes, whether it can carry LoRA."""
        rows = [
            [
                _shortened(tensor.name),
                tensor.type,
                " x ".join(map(str, tensor.shape)),
                f"{tensor.num_bytes:,}",
                "yes" if tensor.why_no_lora is None else "no",
            ]
            for tensor in self.tensors
        ]
        return [["tensor", "type", "shape", "bytes", "LoRA"], *rows]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON; `SCHEMA` says how it may change. Sizes in bytes, shapes in torch order."""
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "num_parts": self.num_parts,
            "file_bytes": self.file_bytes,
            "architecture": self.architecture,
            "context_length": self.context_length,
            "num_tokens": self.num_tokens,
            "has_chat_template": "tokenizer.chat_template" in self.metadata,
            "types": self._types(),
            "memory": {
                "base_bytes": self.file_bytes,
                "adapter_rank": _RANK,
                "adapter_parameters": self.adapter_parameters,
                "adapter_bytes": _BYTES_PER_TRAINED_NUMBER * self.adapter_parameters,
            },
            "why_no_graph": self.why_no_graph,
            # JSON has no NaN and no infinity.
            "metadata": {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in self.metadata.items()
            },
            "tensors": [
                {
                    "name": tensor.name,
                    "type": tensor.type,
                    "shape": list(tensor.shape),
                    "bytes": tensor.num_bytes,
                    "has_lora": tensor.why_no_lora is None,
                    "why_no_lora": tensor.why_no_lora,
                }
                for tensor in self.tensors
            ],
        }

    def _types(self) -> list[dict[str, Any]]:
        """Tensors, weights and bytes of each type, the largest first."""
        by_type: dict[str, list[TensorFacts]] = defaultdict(list)
        for tensor in self.tensors:
            by_type[tensor.type].append(tensor)
        types = [
            {
                "type": type,
                "tensors": len(tensors),
                "weights": sum(tensor.num_weights for tensor in tensors),
                "bytes": sum(tensor.num_bytes for tensor in tensors),
            }
            for type, tensors in by_type.items()
        ]
        return sorted(types, key=lambda facts: -int(str(facts["bytes"])))


def info(path: str | os.PathLike[str]) -> ModelInfo:
    """Read the header of a GGUF file, and ask llama.cpp which of its tensors an adapter changes. No weight is read.

    Raises:
        GGUFError: not a readable GGUF file.
    """
    file = GGUFFile.open(path)
    scalars = [key for key in file.metadata if not file.metadata.value_type(key).startswith("arr")]
    file.metadata.check_all_fit(file.path, scalars)
    metadata = {}
    for key in scalars:
        value = file.metadata[key]
        assert not isinstance(value, list), "the type says that it is no array"
        metadata[key] = value
    trainable, reasons, why_no_graph = _adapter_reach(file)
    tensors = [
        TensorFacts(
            facts.name,
            facts.type,
            tuple(facts.shape),
            facts.num_bytes,
            None if facts.name in trainable else _why_no_lora(facts.name, reasons, why_no_graph, file),
        )
        for facts in file.tensor_infos.values()
    ]
    return ModelInfo(
        path=file.path,
        num_parts=len(file.paths),
        file_bytes=file.file_bytes,
        metadata=metadata,
        num_tokens=file.array_length("tokenizer.ggml.tokens"),
        tensors=tensors,
        why_no_graph=why_no_graph,
    )


def _adapter_reach(file: GGUFFile) -> tuple[frozenset[str], dict[str, str], str | None]:
    """(weights that an adapter changes, other weights with the reason, why llama.cpp could not tell)."""
    from pyggtrain.graph.reach import adapter_reach

    if "general.architecture" not in file.metadata:
        return frozenset(), {}, "the file names no architecture"
    if file.metadata.get("general.type") in ("adapter", "imatrix", "mmproj"):
        return frozenset(), {}, f"the file is no model but of type {file.metadata['general.type']}"
    try:
        reach = adapter_reach(file.path)
    except (BridgeError, UnsupportedError) as error:
        return frozenset(), {}, str(error)
    return reach.trainable, reach.missed, None


def _why_no_lora(name: str, reasons: dict[str, str], why_no_graph: str | None, file: GGUFFile) -> str:
    if why_no_graph is not None:
        return "is in a file whose graph llama.cpp cannot build"
    if name == "token_embd.weight":
        if "output.weight" not in file.tensor_infos:
            return "is the embedding and the output head in one (tied), and llama.cpp aborts when an adapter changes it"
        return "is the token embedding, whose training is not implemented"
    return reasons.get(name, "is no matrix that llama.cpp multiplies by, so an adapter cannot change it")


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _shortened(text: str, length: int = 100) -> str:
    """One line without what a terminal could obey: the file may come from a stranger."""
    # A text of many megabytes would take many times its size character by character.
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: length + 1])
    return line if len(line) <= length else f"{line[: length - 3]}... ({len(text)} characters)"
