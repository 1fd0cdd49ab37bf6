"""Encoded rows are kept in the cache folder, so that equal rows are encoded once.

The key is a hash of everything that decides the result: the contents of the files, the model file's header (its
tokenizer and template), another template if one is given, the settings, and the code of this package. So nothing here
is ever out of date, and all of it may be deleted at any time, even while a run uses it.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pyggtrain.cache_folder import cache_folder
from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.encode import encode_into
from pyggtrain.data.row_encoder import RowEncoder
from pyggtrain.data.settings import DataSettings
from pyggtrain.data.sources import file_names
from pyggtrain.data.store import ExampleStore, StoreWriter
from pyggtrain.errors import DataError
from pyggtrain.gguf.tokenizer import Tokenizer

# Files below this size are encoded in less time than processes take to start.
_PARALLEL_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def cached_examples(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    settings: DataSettings,
    *,
    chat_template: ChatTemplate | None = None,
    as_pairs: bool = False,
    num_workers: int = 1,
) -> ExampleStore:
    """Encode files of rows, or find them encoded.

    Args:
        as_pairs: rows are preferences; the store holds two examples of each.
        num_workers: processes that encode a large set.

    Raises:
        DataError: as `load_examples`, or the cache folder cannot be written.
    """
    names = file_names(paths)
    folder = cache_folder() / "data"
    target = folder / _key(paths, names, tokenizer, settings, chat_template, as_pairs=as_pairs)
    if target.is_dir():
        try:
            return ExampleStore(target)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is damaged (%s); the rows are encoded again", target, error)
            shutil.rmtree(target)
    size = sum(path.stat().st_size for path in paths)
    encoder = RowEncoder(tokenizer, settings, chat_template, as_pairs=as_pairs)
    try:
        writer = StoreWriter(folder / f".{secrets.token_hex(8)}.tmp", names)
        try:
            report = encode_into(writer.add, paths, encoder, num_workers=num_workers if size >= _PARALLEL_BYTES else 1)
            writer.finish(report, target)
        finally:
            writer.discard()
    except OSError as error:
        raise DataError(
            f"{folder}: the encoded rows cannot be written: {error.strerror or error}. Free space there, or let the "
            "environment variable PYGGTRAIN_CACHE_DIR name another folder."
        ) from error
    return ExampleStore(target)


def _key(
    paths: Sequence[Path],
    names: Sequence[str],
    tokenizer: Tokenizer,
    settings: DataSettings,
    chat_template: ChatTemplate | None,
    *,
    as_pairs: bool,
) -> str:
    parts: dict[str, Any] = {
        "code": _code_sha256(),
        "model": tokenizer.header_sha256,
        "files": [(name, _sha256(path)) for name, path in zip(names, paths, strict=True)],
        "settings": asdict(settings),
        "template": chat_template.identity if chat_template is not None else None,
        "as_pairs": as_pairs,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Check the path of the training data.") from error
    return digest.hexdigest()


@cache
def _code_sha256() -> str:
    """Of this package's source: another way to encode makes other rows."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py"), key=os.fspath):
        digest.update(path.read_bytes())
    return digest.hexdigest()
