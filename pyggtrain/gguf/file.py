"""A GGUF file opened for reading: metadata, tensor table and tensors, all straight from one copy-on-write memory
map.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf.hub import local_path
from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.gguf.split import check_parts, part_paths
from pyggtrain.gguf.upload import release, upload

if TYPE_CHECKING:
    import torch

    from pyggtrain._bridge import MappedGGUF, MetadataValue, TensorInfo

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 4096
# Values of an array, or characters of a text, that are hashed at a time.
_HASHED_AT_A_TIME = 1 << 14


class Metadata(Mapping[str, "MetadataValue"]):
    """The file's key-value pairs. A value is decoded when it is asked for, so a vocabulary costs nothing until then."""

    def __init__(self, mapped: "MappedGGUF") -> None:
        self._mapped = mapped
        self._keys = dict.fromkeys(mapped.keys())

    def __getitem__(self, key: str) -> "MetadataValue":
        return self._mapped.value(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def check_all_fit(self, path: Path, keys: Iterable[str]) -> None:
        """Make sure that the values of `keys` can be held in memory together: each for itself always can.

        Raises:
            GGUFError: they would take more than twice the size of the file and 64 MiB.
        """
        needed = sum(map(self._mapped.decoded_bytes, keys))
        if needed > (limit := 2 * self._mapped.file_bytes + (64 << 20)):
            raise GGUFError(
                f"{path}: its metadata would take {needed:,} bytes of memory, many times the size of the file; taken "
                f"are at most {limit:,}."
            )

    def value_type(self, key: str) -> str:
        """GGUF's name of the value's type: ``u32``, ``str``, ``arr[f32]``, ...

        Raises:
            KeyError: the file has no such key.
        """
        return self._mapped.value_type(key)


class GGUFFile:
    """One GGUF model, in one file or split over several. Opening reads only the headers; tensors are views into the
    map.

    Args:
        path: the file, or any part of a split model (``name-00002-of-00003.gguf``), or a name on the Hugging Face hub
            (``hf://owner/repo/file.gguf``). The bytes are never changed.

    Attributes:
        path: the file, or the first part of a split model: the one that llama.cpp has to be given.
        metadata: key-value pairs (of the first part).
        tensor_infos: the tensor table by name, over all parts.

    Raises:
        GGUFError: missing, truncated or malformed file, with the byte offset and the rule that it breaks; a missing
            or foreign part.
        ConfigError: a name on the hub, without the package that fetches it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.paths = part_paths(local_path(path))
        self.path = self.paths[0]
        self._parts = [_bridge.MappedGGUF(os.fspath(part)) for part in self.paths]
        for part in self._parts:
            if part.why_read:
                logger.warning(
                    "%s: its file system cannot map files (%s); what is needed of its %.1f MiB is read into memory "
                    "instead.",
                    part.path,
                    part.why_read,
                    part.file_bytes / 2**20,
                )
        self.metadata = Metadata(self._parts[0])
        check_parts(self._parts)
        self.tensor_infos: dict[str, TensorInfo] = {}
        for part in self._parts:
            for info in part.tensors:
                if info.name in self.tensor_infos:
                    raise GGUFError(
                        f"{part.path}: tensor '{info.name}' stands in an earlier part too; the parts are of different "
                        f"models."
                    )
                self.tensor_infos[info.name] = info

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GGUFFile":
        """Same as the constructor; reads better at call sites."""
        return cls(path)

    @cached_property
    def tensors(self) -> dict[str, QuantTensor]:
        """Every tensor by name, zero-copy, in the order of the file."""
        # torch is imported here and not above: `pyggtrain info` needs only the header and should answer at once.
        from torch.utils.dlpack import from_dlpack

        return {
            info.name: QuantTensor(
                name=info.name,
                type=info.type,
                shape=tuple(info.shape),
                blocks=from_dlpack(part.tensor_bytes(index)),
            )
            for part in self._parts
            for index, info in enumerate(part.tensors)
        }

    def place(self, name: str, device: "torch.device | str") -> QuantTensor:
        """A tensor where a model shall compute: on the CPU the view of the mapping; on a GPU a copy of its blocks,
        uploaded once, while the host's pages of it are given back.
        """
        import torch

        tensor = self.tensors[name]
        if torch.device(device).type == "cpu":
            return tensor
        placed = replace(tensor, blocks=upload(tensor.blocks, device))
        release(tensor.blocks)
        return placed

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``."""
        return self.text("general.architecture")

    @property
    def chat_template(self) -> str | None:
        """The file's default chat template (jinja source), or None."""
        return self.text("tokenizer.chat_template") if "tokenizer.chat_template" in self.metadata else None

    @property
    def chat_templates(self) -> dict[str, str]:
        """The file's further chat templates by name, from ``tokenizer.chat_template.NAME``."""
        prefix = "tokenizer.chat_template."
        return {key.removeprefix(prefix): self.text(key) for key in self.metadata if key.startswith(prefix)}

    @property
    def file_bytes(self) -> int:
        """Size on disk, all parts together."""
        return sum(part.file_bytes for part in self._parts)

    @property
    def is_mapped(self) -> bool:
        """Whether the file system maps files; otherwise they are read into memory, here and in llama.cpp."""
        return not any(part.why_read for part in self._parts)

    def check_unchanged(self) -> None:
        """Make sure that nothing has written to the file since it was opened; costs one system call for each part.

        Raises:
            GGUFError: it has been cut off or written to: weights that were not read yet would be other ones, or none.
        """
        for part in self._parts:
            part.check_unchanged()

    def text(self, key: str) -> str:
        """The string value of `key`.

        Raises:
            GGUFError: the key is absent or not a string.
        """
        value = self.metadata.get(key)
        if not isinstance(value, str):
            found = "absent" if value is None else f"of type {self.metadata.value_type(key)}"
            raise GGUFError(f"{self.path}: metadata key '{key}' is {found}; needed: a string.")
        return value

    def array_length(self, key: str) -> int:
        """Values in the array `key`, without decoding them; 0 if the file has no such array."""
        is_array = key in self.metadata and self.metadata.value_type(key).startswith("arr")
        return self._parts[0].value_count(key) if is_array else 0

    @cached_property
    def header_sha256(self) -> str:
        """SHA-256 (hex) of every byte before the tensor data: metadata, tokenizer, template and tensor table (of each
        part in turn).
        """
        return _sha256([(part, min(part.data_offset, part.file_bytes)) for part in self._parts])

    @cached_property
    def tokenizer_sha256(self) -> str:
        """SHA-256 (hex) of all ``tokenizer.`` keys but the chat templates: equal for two files that split text
        alike.
        """
        keys = sorted(
            key
            for key in self.metadata
            if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template")
        )
        # The digest of all of them as one JSON object, made piece by piece: a vocabulary is large.
        digest = hashlib.sha256(b"{")
        for index, key in enumerate(keys):
            digest.update((", " * (index > 0) + json.dumps(key, ensure_ascii=False) + ": ").encode())
            for piece in _json_pieces(self.metadata[key]):
                digest.update(piece.encode())
        digest.update(b"}")
        return digest.hexdigest()

    @cached_property
    def sample_sha256(self) -> str:
        """SHA-256 (hex) of the header and of the first and last 4 KiB of each tensor: tells apart files with equal
        headers and other weights, such as two quantisations with other importance matrices, without reading them whole.
        """
        digest = hashlib.sha256(self.header_sha256.encode())
        for tensor in self.tensors.values():
            content = tensor.blocks.reshape(-1).numpy()
            digest.update(content[:_SAMPLE_BYTES].tobytes() + content[-_SAMPLE_BYTES:].tobytes())
        return digest.hexdigest()

    def sha256(self) -> str:
        """SHA-256 (hex) of the whole file, or of all parts in turn. Reads every byte: minutes for 100 GiB."""
        return _sha256([(part, part.file_bytes) for part in self._parts])


def _json_pieces(value: "MetadataValue") -> Iterator[str]:
    """`json.dumps(value, ensure_ascii=False)` in pieces."""
    if not isinstance(value, list | str):
        yield json.dumps(value)
        return
    opening, closing, separator = ("[", "]", ", ") if isinstance(value, list) else ('"', '"', "")
    yield opening
    for start in range(0, len(value), _HASHED_AT_A_TIME):
        inside = json.dumps(value[start : start + _HASHED_AT_A_TIME], ensure_ascii=False)[1:-1]
        yield separator * (start > 0) + inside
    yield closing


def _sha256(starts: "Sequence[tuple[MappedGGUF, int]]") -> str:
    """Digest of the first bytes of each file, one after another: of what was opened, not of what its path names now."""
    digest = hashlib.sha256()
    for mapped, num_bytes in starts:
        for start in range(0, num_bytes, 1 << 20):
            digest.update(mapped.read_bytes(start, min(1 << 20, num_bytes - start)))
    return digest.hexdigest()
