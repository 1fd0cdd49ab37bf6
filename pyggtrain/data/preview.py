"""Examples as text, with what is learnt set off from what is only read: the quickest check of a data set."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from pyggtrain.data.examples import NOT_LEARNT, Example
from pyggtrain.data.row_encoder import RowEncoder, TooLongError
from pyggtrain.data.rows import Row
from pyggtrain.data.samples import BadRowError
from pyggtrain.gguf.tokenizer import Tokenizer

_LEARNT, _CONTEXT, _DROPPED = "learnt", "context", "dropped"
_COLORS = {_LEARNT: "\x1b[32m", _CONTEXT: "\x1b[2m", _DROPPED: "\x1b[31;9m"}
_MARKS = {_LEARNT: "«{}»", _CONTEXT: "{}", _DROPPED: "[-{}-]"}
_RESET = "\x1b[0m"
_PERCENTILES = (5, 25, 50, 75, 90, 95, 99, 100)


def preview(
    example: Example,
    tokenizer: Tokenizer,
    *,
    color: bool,
    max_chars: int = 1500,
    num_kept: int | None = None,
    show_tokens: bool = False,
) -> str:
    """Text of an example, special tokens included.

    Learnt text stands between « and », dropped text between [- and -]; with `color` learnt text is green, dropped text
    red and struck through, and the rest faint as well. Long passages are cut in the middle, and control characters are
    shown as escapes, so that no data can steer the terminal.

    Args:
        max_chars: most characters shown of any one passage.
        num_kept: tokens that are trained on; those behind them are dropped. All by default.
        show_tokens: put `|` between the tokens of a passage.
    """
    num_kept = example.num_tokens if num_kept is None else num_kept
    kinds = [
        _DROPPED if place >= num_kept else _CONTEXT if label == NOT_LEARNT else _LEARNT
        for place, label in enumerate(example.labels)
    ]
    parts = []
    for kind, group in groupby(zip(kinds, example.input_ids, strict=True), key=lambda pair: pair[0]):
        pieces = [tokenizer.piece(token) for _, token in group]
        # Joined before decoding: a character may be spread over several tokens.
        text = (b"|" if show_tokens else b"").join(pieces).decode("utf-8", "replace")
        text = _MARKS[kind].format(_shortened(_visible(text), max_chars))
        parts.append(f"{_COLORS[kind]}{text}{_RESET}" if color else text)
    return "".join(parts)


def preview_row(
    row: Row, format: str, encoder: RowEncoder, tokenizer: Tokenizer, *, color: bool, show_tokens: bool = False
) -> str:
    """One row with what becomes of it: its text, or why it cannot be used; what the length policy takes away is shown
    as dropped."""
    try:
        whole = encoder.whole(row, format)
    except BadRowError as error:
        return f"{row.source}: cannot be used: {error}"
    note, max_tokens = "", encoder.settings.max_length
    try:
        encoder.encode(row, format)
    except (BadRowError, TooLongError) as error:
        note, max_tokens = f", dropped: {error}", 0
    parts = []
    for name, example in zip(("chosen", "rejected") if len(whole) > 1 else ("",), whole, strict=True):
        is_split = encoder.settings.too_long == "split" and format == "text"
        num_kept = example.num_tokens if is_split and max_tokens else min(max_tokens, example.num_tokens)
        num_dropped = example.num_tokens - num_kept
        counts = f"{example.num_tokens} tokens, {example.num_learnt} learnt, {num_dropped} dropped{note}"
        parts.append(f"{row.source} {name}".strip() + f": {counts}")
        parts.append(preview(example, tokenizer, color=color, num_kept=num_kept, show_tokens=show_tokens))
    return "\n".join(parts)


def length_table(lengths: Sequence[int], limit: int) -> list[str]:
    """Percentiles of tokens per row, and how many rows are longer than the limit."""
    tokens = np.asarray(lengths)
    found = np.percentile(tokens, _PERCENTILES, method="higher")
    names = [f"{share} %" for share in _PERCENTILES[:-1]] + ["longest"]
    width = [max(len(name), len(str(length))) for name, length in zip(names, found, strict=True)]
    num_longer = int((tokens > limit).sum())
    return [
        "tokens per row, up to",
        "  ".join(name.rjust(size) for name, size in zip(names, width, strict=True)),
        "  ".join(str(length).rjust(size) for length, size in zip(found, width, strict=True)),
        f"{num_longer} of {len(tokens)} rows ({100 * num_longer / len(tokens):.1f} %) are longer than {limit}",
    ]


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def _shortened(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
