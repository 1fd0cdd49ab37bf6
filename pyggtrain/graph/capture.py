"""Ask llama.cpp for the compute graph of a file, in a child process.

No weight is read: it takes about half a second, most of it for the vocabulary. The graph is that of training, in which
attention reads the keys and values of the tokens at hand and not a cache, with an adapter of rank 1 on every tensor:
the pairs that turn up in it are those that llama.cpp will apply.

`capture` builds it at several numbers of tokens and of output rows; `ir` finds from them how each size depends on both.
Some models group their tokens in blocks, so that sizes are steps of the number of tokens, and read inputs that only
they have. For these `capture_document` builds the graph of one document of a given length, and takes along what
llama.cpp writes into inputs whose meaning is not known here.

A few models abort llama.cpp where it attends without a cache. Theirs is the graph of serving, with cache and without
flash attention.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggtrain.errors import BridgeError

# (tokens, output rows). Three of tokens for a square, one of rows, and one that only checks the others. llama.cpp
# rounds its context up to 256, and the graph of training needs as many tokens as the context has.
LENGTHS = ((256, 64), (512, 64), (768, 64), (768, 192), (1280, 320))

# A document of `capture_document` is as long as a multiple of this.
DOCUMENT_UNIT = 256

_TIMEOUT_S = 600
_MAX_BYTES = 1 << 29
_MAX_TENSORS = 1 << 18
_NUM_DIMS = 4
_NUM_PARAMS = 16
_MAX_NUMBER = 1 << 62
_ROLES = frozenset({"node", "weight", "lora_a", "lora_b", "input", "unknown_input", "state"})


@dataclass(frozen=True)
class CapturedTensor:
    """One tensor at one length: an operation's result or a leaf.

    Attributes:
        name: of a leaf: the weight that it is (or that the adapter's half belongs to), or what the input means;
            otherwise llama.cpp's.
        op: ggml's name, e.g. "MUL_MAT", "GLU.SWIGLU"; "NONE" for a leaf.
        role: "node", or which kind of leaf: "weight", "lora_a", "lora_b", "input", "unknown_input" or "state".
        type: ggml's name in lower case, e.g. "f32", "q4_K".
        shape: 4 sizes in torch order.
        strides: 4 strides in torch order, in bytes.
        params: 16 int32; a float is the int32 of the same bits.
        sources: positions in the graph, all before this one; -1 where an operation takes none.
        view_parent: whose memory this is; -1: its own.
        view_offset: bytes from the start of that memory.
        value: what llama.cpp wrote into an unknown input of a document (`capture_document`); else nothing.
    """

    name: str
    op: str
    role: str
    type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    params: tuple[int, ...]
    sources: tuple[int, ...]
    view_parent: int
    view_offset: int
    value: bytes = b""


@dataclass(frozen=True)
class Capture:
    """The graph for one number of tokens and output rows; the last tensor holds the logits."""

    num_tokens: int
    num_outputs: int
    tensors: tuple[CapturedTensor, ...]


@dataclass(frozen=True)
class Captures:
    """The graphs of one file.

    Attributes:
        window: tokens that a sliding window spans; counts only where a mask is a window's.
        window_type: "none", "standard", "chunked" or "symmetric".
        is_causal: no token sees a later one.
        is_diffusion: the model fills in masked tokens instead of continuing a text.
        uses_alibi: masks hold distances instead of zeros.
        attn_temperature: (floor, scale, offset) of the factor that queries grow by with their position.
        graphs: one for each of `LENGTHS`.
    """

    window: int
    window_type: str
    is_causal: bool
    is_diffusion: bool
    uses_alibi: bool
    attn_temperature: tuple[float, float, float]
    graphs: tuple[Capture, ...]


class AbortError(BridgeError):
    """llama.cpp aborted while it built a graph."""


def capture(path: Path, *, num_ctx: int | None = None, lengths: Sequence[tuple[int, int]] = LENGTHS) -> Captures:
    """llama.cpp's graphs of a GGUF file; arguments and errors as for `capture_text`."""
    return parsed(path, capture_text(path, num_ctx=num_ctx, lengths=lengths))


def capture_document(path: Path, num_tokens: int, *, num_ctx: int | None = None) -> Captures:
    """llama.cpp's graphs of one document: with 64 output rows, with 192, and with 64 for other tokens.

    Args:
        path, num_ctx: as for `capture_text`.
        num_tokens: a multiple of `DOCUMENT_UNIT`.
    """
    return parsed(path, capture_text(path, num_ctx=num_ctx, num_tokens=num_tokens))


def parsed(path: Path, text: bytes) -> Captures:
    """The graphs in what `capture_text` gave.

    Raises:
        BridgeError: there are none.
    """
    try:
        return read_captures(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise BridgeError(
            f"{path}: the process that builds the graph wrote something else than a graph: {error}"
        ) from error


def capture_text(
    path: Path,
    *,
    num_ctx: int | None = None,
    num_tokens: int | None = None,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> bytes:
    """What the child process writes about a GGUF file; with a cache where llama.cpp aborts without one.

    Args, Raises: as for `_asked`, of which the error is that of the first attempt.
    """
    try:
        return _asked(path, num_ctx=num_ctx, num_tokens=num_tokens, lengths=lengths, with_cache=False)
    except AbortError as aborted:
        if num_tokens is not None:
            raise
        try:
            return _asked(path, num_ctx=num_ctx, num_tokens=None, lengths=lengths, with_cache=True)
        except BridgeError:
            raise aborted from None


def _asked(
    path: Path,
    *,
    num_ctx: int | None,
    num_tokens: int | None,
    lengths: Sequence[tuple[int, int]],
    with_cache: bool,
) -> bytes:
    """What the child process writes about a GGUF file.

    Args:
        path: the file (of a split model: the first one).
        num_ctx: context that will be served with; longrope files choose their factors by it. None: the file's
            `context_length`.
        num_tokens: of one document; None: graphs for any number.
        lengths: (tokens, output rows) of each graph for any number.
        with_cache: attention reads a cache and is written out, as in serving without flash attention.

    Raises:
        BridgeError: llama.cpp refused the file, with its message.
        AbortError: it aborted while it built a graph.
    """
    # Not resolved: the parts of a split model are found by name, and a link's target may have another one.
    if num_tokens is not None:
        lengths = ((num_tokens, 64), (num_tokens, 192), (num_tokens, 64))
    arguments = json.dumps([str(path.absolute()), num_ctx, lengths, num_tokens is not None, with_cache])
    # A neutral folder to work in: `-m` looks there first, and a source folder without the compiled bridge would shadow
    # the package.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    if search_path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            os.path.abspath(entry) for entry in search_path.split(os.pathsep) if entry
        )
    command = [sys.executable, "-m", "pyggtrain.graph.capture_process", arguments]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        try:
            child = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise BridgeError(
                f"{path}: llama.cpp was still building the graph after {_TIMEOUT_S} s, and was stopped."
            ) from None
        complaint = child.stderr.decode(errors="replace").strip()
        if child.returncode < 0:
            raise AbortError(
                f"{path}: llama.cpp aborted while it built the graph (signal {-child.returncode}): "
                f"{_last_lines(complaint)}"
            )
        if child.returncode:
            raise BridgeError(
                _last_lines(complaint)
                or f"{path}: the process that builds the graph ended with code {child.returncode}."
            )
        num_bytes = out.tell()
        if num_bytes > _MAX_BYTES:
            raise BridgeError(f"{path}: the graph takes {num_bytes} bytes as text: needed at most {_MAX_BYTES}.")
        out.seek(0)
        return out.read()


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-4:])


