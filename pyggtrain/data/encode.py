"""From rows to examples, and a report of everything that happened on the way.

No example is ever padded: a micro-batch lays its examples one after another.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.examples import NOT_LEARNT, Example, ExamplePair
from pyggtrain.data.formats import FORMATS, matching_formats
from pyggtrain.data.parallel import encoded_chunks
from pyggtrain.data.report import EncodeReport, RowCounts, listed
from pyggtrain.data.row_encoder import RowEncoder
from pyggtrain.data.rows import DataSource, Row, read_rows
from pyggtrain.data.settings import DataSettings
from pyggtrain.data.sources import file_names
from pyggtrain.errors import DataError
from pyggtrain.gguf.tokenizer import Tokenizer

__all__ = [
    "NOT_LEARNT",
    "DataSettings",
    "EncodeReport",
    "Example",
    "ExamplePair",
    "encode_into",
    "load_examples",
    "load_pairs",
    "rows_with_format",
]

_CHUNK_ROWS = 128


def load_examples(
    source: DataSource | Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    settings: DataSettings,
    *,
    chat_template: ChatTemplate | None = None,
) -> tuple[list[Example], EncodeReport]:
    """Read a file, several files, or an iterable of dicts, and make examples of their rows, in order.

    Args:
        source: each file may have its own format; all rows of one file have the same.
        chat_template: instead of the one in the model's file; used for conversations only.

    Raises:
        DataError: a file or row cannot be used, rows are too long, or nothing is left to learn. All rows concerned are
            named.
    """
    examples: list[Example] = []
    report = encode_into(examples.append, source, RowEncoder(tokenizer, settings, chat_template))
    return examples, report


def load_pairs(
    source: DataSource | Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    settings: DataSettings,
    *,
    chat_template: ChatTemplate | None = None,
) -> tuple[list[ExamplePair], EncodeReport]:
    """Read rows of preferences (`chosen`, `rejected`), in order; otherwise as `load_examples`."""
    examples: list[Example] = []
    report = encode_into(examples.append, source, RowEncoder(tokenizer, settings, chat_template, as_pairs=True))
    return [ExamplePair(*pair) for pair in zip(examples[::2], examples[1::2], strict=True)], report


def encode_into(
    keep: Callable[[Example], None],
    source: DataSource | Sequence[str | os.PathLike[str]],
    encoder: RowEncoder,
    *,
    num_workers: int = 1,
) -> EncodeReport:
    """Encode all rows of a source and hand each example to `keep`, in order.

    At most a few hundred rows are held in memory at a time.

    Args:
        num_workers: processes that encode; 1 encodes in this one.

    Raises:
        DataError: as `load_examples`; at the end, so that all rows concerned are named.
    """
    settings = encoder.settings
    counts, tally = RowCounts(), _Tally()
    for examples, chunk_counts in encoded_chunks(_chunks(source, settings.format), encoder, num_workers=num_workers):
        counts.add(chunk_counts)
        for example in examples:
            tally.add(example)
            keep(example)
    if counts.num_bad and settings.bad_rows == "stop":
        advice = "Repair them, or set bad_rows to 'skip' to leave them out."
        raise _refused(counts.bad, counts.num_bad, counts.num_rows, "cannot be used", advice)
    if counts.num_too_long and settings.too_long != "drop":
        advice = "Raise max_length, or set too_long to 'drop' or 'truncate'"
        advice += ", or to 'split' to cut documents into pieces." if "text" in counts.num_rows_of else "."
        problem = f"are longer than {settings.max_length} tokens"
        raise _refused(counts.too_long, counts.num_too_long, counts.num_rows, problem, advice)
    report = EncodeReport(
        max_length=settings.max_length,
        num_rows=counts.num_rows,
        num_rows_of=dict(counts.num_rows_of),
        num_examples=len(tally.lengths),
        dropped=counts.bad + counts.too_long,
        num_dropped=counts.num_bad + counts.num_too_long,
        num_tokens=sum(tally.lengths),
        num_learnt=tally.num_learnt,
        lengths=tally.percentiles(),
        num_truncated=counts.num_truncated,
        num_splits=counts.num_splits,
        warnings=counts.warning_lines(),
        sha256=tally.digest.hexdigest(),
    )
    if not report.num_examples:
        found = "no rows were found" if not report.num_rows else f"all {report.num_rows} rows were dropped"
        lines = [f"Nothing is left to train on: {found}.", *listed(report.dropped, report.num_dropped)]
        raise DataError("\n".join(lines))
    return report


def rows_with_format(
    source: DataSource | Sequence[str | os.PathLike[str]], format: str | None
) -> Iterator[tuple[Row, str]]:
    """All rows, each with the name of its file's format: the one that is set, or that of the file's first row."""
    if isinstance(source, Sequence) and not isinstance(source, str):
        paths = [Path(part) for part in source if isinstance(part, (str, os.PathLike))]
        if source and len(paths) == len(source):
            for path, name in zip(paths, file_names(paths), strict=True):
                yield from _with_format(read_rows(path, name=name), format)
            return
    yield from _with_format(read_rows(source), format)  # type: ignore[arg-type]


def _with_format(rows: Iterator[Row], format: str | None) -> Iterator[tuple[Row, str]]:
    for row in rows:
        format = format or _detect_format(row)
        yield row, format


class _Tally:
    """Adds up examples as they pass.

    Attributes:
        lengths: tokens of each.
        num_learnt: tokens with a label, of all.
        digest: SHA-256 of ids and labels in order.
    """

    def __init__(self) -> None:
        self.lengths = array("q")
        self.num_learnt = 0
        self.digest = hashlib.sha256()

    def add(self, example: Example) -> None:
        self.lengths.append(example.num_tokens)
        self.num_learnt += example.num_learnt
        self.digest.update(example.num_tokens.to_bytes(8, "little"))
        self.digest.update(example.input_ids)
        self.digest.update(example.labels)

    def percentiles(self) -> tuple[int, int, int, int]:
        """Median, 90 %, 99 % and longest; zeros where there is nothing."""
        ordered = np.sort(np.asarray(self.lengths if self.lengths else [0]))
        median, most, nearly_all, longest = (
            int(ordered[int(share * (len(ordered) - 1))]) for share in (0.5, 0.9, 0.99, 1)
        )
        return median, most, nearly_all, longest


def _chunks(
    source: DataSource | Sequence[str | os.PathLike[str]], format: str | None
) -> Iterator[list[tuple[Row, str]]]:
    chunk = []
    for row in rows_with_format(source, format):
        chunk.append(row)
        if len(chunk) == _CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _detect_format(row: Row) -> str:
    found = matching_formats(row.value)
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{row.source} fits several formats: {', '.join(found)}. Set format to one of them.")
    near = [
        match
        for key in row.value
        for match in get_close_matches(key, [k for f in FORMATS.values() for k in f.KEYS], n=1)
    ]
    hint = f" Did you mean {near[0]}?" if near else ""
    forms = "; ".join(f"{name} ({', '.join(format.KEYS)})" for name, format in FORMATS.items())
    raise DataError(
        f"{row.source} has the keys {', '.join(row.value) or 'none'}, which fit no format.{hint} Known: {forms}."
    )


def _refused(rows: list[tuple[str, str]], num: int, num_rows: int, problem: str, advice: str) -> DataError:
    return DataError("\n".join([f"{num} of {num_rows} rows {problem}:", *listed(rows, num), advice]))
