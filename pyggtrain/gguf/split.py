"""Models split over several files by llama.cpp's gguf-split: find the parts of one, and refuse what is no whole model.

Part i of n is named ``<name>-<i>-of-<n>.gguf`` with five digits each, i from 1. Its metadata says ``split.no`` (from
0), ``split.count`` and ``split.tensors.count`` (of all parts). llama.cpp opens only the first part and finds the
others by name; pyggtrain takes any.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyggtrain.errors import GGUFError

if TYPE_CHECKING:
    from pyggtrain._bridge import MappedGGUF

_PART_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# llama.cpp stores the count as u16; a hostile name may not make us look for more files than this.
_MAX_PARTS = 9999


def is_part_name(path: Path) -> bool:
    """Whether a file of this name is taken for one part of a split model."""
    return _PART_NAME.fullmatch(path.name) is not None


def part_names(name: str) -> list[str]:
    """The names of all parts, in order, of the model that a file `name` is a part of; none if it is no part.

    Raises:
        GGUFError: the name counts wrongly.
    """
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return []
    count, number = int(match["count"]), int(match["number"])
    if not (1 <= number <= count <= _MAX_PARTS):
        raise GGUFError(
            f"{name}: is named part {number} of {count}; needed: part 1 to {count} of at most {_MAX_PARTS}."
        )
    return [f"{match['name']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """All parts of the model that `path` is a part of, in order; just `path` for a model in one file.

    Raises:
        GGUFError: a part is missing, or the name counts wrongly.
    """
    names = part_names(path.name)
    if not names:
        return [path]
    count = len(names)
    paths = [path.with_name(name) for name in names]
    missing = [part.name for part in paths if not part.exists()]
    if path.exists() and missing:
        raise GGUFError(
            f"{path}: is one of {count} parts, but {len(missing)} of them are not beside it: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}. Put all parts into one folder under their original names."
        )
    return paths if not missing else [path]


def check_parts(parts: "Sequence[MappedGGUF]") -> None:
    """Refuse parts that do not make one whole model.

    Raises:
        GGUFError: a part says it is another one or of another number of parts, the tensors do not add up, or a file
            holds the bytes of several parts joined end to end.
    """
    for number, part in enumerate(parts):
        count, found = _integer(part, "split.count", 1), _integer(part, "split.no", 0)
        if count > 1 and len(parts) == 1:
            raise GGUFError(
                f"{part.path}: is part {found + 1} of {count} of a split model, under a name that does not say so. "
                f"Give the parts their "
                f"original names (<name>-00001-of-{count:05d}.gguf, ...). Parts that were joined with `cat` are no "
                f"GGUF file: download "
                "them again, or merge them with llama.cpp's `llama-gguf-split --merge`."
            )
        if len(parts) > 1 and (count, found) != (len(parts), number):
            raise GGUFError(
                f"{part.path}: says it is part {found + 1} of {count}; needed: part {number + 1} of {len(parts)}, as "
                f"its name says. "
                "It was renamed or belongs to another model."
            )
    if len(parts) > 1:
        total, expected = sum(len(part.tensors) for part in parts), _integer(parts[0], "split.tensors.count", 0)
        if total != expected:
            raise GGUFError(
                f"{parts[0].path}: the {len(parts)} parts hold {total} tensors; the first part says {expected}. One "
                f"part is of another model."
            )


def _integer(part: "MappedGGUF", key: str, default: int) -> int:
    if key not in part.keys():  # noqa: SIM118 - the bridge's object is no mapping
        return default
    value = part.value(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise GGUFError(f"{part.path}: metadata key '{key}' is of type {part.value_type(key)}; needed: an integer.")
    return value
