"""Rows of training data, read one after another from JSONL, a JSON array, CSV, Parquet, plain text, or any iterable of
dicts.

A file is read in binary and only LF ends a line: text mode differs between systems, and `str.splitlines` cuts a string
at U+2028. What form a file has is read from its first bytes, since an extension is a guess: `[` begins a JSON array,
`{` JSONL, `PAR1` Parquet; only plain text and CSV are told by their names. At most one row (of Parquet a few hundred)
is held in memory, so a file may be larger than the machine; one row may be as large as memory allows.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

from pyggtrain.data.tables import csv_rows, parquet_rows, without_none
from pyggtrain.errors import DataError

DataSource: TypeAlias = str | os.PathLike[str] | Iterable[Mapping[str, Any]]

_BLANK = b" \t\r\n"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_STARTS = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"[\0", b"\0{", b"\0[")
_BINARY_STARTS = {b"\x1f\x8b": "a gzip archive", b"PK\x03\x04": "a zip archive"}
_PARQUET_START = b"PAR1"
_CHUNK_BYTES = 1 << 20
# The only bytes that matter for finding the end of an element of an array; strings are skipped as a whole.
_STRUCTURE = re.compile(rb'["{}\[\],\n]')
_IN_STRING = re.compile(rb'["\\\n]')
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """One row as it stands in the file.

    Attributes:
        value: the JSON object; a plain text file gives `{"text": ...}`.
        source: where it stands, for messages: `chat.jsonl:12` (line, from 1), or `row 12` (from 1) of an iterable.
    """

    value: dict[str, Any]
    source: str


def read_rows(source: DataSource, *, name: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file, or of an iterable of dicts such as a Hugging Face dataset.

    Args:
        source: a path to JSONL or a JSON array, in UTF-8 with or without BOM and with LF or CRLF; to a CSV file with a
            header (`.csv`, `.tsv`); to Parquet; a path that ends in `.txt`, which is one document with its line ends
            read as LF; or an iterable of mappings.
        name: what to call the file in messages; its own name by default.

    Raises:
        DataError: the file is missing, empty, not UTF-8, or not JSON; the message names file and line. Damage stops the
            reading, since behind it rows cannot be told apart; what a sound row holds is judged elsewhere.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        yield from _read_file(path, name or path.name)
        return
    # A Hugging Face dataset is a table, and fills every key of a nested struct in every row.
    is_table = hasattr(source, "features")
    for number, value in enumerate(source, start=1):
        if not isinstance(value, Mapping):
            raise DataError(f"row {number} is of type {type(value).__name__}; each row must be a dict.")
        yield Row(without_none(dict(value)) if is_table else dict(value), f"row {number}")


def _read_file(path: Path, name: str) -> Iterator[Row]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Check the path of the training data.") from error
    with file:
        start = file.peek(_CHUNK_BYTES)
        if start.startswith(_PARQUET_START):
            for number, value in enumerate(parquet_rows(path), start=1):
                yield Row(value, f"{name}:{number}")
            return
        for magic, kind in _BINARY_STARTS.items():
            if start.startswith(magic):
                raise DataError(
                    f"{name} is {kind}; training data is JSONL, JSON, CSV, Parquet or .txt. Unpack it first."
                )
        if start.startswith(_UTF16_STARTS):
            raise DataError(f"{name}:1 is UTF-16; training data must be UTF-8. Save the file as UTF-8.")
        if start.startswith(_UTF8_BOM):
            file.read(len(_UTF8_BOM))
        if path.suffix.lower() == ".txt":
            yield _text_document(file, name)
            return
        if path.suffix.lower() in (".csv", ".tsv"):
            for number, value in csv_rows(file, name):
                yield Row(value, f"{name}:{number}")
            return
        line, first = _first_nonblank(file)
        if first == b"":
            raise DataError(f"{name} is empty; it needs at least one row.")
        if first == b"[":
            yield from _json_array(file, name, line)
        elif first == b"{":
            yield from _json_lines(file, name, line)
        else:
            raise DataError(
                f"{name}:{line} begins with {_shown(first)}; JSONL begins with {{ and a JSON array with [. "
                "Give plain text the extension .txt and tables .csv, or write one JSON object per line."
            )


def _first_nonblank(file: BufferedReader) -> tuple[int, bytes]:
    """Skip blanks; return the line number and the first other byte, which stays unread (b"" at the end of the file)."""
    line = 1
    while (byte := file.peek(1)[:1]) and byte in _BLANK:
        file.read(1)
        line += byte == b"\n"
    return line, byte


def _text_document(file: BufferedReader, name: str) -> Row:
    data = file.read().replace(b"\r\n", b"\n")
    if b"\0" in data:
        raise DataError(
            f"{name} holds NUL bytes; training data must be UTF-8 text. Is the file UTF-16, or no text at all?"
        )
    text = _decode(data, name, 1)
    if not text.strip():
        raise DataError(f"{name} is empty; it needs at least one row.")
    first_line = text.lstrip().partition("\n")[0]
    if first_line.startswith("{"):
        try:
            json.loads(first_line)
        except ValueError:
            pass  # a text may begin with a brace; only JSON that is whole speaks against plain text
        else:
            raise DataError(
                f"{name}:1 is a JSON object, but the extension says plain text. Rename the file to .jsonl to "
                "train on its rows."
            )
    return Row({"text": text}, f"{name}:1")


def _json_lines(file: BufferedReader, name: str, first_line: int) -> Iterator[Row]:
    for number, line in enumerate(file, start=first_line):
        # Without its line end, so that positions in JSON errors lie on this line.
        line = line.strip(_BLANK)
        if line:
            yield Row(_object(line, name, number), f"{name}:{number}")


def _json_array(file: BufferedReader, name: str, first_line: int) -> Iterator[Row]:
    for line, element in _array_elements(file, name, first_line):
        data = element.lstrip(_BLANK)
        line += element.count(b"\n", 0, len(element) - len(data))
        yield Row(_object(data.rstrip(_BLANK), name, line), f"{name}:{line}")


def _array_elements(file: BufferedReader, name: str, line: int) -> Iterator[tuple[int, bytes]]:
    """Cut a JSON array into its elements by counting brackets outside strings; yields line and bytes of each."""
    first_line = start_line = line
    # The array's own bracket has yet to be read.
    depth = 0
    in_string = skip_next = False
    num_commas = 0
    pending = bytearray()
    while chunk := file.read(_CHUNK_BYTES):
        taken = position = 0
        if skip_next:
            position, skip_next = 1, False
        while match := (_IN_STRING if in_string else _STRUCTURE).search(chunk, position):
            byte, position = match[0], match.end()
            if byte == b"\n":
                if in_string:
                    raise DataError(
                        f"{name}:{line}: a string is not closed on its line. Write line breaks in texts as \\n."
                    )
                line += 1
            elif byte == b'"':
                in_string = not in_string
            elif byte == b"\\":
                # The escaped byte may be a quote, and it may be in the next chunk.
                skip_next = position == len(chunk)
                position += 1
            elif byte in b"{[":
                depth += 1
                if depth == 1:
                    taken = position
            elif depth == 1 and byte in b",]":
                element = bytes(pending + chunk[taken : match.start()])
                if element.strip(_BLANK):
                    yield start_line, element
                elif byte == b"," or num_commas > 0:
                    raise DataError(
                        f"{name}:{line}: a comma of the JSON array has no row beside it. Remove that comma."
                    )
                pending.clear()
                taken, start_line = position, line
                num_commas += 1
                if byte == b"]":
                    rest = (chunk[position:] + file.read(_CHUNK_BYTES)).strip(_BLANK)
                    if rest:
                        raise DataError(
                            f"{name}:{line}: text follows the end of the JSON array: {_shown(rest[:20])}. A file holds "
                            "one array, or one object per line."
                        )
                    return
            elif byte in b"}]":
                depth -= 1
        pending += chunk[taken:]
    raise DataError(f"{name}: the JSON array that begins in line {first_line} has no closing ]. Is the file cut off?")


def _object(data: bytes, name: str, line: int) -> dict[str, Any]:
    """Parse one row; `line` is where `data` begins."""
    text = _decode(data, name, line)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise DataError(
            f"{name}:{line}: the JSON is nested too deeply. A row is an object of texts and short lists."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(_json_message(error, text, name, line)) from error
    except ValueError as error:
        # Python refuses integers of thousands of digits.
        raise DataError(f"{name}:{line}: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{name}:{line} is of type {type(value).__name__}; each row must be a JSON object {{...}}.")
    if _SURROGATE_ESCAPE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name}:{line} holds half of a surrogate pair ({error.object[error.start]!a}), which is no character. "
                "Write the character itself or both halves."
            ) from error
    return value


def _json_message(error: json.JSONDecodeError, text: str, name: str, line: int) -> str:
    where = f"{name}:{line + error.lineno - 1}, column {error.colno}"
    if error.msg == "Extra data":
        return f"{where}: a second value begins here. Put one JSON object on each line."
    if error.pos >= len(text):
        return (
            f"{where}: the JSON object does not end on its line. Is it pretty-printed, or the file cut off? Put each "
            "object on one line, or all objects between [ and ] with commas."
        )
    if "\0" in text:
        return f"{where}: a NUL byte; training data must be UTF-8. Is the file UTF-16, or damaged?"
    found = _shown(text[error.pos : error.pos + 20].encode())
    return f"{where}: {error.msg} (found {found}). Each row must be valid JSON."


def _decode(data: bytes, name: str, line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(
            f"{name}:{line} is not UTF-8: byte 0x{data[error.start]:02x}. Save the file as UTF-8, or repair that line."
        ) from error


def _shown(data: bytes) -> str:
    """Bytes for a message: quoted, with what a terminal could obey escaped."""
    return ascii(data.decode("utf-8", errors="replace"))
