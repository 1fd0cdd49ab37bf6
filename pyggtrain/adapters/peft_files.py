"""The two files of a PEFT folder, read and checked: they come from strangers.

What the rest of the reader relies on is made sure of here: numbers are numbers, matrices have sizes, and the patterns
of alpha_pattern, which PEFT matches as regular expressions, cannot run for ever.
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pyggtrain.errors import AdapterError
from pyggtrain.gguf import TypedValue

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HEADER_KEY = "pyggtrain"

# PEFT's own default.
_DEFAULT_ALPHA = 8
_MAX_ALPHA = 1e30
# Narrower numbers would take many times their size as float32.
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# A pattern with two repeats takes time with the cube of a module's name at most, as one of PEFT's own stands before it.
_MAX_REPEATS, _MAX_PATTERN, _MAX_MODULE = 2, 1024, 512


@dataclass(frozen=True)
class Header:
    """What `to_peft` left in the safetensors header; nothing where another program wrote the file.

    Attributes:
        alpha: of the GGUF adapter that was converted, 0 if it had none.
        tensors: names of its pairs, in order.
        provenance, metadata: as in `AdapterFile`.
    """

    alpha: float | None = None
    tensors: tuple[str, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, TypedValue] = field(default_factory=dict)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration as JSON, with a number as lora_alpha and an object of numbers by pattern as alpha_pattern.

    Raises:
        AdapterError: it cannot be read, is no LoRA configuration, or one of the two is of another kind.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: cannot be read as a PEFT configuration: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise AdapterError(f"{path}: peft_type is {kind!r}; needed: 'LORA'.")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{path}: alpha_pattern is {_shown(patterns)}; needed: an object of numbers.")
    alphas = {"lora_alpha": config.get("lora_alpha", _DEFAULT_ALPHA), **patterns}
    for key, alpha in alphas.items():
        if not _is_number(alpha) or not abs(alpha) <= _MAX_ALPHA:
            raise AdapterError(f"{path}: {_shown(key)} has alpha {_shown(alpha)}; needed: a finite number.")
    for pattern in patterns:
        _check_pattern(path, pattern)
    return config | {"lora_alpha": alphas["lora_alpha"], "alpha_pattern": patterns}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_pattern(path: Path, pattern: str) -> None:
    # Escaped characters and classes hold no repeats.
    bare = re.sub(r"\[(?:\\.|[^\]\\])*\]", "x", re.sub(r"\\.", "x", pattern, flags=re.DOTALL), flags=re.DOTALL)
    is_long = len(re.findall(r"[*+{]", bare)) > _MAX_REPEATS or len(pattern) > _MAX_PATTERN
    if is_long or re.search(r"\)\??[*+{]", bare):
        raise AdapterError(
            f"{path}: the pattern {_shown(pattern)} of alpha_pattern could take for ever to match; needed: at most "
            f"{_MAX_REPEATS} repeats, none of a group."
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{path}: {_shown(pattern)} in alpha_pattern is no regular expression: {error}") from error


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], Header]:
    """All tensors as float32, none of them empty, and the header's own part.

    Raises:
        AdapterError: not a safetensors file of floating point matrices, or a pickle.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists() and path.with_suffix(".bin").exists():
        raise AdapterError(
            f"{path.with_suffix('.bin')}: is a pickle, which may run code. Load it in PEFT and save it again: "
            "today's PEFT writes safetensors."
        )
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, (file.metadata() or {}).get(HEADER_KEY, "{}"))
            for name in file.keys():  # noqa: SIM118 - no mapping
                found = file.get_slice(name)
                dtype, shape = found.get_dtype(), found.get_shape()
                if dtype not in _DTYPES or not 1 <= len(shape) <= 4 or 0 in shape or len(name) > _MAX_MODULE:
                    raise AdapterError(
                        f"{path}: tensor {_shown(name)} is {dtype} {shape}; needed: {', '.join(_DTYPES)} of 1 to 4 "
                        f"sizes, none 0, with a name of at most {_MAX_MODULE} characters."
                    )
                tensors[name] = file.get_tensor(name).float()
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"{path}: cannot be read as safetensors: {error}") from error
    return tensors, header


def _header(path: Path, text: str) -> Header:
    try:
        found = json.loads(text)
        metadata = {key: TypedValue(type, value) for key, (type, value) in found.get("metadata", {}).items()}
        provenance, tensors, alpha = found.get("provenance", {}), found.get("tensors", []), found.get("alpha")
        is_known = (
            all(isinstance(typed.type, str) and _is_value(typed.value) for typed in metadata.values())
            and all(isinstance(value, str) for value in provenance.values())
            and all(isinstance(name, str) for name in tensors)
            and (alpha is None or (_is_number(alpha) and math.isfinite(alpha)))
        )
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise AdapterError(f"{path}: its header is not as pyggtrain writes it: {error}") from error
    if not is_known:
        raise AdapterError(f"{path}: its header is not as pyggtrain writes it. Convert the adapter again.")
    return Header(alpha, tuple(tensors), dict(provenance), metadata)


def _is_value(value: object) -> bool:
    """Whether GGUF metadata can hold it: a scalar, or a list of scalars."""
    return all(isinstance(one, str | int | float) for one in (value if isinstance(value, list) else [value]))
