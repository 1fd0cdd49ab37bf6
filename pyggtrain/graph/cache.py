"""What llama.cpp was asked about a file, kept on disk: captured graphs and verifications.

Both depend on the file's header and on the code that looked. Keys hold the header's hash and that of the compiled
bridge and the package's own sources that take part, so nothing stale is ever found: a changed line makes new entries.
The folder is `graphs` in pyggtrain's cache folder; it can be deleted at any time.
"""

import hashlib
import json
import logging
import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from pyggtrain import _bridge
from pyggtrain.errors import BridgeError
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.capture import Captures, capture_text, parsed

logger = logging.getLogger(__name__)

# Whose change may change a graph or what is computed with it.
_SOURCES = ("graph", "nn", "ops")

_Value = TypeVar("_Value")


def cache_folder() -> Path:
    """Where the package keeps what it can make again: $PYGGTRAIN_CACHE_DIR, else the user's cache folder."""
    if own := os.environ.get("PYGGTRAIN_CACHE_DIR"):
        return Path(own)
    if sys.platform == "win32":
        return Path(os.environ["LOCALAPPDATA"]) / "pyggtrain"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyggtrain"


@cache
def _build() -> str:
    """Hash of the compiled bridge, llama.cpp in it, and of the sources that take part."""
    assert _bridge.__file__ is not None
    digest = hashlib.sha256(Path(_bridge.__file__).read_bytes())
    root = Path(__file__).parents[1]
    for source in _SOURCES:
        for path in sorted((root / source).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def remembered(
    file: GGUFFile,
    question: str,
    ask: Callable[[], bytes],
    read: Callable[[bytes], _Value],
) -> _Value:
    """The answer to a question about a file, from the cache or asked now.

    Args:
        file: by whose header it is kept.
        question: everything else that the answer depends on.
        ask: the answer as bytes.
        read: makes a value of these bytes; raises ValueError or BridgeError on what is no answer. A kept one is then
            asked for again.
    """
    key = hashlib.sha256(json.dumps([file.header_sha256, _build(), question]).encode()).hexdigest()
    path = cache_folder() / "graphs" / key
    if path.exists():
        try:
            return read(zlib.decompress(path.read_bytes()))
        except (ValueError, BridgeError, zlib.error):
            # Half written, or not ours.
            path.unlink()
    answer = ask()
    value = read(answer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as out:
            out.write(zlib.compress(answer, 1))
        os.replace(out.name, path)
    except OSError as error:
        logger.warning("%s: cannot keep what was found about %s: %s", path.parent, file.path, error)
    return value


def cached_capture(file: GGUFFile, *, num_ctx: int | None, num_tokens: int | None = None) -> Captures:
    """`capture.capture` of a file, or `capture.capture_document` if `num_tokens` is given."""

    return remembered(
        file,
        f"capture {num_ctx} {num_tokens}",
        lambda: capture_text(file.path, num_ctx=num_ctx, num_tokens=num_tokens),
        lambda text: parsed(file.path, text),
    )
