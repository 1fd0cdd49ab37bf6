"""Rows out of tables: CSV with a header line, and Parquet.

A CSV cell is text. Where a row needs a list (`messages`, `conversations`, `tools`), the cell holds it as JSON; an empty
one is no list. In Parquet None counts as not given: it fills every key of a nested struct in every row.
"""

import csv
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from pyggtrain.errors import DataError

# csv's own limit of 128 KiB for a cell would refuse a book; its largest is that of a C long, 32 bits on Windows.
_MAX_CELL_CHARS = (1 << 31) - 1
_LIST_COLUMNS = ("messages", "conversations", "tools")
_PARQUET_ROWS = 256


def csv_rows(file: BufferedReader, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line (of a row's end, from 1) and cells of each row of a CSV file.

    The separator is that of the header line: a comma, or a semicolon or tab if it has no comma.

    Raises:
        DataError: not UTF-8, no header, a row with another number of cells, or a quote that is never closed.
    """
    csv.field_size_limit(_MAX_CELL_CHARS)
    lines = _text_lines(file, name)
    header_line = next(lines, "")
    separator = next((sign for sign in ",;\t" if sign in header_line), ",")
    header = next(csv.reader([header_line], delimiter=separator), [])
    if not header or not all(header) or len(set(header)) < len(header):
        raise DataError(
            f"{name}:1 is no header: {header_line.strip()[:80]!r}. The first line of a CSV file names its columns, for "
            "example prompt,completion."
        )
    if header[0].lstrip().startswith(("{", "[")):
        raise DataError(f"{name}:1 is JSON, but the extension says CSV. Rename the file to .jsonl or .json.")
    # One row at a time is handed out, so that an open quote is told by the line where its row begins.
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        first_line = reader.line_num + 2
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{name}:{first_line}: {error}. Put texts with quotes, separators or line breaks between quotes, and "
                'write a quote inside as "".'
            ) from error
        if not cells:
            continue
        if len(cells) != len(header):
            raise DataError(f"{name}:{first_line} has {len(cells)} cells; the header names {len(header)} columns.")
        yield (
            first_line,
            {
                column: _cell(cell, column, name, first_line)
                for column, cell in zip(header, cells, strict=True)
                if cell or column not in _LIST_COLUMNS
            },
        )


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, a few hundred in memory at a time.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{path.name} is a Parquet file, which needs pyarrow. Install it: pip install 'pyggtrain[parquet]'"
        ) from error
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield without_none(row)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path.name} is a damaged Parquet file: {error}. Download or write it again.") from error


def without_none(value: Any) -> Any:
    """The value without keys that hold None, at any depth: tables of nested structs have every key in every row."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_none(part) for part in value]
    return value


def _text_lines(file: BufferedReader, name: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}:{number} is not UTF-8: byte 0x{line[error.start]:02x}. Save the file as UTF-8, or repair that "
                "line."
            ) from error
        if "\0" in text:
            raise DataError(f"{name}:{number} holds a NUL byte; a CSV file is UTF-8 text. Is the file damaged?")
        yield text


def _cell(cell: str, column: str, name: str, line: int) -> Any:
    if column not in _LIST_COLUMNS:
        return cell
    try:
        return json.loads(cell)
    except ValueError as error:
        raise DataError(f"{name}:{line}: column '{column}' holds no valid JSON: {error}.") from error
