"""Files named by their place on the Hugging Face hub: ``hf://owner/repo/folder/model.gguf``.

The spelling is that of huggingface_hub's own file system; ``hf://owner/repo@revision/...`` names a branch, tag or
commit. The hub's package downloads into its own cache and is needed only for such names (extra ``hf``).
"""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from pyggtrain.errors import ConfigError, GGUFError
from pyggtrain.gguf.split import part_names

# Path("hf://a") drops one of the two slashes.
_HUB_NAME = re.compile(r"hf:/{1,2}(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Where a file lies on this machine: the path itself, or where huggingface_hub keeps the file that it names.

    All parts of a split model are fetched, whichever is named.

    Raises:
        ConfigError: the name lacks a part, or huggingface_hub is not installed.
        GGUFError: the hub does not have the file, or cannot be reached and the file is not in the cache.
    """
    text = os.fspath(path)
    if text.encode("utf-8", "replace").decode() != text:
        raise GGUFError(f"{text!a}: the file's name is not valid UTF-8, which llama.cpp needs. Rename it.")
    if not text.startswith("hf:/"):
        return Path(text)
    match = _HUB_NAME.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text}: needed hf://owner/repo/file.gguf, or hf://owner/repo@revision/file.gguf.")
    folder, _, name = match["file"].rpartition("/")
    hub = _hub()
    places = {}
    for part in part_names(name) or [name]:
        filename = f"{folder}/{part}" if folder else part
        try:
            places[part] = Path(hub.hf_hub_download(match["repo"], filename, revision=match["revision"]))
        # Besides the hub's own answers: no network, no room in the cache, a name that it does not allow.
        except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
            raise GGUFError(f"{text}: {part} cannot be fetched from the Hugging Face hub: {error}") from error
    return places[name]


def _hub() -> Any:
    try:
        hub = import_module("huggingface_hub")
        import_module("huggingface_hub.errors")
    except ImportError as error:
        raise ConfigError(
            "Names that begin with hf:// need the package huggingface_hub: pip install 'pyggtrain[hf]'. Or download "
            "the file and give its path."
        ) from error
    return hub
