"""Write GGUF files: adapters, test models, re-quantised copies. Any ggml type, quantised by ggml itself.

Layout and rules: csrc/gguf_file.h. A file is written under a temporary name in its own folder, flushed to disk and
renamed, so that a reader never meets half of one.
"""

import math
import os
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf.file import GGUFFile
from pyggtrain.gguf.quant_tensor import QuantTensor

if TYPE_CHECKING:
    import torch

    from pyggtrain._bridge import MetadataValue

_VERSION = 3
# What readers take, see csrc/gguf_file.cpp.
_MAX_TENSOR_NAME, _MAX_DIMS, _MAX_KEY = 63, 4, (1 << 16) - 1
_ALIGNMENT = 32
_ARRAY = 9
_STRING = 8
# GGUF's value types by the name that gguf_type_name() gives them: (number, struct format).
_TYPES = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "str": (_STRING, ""),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}
# Tensor types that hold indices, not weights: (ggml's number, bytes of one).
_INTEGER_TYPES = {"I8": (24, 1), "I16": (25, 2), "I32": (26, 4), "I64": (27, 8), "F64": (28, 8)}


@dataclass(frozen=True)
class TypedValue:
    """A metadata value with its GGUF type spelled out: ``TypedValue("u64", 7)``, ``TypedValue("arr[str]", [...])``."""

    type: str
    value: "MetadataValue"


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor whose blocks are made only when their turn to be written comes, so that a large file needs little
    memory.

    Attributes:
        produce: returns the blocks, uint8 [..., row_bytes].
    """

    name: str
    type: str
    shape: tuple[int, ...]
    produce: "Callable[[], torch.Tensor]"


WritableTensor: TypeAlias = QuantTensor | DeferredTensor


def quantize_tensor(
    name: str, values: "torch.Tensor", type: str, *, imatrix: "torch.Tensor | None" = None, num_threads: int = 1
) -> QuantTensor:
    """Encode `values` (any float dtype, [..., K]) as `type` with ggml's quantiser.

    Args:
        imatrix: [K] float32 importance of each column; IQ1_S, IQ2_XXS and IQ2_XS need one.

    Raises:
        BridgeError: K is no multiple of the type's block size, values are not finite, or a needed imatrix is missing.
    """
    import torch

    columns = values.shape[-1]
    rows = values.to(torch.float32).reshape(-1, columns).contiguous()
    blocks = torch.empty(rows.shape[0], row_bytes(type, columns), dtype=torch.uint8)
    _bridge.quantize(type, rows, blocks, num_threads, imatrix)
    return QuantTensor(name, type, tuple(values.shape), blocks.reshape(*values.shape[:-1], -1))


def row_bytes(type: str, columns: int) -> int:
    """Bytes of one row of `columns` weights stored as `type`.

    Raises:
        GGUFError: an unknown type, or columns that are no multiple of its block size.
    """
    if type in _INTEGER_TYPES:
        return columns * _INTEGER_TYPES[type][1]
    traits = _bridge.quant_types().get(type)
    if traits is None:
        raise GGUFError(f"Type '{type}' is unknown; needed: one of {', '.join(_bridge.quant_types())}.")
    if columns % traits.block_size:
        raise GGUFError(f"{type} needs rows that are a multiple of {traits.block_size}; found: {columns} columns.")
    return columns // traits.block_size * traits.block_bytes


def typed_metadata(file: GGUFFile) -> dict[str, TypedValue]:
    """All metadata of a file with the types it has there, ready for `write_gguf`.

    Raises:
        GGUFError: it would take memory out of proportion to the file.
    """
    file.metadata.check_all_fit(file.path, file.metadata)
    return {key: TypedValue(file.metadata.value_type(key), file.metadata[key]) for key in file.metadata}


def write_gguf(
    path: str | os.PathLike[str],
    metadata: "Mapping[str, MetadataValue | TypedValue]",
    tensors: Iterable[WritableTensor],
) -> None:
    """Write a GGUF file, replacing `path` only once the new file is complete and on disk.

    Args:
        metadata: plain Python values take the usual GGUF type (bool, int -> u32 or the first of i32, u64, i64 that
            holds it, float -> f32, str, lists of these); `TypedValue` gives it explicitly.
            ``general.alignment`` sets where tensors start: at multiples of 32 bytes without it.
        tensors: in the order in which they shall stand.

    Raises:
        GGUFError: a value, name or shape that GGUF cannot hold, or a name that stands twice.
        OSError: the folder does not exist or is not writable, or the disk is full; `path` is then as it was before.
    """
    path = Path(path)
    listed = list(tensors)
    alignment = _alignment(metadata)
    header = _header(metadata, listed, alignment)
    # Not named after `path`, whose name may have all the bytes that the system allows.
    temporary = path.with_name(f".pyggtrain-{secrets.token_hex(8)}.part")
    try:
        # Follows the umask, as any other new file would, and no link that somebody has put there.
        with temporary.open("xb") as file:
            file.write(header)
            for tensor in listed:
                _write_blocks(file, tensor, alignment)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _alignment(metadata: "Mapping[str, MetadataValue | TypedValue]") -> int:
    """What tensors are aligned to.

    Raises:
        GGUFError: ``general.alignment`` is no u32 that is a power of two from 32 on: llama.cpp aborts on others.
    """
    found = metadata.get("general.alignment", _ALIGNMENT)
    value, type = (found.value, found.type) if isinstance(found, TypedValue) else (found, "u32")
    if type != "u32" or not isinstance(value, int) or value < _ALIGNMENT or value & (value - 1):
        raise GGUFError(
            f"general.alignment is {value!r} of type {type}; needed: a u32 that is a power of two, 32 or more."
        )
    return value


def _header(
    metadata: "Mapping[str, MetadataValue | TypedValue]", tensors: Sequence[WritableTensor], alignment: int
) -> bytes:
    repeated = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    if repeated:
        raise GGUFError(f"Tensors to be written share the names {', '.join(repeated)}; needed: each name once.")
    for tensor in tensors:
        _check_name(tensor.name, "tensor", _MAX_TENSOR_NAME)
        if not 1 <= len(tensor.shape) <= _MAX_DIMS or 0 in tensor.shape:
            raise GGUFError(f"{tensor.name} has shape {list(tensor.shape)}; needed: 1 to {_MAX_DIMS} sizes, none 0.")
    for key in metadata:
        _check_name(key, "metadata key", _MAX_KEY)
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        typed = value if isinstance(value, TypedValue) else TypedValue(_infer_type(key, value), value)
        parts += [_string(key), _value(key, typed)]
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts += [_string(tensor.name), sizes, struct.pack("<IQ", _type_id(tensor), offset)]
        offset += _padded(_num_bytes(tensor), alignment)
    header = b"".join(parts)
    return header.ljust(_padded(len(header), alignment), b"\0")


def _check_name(name: str, what: str, max_bytes: int) -> None:
    if not 1 <= len(name.encode()) <= max_bytes or "\0" in name:
        raise GGUFError(
            f"The {what} {name[:80]!r} cannot be read back; needed: 1 to {max_bytes} bytes, none of them NUL."
        )


def _num_bytes(tensor: WritableTensor) -> int:
    return math.prod(tensor.shape[:-1]) * row_bytes(tensor.type, tensor.shape[-1])


def _type_id(tensor: WritableTensor) -> int:
    type = tensor.type
    return _INTEGER_TYPES[type][0] if type in _INTEGER_TYPES else _bridge.quant_types()[type].id


def _write_blocks(file: BinaryIO, tensor: WritableTensor, alignment: int) -> None:
    blocks = tensor.produce() if isinstance(tensor, DeferredTensor) else tensor.blocks
    num_bytes = _num_bytes(tensor)
    if blocks.numel() != num_bytes:
        raise GGUFError(
            f"{tensor.name} has {blocks.numel()} bytes of blocks; needed: {num_bytes} for {tensor.type} "
            f"{list(tensor.shape)}."
        )
    file.write(blocks.detach().cpu().contiguous().reshape(-1).numpy().data)
    file.write(b"\0" * (_padded(num_bytes, alignment) - num_bytes))


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _infer_type(key: str, value: "MetadataValue") -> str:
    if isinstance(value, list):
        if not value:
            raise GGUFError(f"Metadata '{key}' is an empty list, whose element type is unknown; needed: a TypedValue.")
        types = {_infer_type(key, element) for element in value}
        if types <= {"u32", "i32", "u64", "i64"} and len(types) > 1:
            types = {"i64"}
        if len(types) > 1:
            raise GGUFError(f"Metadata '{key}' mixes {', '.join(sorted(types))}; needed: one type, or a TypedValue.")
        return f"arr[{types.pop()}]"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        fitting = (name for name, low, high in _INTEGERS if low <= value < high)
        if (name := next(fitting, None)) is None:
            raise GGUFError(f"Metadata '{key}' is {value}; needed: an integer of at most 64 bits.")
        return name
    return "f32" if isinstance(value, float) else "str"


_INTEGERS = (("u32", 0, 1 << 32), ("i32", -(1 << 31), 0), ("u64", 0, 1 << 64), ("i64", -(1 << 63), 0))


def _value(key: str, typed: TypedValue) -> bytes:
    is_array = typed.type.startswith("arr[")
    name = typed.type[4:-1] if is_array else typed.type
    if name not in _TYPES:
        raise GGUFError(
            f"Metadata '{key}' has type '{typed.type}'; needed: one of {', '.join(_TYPES)}, or arr[...] of one."
        )
    number, form = _TYPES[name]
    elements = typed.value if isinstance(typed.value, list) else [typed.value]
    try:
        data = b"".join(
            _string(str(element)) if number == _STRING else struct.pack(form, element) for element in elements
        )
    except struct.error as error:
        raise GGUFError(f"Metadata '{key}' cannot be stored as {typed.type}: {error}.") from error
    if is_array:
        return struct.pack("<IIQ", _ARRAY, number, len(elements)) + data
    return struct.pack("<I", number) + data