def read_captures(data: dict[str, Any]) -> Captures:
    """What the child process wrote, checked: nothing in it is trusted to be well formed.

    Raises:
        ValueError, TypeError, KeyError: it is not.
    """
    captures = tuple(
        Capture(_count(item["num_tokens"]), _count(item["num_outputs"]), _read_tensors(item["tensors"]))
        for item in data["captures"]
    )
    return Captures(
        window=_count(data["window"]),
        window_type=_text(data["window_type"]),
        is_causal=_flag(data["is_causal"]),
        is_diffusion=_flag(data["is_diffusion"]),
        uses_alibi=_flag(data["uses_alibi"]),
        attn_temperature=_temperature(data["attn_temperature"]),
        graphs=captures,
    )


def _read_tensors(rows: list[list[Any]]) -> tuple[CapturedTensor, ...]:
    if not 0 < len(rows) <= _MAX_TENSORS:
        raise ValueError(f"{len(rows)} tensors: needed 1 to {_MAX_TENSORS}")
    return tuple(_read_tensor(index, row) for index, row in enumerate(rows))


def _read_tensor(index: int, row: list[Any]) -> CapturedTensor:
    name, op, role, type, shape, strides, params, sources, view_parent, view_offset, value = row
    if role not in _ROLES:
        raise ValueError(f"tensor {index} has role {role!r}")
    if any(not -1 <= source < index for source in (*sources, view_parent)):
        raise ValueError(f"tensor {index} reads {sources} and {view_parent}: needed tensors before it")
    return CapturedTensor(
        name=_text(name),
        op=_text(op),
        role=role,
        type=_text(type),
        shape=_numbers(shape, _NUM_DIMS),
        strides=_numbers(strides, _NUM_DIMS),
        params=_numbers(params, _NUM_PARAMS, least=-(1 << 31)),
        sources=_numbers(sources, len(sources), least=-1),
        view_parent=view_parent,
        view_offset=_count(view_offset),
        value=base64.b64decode(value, validate=True),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1 << 10:
        raise ValueError(f"{str(value)[:80]!r}: needed a short text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r}: needed true or false")
    return value


def _temperature(values: Any) -> tuple[float, float, float]:
    floor, scale, offset = (float(value) for value in values)
    return floor, scale, offset


def _count(value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_NUMBER:
        raise ValueError(f"{value!r}: needed a whole number from {least} on")
    return value


def _numbers(values: Any, length: int, least: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"{str(values)[:80]}: needed {length} numbers")
    return tuple(_count(value, least) for value in values)
