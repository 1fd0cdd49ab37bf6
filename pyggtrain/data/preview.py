"""One example as text, with what is learnt set off from what is only read: the quickest check of a data set."""

from itertools import groupby

from pyggtrain.data.encode import NOT_LEARNT, Example
from pyggtrain.gguf.tokenizer import Tokenizer

_GREEN, _FAINT, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def preview(example: Example, tokenizer: Tokenizer, *, color: bool, max_chars: int = 1500) -> str:
    """Text of an example, special tokens included.

    Learnt text stands between « and »; with `color` it is green and the rest faint as well. Long passages are cut in
    the middle, and control characters are shown as escapes, so that no data can steer the terminal.

    Args:
        max_chars: most characters shown of any one passage.
    """
    parts = []
    pairs = zip(example.input_ids, example.labels, strict=True)
    for is_learnt, group in groupby(pairs, key=lambda pair: pair[1] != NOT_LEARNT):
        # Joined before decoding: a character may be spread over several tokens.
        text = b"".join(tokenizer.piece(token) for token, _ in group).decode("utf-8", "replace")
        text = _shortened(_visible(text), max_chars)
        if is_learnt:
            text = f"«{text}»"
        parts.append(f"{_GREEN if is_learnt else _FAINT}{text}{_RESET}" if color else text)
    return "".join(parts)


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def _shortened(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
