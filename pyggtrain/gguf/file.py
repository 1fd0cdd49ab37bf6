"""A GGUF file opened for reading: metadata, tensor table and tensors, all straight from one copy-on-write memory map."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf.quant_tensor import QuantTensor

if TYPE_CHECKING:
    from pyggtrain._bridge import MappedGGUF, MetadataValue, TensorInfo


class Metadata(Mapping[str, "MetadataValue"]):
    """The file's key-value pairs. A value is decoded when it is asked for, so a vocabulary costs nothing until then."""

    def __init__(self, mapped: "MappedGGUF") -> None:
        self._mapped = mapped
        self._keys = {key: None for key in mapped.keys()}  # noqa: SIM118 - the bridge's object is no mapping

    def __getitem__(self, key: str) -> "MetadataValue":
        return self._mapped.value(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def value_type(self, key: str) -> str:
        """GGUF's name of the value's type: ``u32``, ``str``, ``arr[f32]``, ...

        Raises:
            KeyError: the file has no such key.
        """
        return self._mapped.value_type(key)


class GGUFFile:
    """One GGUF file. Opening reads only the header; tensors are views into the map.

    Args:
        path: the file. Its bytes are never changed.

    Raises:
        GGUFError: missing, truncated or malformed file, with the byte offset and the rule that it breaks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._mapped = _bridge.MappedGGUF(os.fspath(path))
        self.metadata = Metadata(self._mapped)
        self.tensor_infos: "dict[str, TensorInfo]" = {info.name: info for info in self._mapped.tensors}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GGUFFile":
        """Same as the constructor; reads better at call sites."""
        return cls(path)

    @cached_property
    def tensors(self) -> dict[str, QuantTensor]:
        """Every tensor by name, zero-copy, in the order of the file."""
        # torch is imported here and not above: `pyggtrain info` needs only the header and should answer at once.
        import torch

        return {
            info.name: QuantTensor(
                name=info.name,
                type=info.type,
                shape=tuple(info.shape),
                blocks=torch.from_dlpack(self._mapped.tensor_bytes(index)),
            )
            for index, info in enumerate(self._mapped.tensors)
        }

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``."""
        return self.text("general.architecture")

    @property
    def chat_template(self) -> str | None:
        """The file's default chat template (jinja source), or None."""
        return self.text("tokenizer.chat_template") if "tokenizer.chat_template" in self.metadata else None

    @property
    def file_bytes(self) -> int:
        return self._mapped.file_bytes

    @property
    def data_offset(self) -> int:
        """Where tensor data begins; everything before it is the header."""
        return self._mapped.data_offset

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

    @cached_property
    def header_sha256(self) -> str:
        """SHA-256 (hex) of every byte before the tensor data: metadata, tokenizer, template and tensor table."""
        return _sha256(self.path, self.data_offset)

    @cached_property
    def tokenizer_sha256(self) -> str:
        """SHA-256 (hex) of all ``tokenizer.`` keys but the chat templates: equal for two files that split text alike."""
        keys = sorted(
            key
            for key in self.metadata
            if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template")
        )
        values = {key: self.metadata[key] for key in keys}
        return hashlib.sha256(
            json.dumps(values, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")
        ).hexdigest()

    def sha256(self) -> str:
        """SHA-256 (hex) of the whole file. Reads it all: minutes for 100 GiB."""
        return _sha256(self.path, self.file_bytes)


def _sha256(path: Path, num_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while num_bytes > 0 and (chunk := file.read(min(num_bytes, 1 << 20))):
            digest.update(chunk)
            num_bytes -= len(chunk)
    return digest.hexdigest()
