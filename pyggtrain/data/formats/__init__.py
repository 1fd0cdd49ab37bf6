"""Formats of training rows. A new one is a file here and a line in `FORMATS`.

A format is a module with `KEYS` (a row of this format has all of them), `OPTIONAL_KEYS` (also read) and `parse`.
"""

from typing import Any, Protocol

from pyggtrain.data.formats import alpaca, messages, preference, prompt_completion, sharegpt, text
from pyggtrain.data.samples import Sample


class Format(Protocol):
    """What a module in this folder provides."""

    @property
    def KEYS(self) -> tuple[str, ...]: ...  # noqa: N802 - a constant of a module

    @property
    def OPTIONAL_KEYS(self) -> tuple[str, ...]: ...  # noqa: N802

    def parse(self, value: dict[str, Any]) -> Sample: ...


FORMATS: dict[str, Format] = {
    "messages": messages,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "prompt_completion": prompt_completion,
    "preference": preference,
    "text": text,
}


def matching_formats(value: dict[str, Any]) -> list[str]:
    """Names of the formats whose keys a row has; none or several are for the caller to report."""
    return [name for name, format in FORMATS.items() if all(key in value for key in format.KEYS)]
