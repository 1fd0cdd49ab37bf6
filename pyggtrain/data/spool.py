"""Rows given from Python, such as a Hugging Face dataset, written to a file: then everything that holds for files holds
for them as well. They may be more than memory holds, are encoded by all cores and once, and a run can be resumed and
repeated from the command line.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyggtrain.cache_folder import cache_folder
from pyggtrain.data.rows import read_rows
from pyggtrain.errors import DataError


def holds_rows(data: object) -> bool:
    """Whether data is rows and not paths of files, alone, in a list, or with weights."""
    if data is None or isinstance(data, str | os.PathLike | Mapping):
        return False
    if isinstance(data, list | tuple):
        return any(isinstance(part, Mapping) for part in data)
    return isinstance(data, Iterable)


def spool(rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSONL into the cache folder, under a name made of their contents; return the path.

    Raises:
        DataError: a row is no dict or holds something else than text, numbers, lists and dicts (an image, for
            example), or the file cannot be written.
    """
    folder = cache_folder() / "rows"
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    digest = hashlib.sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for row in read_rows(rows):
                try:
                    line = json.dumps(row.value, ensure_ascii=False).encode() + b"\n"
                except (TypeError, ValueError) as error:
                    # UnicodeEncodeError, half a surrogate pair, is a ValueError.
                    raise DataError(f"{row.source} cannot be written as JSON: {error}. Rows are texts only.") from error
                digest.update(line)
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"rows-{digest.hexdigest()[:16]}.jsonl"
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{folder}: the rows cannot be written: {error.strerror or error}. Free space there, or let the "
            "environment variable PYGGTRAIN_CACHE_DIR name another folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
