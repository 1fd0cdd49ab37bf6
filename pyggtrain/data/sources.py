"""Files of rows, each with the weight it has in a mix: `chat.jsonl`, `extra.csv:0.5`."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyggtrain.errors import ConfigError


@dataclass(frozen=True)
class WeightedFile:
    """A file of rows.

    Attributes:
        path: where it lies.
        weight: how often an epoch shows its rows: 1 once, 0.5 half of them (always the same ones), 2 each of them
            twice.
    """

    path: Path
    weight: float = 1.0


def weighted_files(sources: Sequence[str]) -> list[WeightedFile]:
    """Read `PATH` or `PATH:WEIGHT`. A file whose own name ends like a weight is taken as the file it is.

    Raises:
        ConfigError: a weight is not above 0, or a file is named twice.
    """
    files = [_weighted_file(source) for source in sources]
    twice = [str(path) for path, count in Counter(file.path for file in files).items() if count > 1]
    if twice:
        raise ConfigError(f"data: {', '.join(twice)} is named twice; name it once, with a weight: {twice[0]}:2")
    return files


def file_names(paths: Sequence[Path]) -> list[str]:
    """What to call files in messages: their names, or their paths where two have the same name."""
    counts = Counter(path.name for path in paths)
    return [path.name if counts[path.name] == 1 else str(path) for path in paths]


def _weighted_file(source: str) -> WeightedFile:
    path, colon, text = source.rpartition(":")
    if not colon or Path(source).exists():
        return WeightedFile(Path(source))
    try:
        weight = float(text)
    except ValueError:
        # A colon that is part of the path.
        return WeightedFile(Path(source))
    if not (weight > 0 and math.isfinite(weight)):
        raise ConfigError(f"data: the weight of {path} is {text}; needed: a number above 0, like 0.5 or 2")
    return WeightedFile(Path(path), weight)
