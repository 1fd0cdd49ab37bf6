"""Plain text: `{"text": "..."}`, learnt as a whole."""

from typing import Any

from pyggtrain.data.samples import BadRowError, Document, text_of

KEYS = ("text",)
OPTIONAL_KEYS = ()


def parse(value: dict[str, Any]) -> Document:
    """Read one row.

    Raises:
        BadRowError: the text is missing or empty.
    """
    text = text_of(value, "text")
    if not text.strip():
        raise BadRowError("'text' is empty")
    return Document(text)
