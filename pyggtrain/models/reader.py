"""Strict reading of a model file: every key and every tensor is used, expected to be neutral, or named to the person.

A key that is silently dropped is a model that silently computes something else.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from pyggtrain.errors import GGUFError, UnsupportedError
from pyggtrain.gguf import GGUFFile, QuantTensor

logger = logging.getLogger(__name__)

_REQUIRED: Any = object()


class Keys:
    """The metadata keys under `<architecture>.`, each asked for once.

    Args:
        file: an opened GGUF file. Keys are named without the architecture's prefix: "attention.head_count".
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._prefix = f"{file.architecture}."
        self._asked: set[str] = set()

    def integer(self, name: str, default: int = _REQUIRED) -> int:
        """A whole number, 0 or more. An array of equal numbers is taken too: some converters write one per layer.

        Raises:
            GGUFError: absent without a default, or not a whole number.
            UnsupportedError: it differs from layer to layer.
        """
        value = self._value(name, default)
        if isinstance(value, list) and value:
            if any(element != value[0] for element in value):
                raise UnsupportedError(
                    f"{self._full(name)} in {self._file.path} differs from layer to layer ({value}): "
                    f"the {self._file.architecture} model needs one value."
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "a whole number, 0 or more")
        return value

    def positive(self, name: str, default: int = _REQUIRED) -> int:
        """A whole number >= 1; otherwise as `integer`."""
        value = self.integer(name, default)
        if value == 0:
            raise self._wrong(name, value, "a whole number, 1 or more")
        return value

    def number(self, name: str, default: float = _REQUIRED, *, above: float = -math.inf) -> float:
        """A finite number larger than `above`.

        Raises:
            GGUFError: absent without a default, or not such a number.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= above:
            raise self._wrong(name, value, "a finite number" + (f" above {above:g}" if above > -math.inf else ""))
        return float(value)

    def text(self, name: str, default: str = _REQUIRED) -> str:
        """A string.

        Raises:
            GGUFError: absent without a default, or not a string.
        """
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def expect(self, name: str, neutral: Any, feature: str) -> None:
        """Accept a key only if absent or equal to `neutral`, the value that switches `feature` off.

        Raises:
            UnsupportedError: any other value.
        """
        value = self._value(name, neutral)
        values = value if isinstance(value, list) else [value]
        if any(element != neutral for element in values):
            raise UnsupportedError(
                f"{self._full(name)} in {self._file.path} is {value!r}: {feature} is not implemented for "
                f"{self._file.architecture} (needed: {neutral!r} or absent). Use a model without it."
            )

    def unused(self, name: str, reason: str, *, is_neutral: Callable[[Any], bool] = lambda value: True) -> None:
        """A key that llama.cpp does not use for this architecture, and so training neither.

        Said in a warning where it would have an effect, so that nobody takes it for honoured.
        """
        value = self._value(name, None)
        if value is not None and not is_neutral(value):
            logger.warning("%s in %s is %r and has no effect: %s", self._full(name), self._file.path, value, reason)

    def warn_of_rest(self) -> None:
        """List the keys under the architecture's prefix that nobody asked for, in one warning."""
        rest = [key for key in self._file.metadata if key.startswith(self._prefix) and key not in self._asked]
        if rest:
            logger.warning(
                "%s has metadata that the %s model does not know and ignores: %s",
                self._file.path,
                self._file.architecture,
                ", ".join(rest),
            )

    def _full(self, name: str) -> str:
        return self._prefix + name

    def _value(self, name: str, default: Any) -> Any:
        key = self._full(name)
        self._asked.add(key)
        if key in self._file.metadata:
            return self._file.metadata[key]
        if default is _REQUIRED:
            raise GGUFError(
                f"{key} is missing in {self._file.path}: the {self._file.architecture} model needs it. "
                "Convert the model again."
            )
        return default

    def _wrong(self, name: str, value: Any, needed: str) -> GGUFError:
        return GGUFError(f"{self._full(name)} in {self._file.path} is {value!r}: needed {needed}.")


class Tensors:
    """The tensors of a file, each taken once, on the device where the model shall run.

    Args:
        file: an opened GGUF file.
        device_of: name of a tensor -> where its blocks go. On the CPU they stay where the file is mapped.
    """

    def __init__(self, file: GGUFFile, device_of: Callable[[str], torch.device | str]) -> None:
        self._file = file
        self._device_of = device_of
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def take(self, name: str, shape: tuple[int | None, ...]) -> QuantTensor:
        """The tensor `name`, whose shape must be `shape` (torch order; None: any size).

        Raises:
            GGUFError: it is missing or has another shape.
        """
        tensor = self.take_optional(name, shape)
        if tensor is None:
            raise GGUFError(
                f"{name} is missing in {self._file.path}: the {self._file.architecture} model needs it with shape "
                f"{_text(shape)}. The file is incomplete, or its metadata is wrong."
            )
        return tensor

    def take_optional(self, name: str, shape: tuple[int | None, ...]) -> QuantTensor | None:
        """As `take`, but None if the file has no such tensor."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return None
        if not _does_fit(tensor.shape, shape):
            raise GGUFError(
                f"{name} in {self._file.path} has shape {list(tensor.shape)}: its metadata asks for {_text(shape)}. "
                "The file is inconsistent."
            )
        self._taken.add(name)
        return self._file.place(name, self._device_of(name))

    def check_rest(self) -> None:
        """Account for every tensor that nobody took.

        Raises:
            UnsupportedError: one of them changes what llama.cpp computes (a `.scale` tensor).
        """
        rest = [name for name in self._file.tensors if name not in self._taken]
        scales = [name for name in rest if name.endswith((".scale", ".input_scale"))]
        if scales:
            raise UnsupportedError(
                f"{scales[0]} in {self._file.path}: tensors that scale a weight's product are not implemented for "
                f"{self._file.architecture} ({len(scales)} such tensors). Use a file without them."
            )
        if rest:
            logger.warning(
                "%s has %d tensors that the %s model does not use: %s",
                self._file.path,
                len(rest),
                self._file.architecture,
                ", ".join(rest[:10]) + (", ..." if len(rest) > 10 else ""),
            )


def _does_fit(found: tuple[int, ...], needed: tuple[int | None, ...]) -> bool:
    return len(found) == len(needed) and all(size in (None, other) for size, other in zip(needed, found, strict=True))


def _text(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
