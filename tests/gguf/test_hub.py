"""Names on the Hugging Face hub, with a stand-in for the hub's package: what is asked for, and what comes of it."""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pyggtrain.errors import ConfigError, GGUFError
from pyggtrain.gguf import GGUFFile
from pyggtrain.gguf.hub import local_path


class NotFoundError(Exception):
    """What the hub's package raises."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str | None]]:
    """A hub whose files lie in tmp_path/hub; the requests that were made."""
    requests: list[tuple[str, str, str | None]] = []

    def download(repo_id: str, filename: str, *, revision: str | None = None) -> str:
        requests.append((repo_id, filename, revision))
        path = tmp_path / "hub" / repo_id / filename
        if not path.exists():
            raise NotFoundError("404")
        return str(path)

    errors = types.SimpleNamespace(HfHubHTTPError=NotFoundError)
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=download, errors=errors))
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return requests


def put(tmp_path: Path, name: str, source: Path) -> None:
    path = tmp_path / "hub" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.read_bytes())


def test_a_name_on_the_hub_opens_like_a_path(hub, tmp_path: Path, tiny_llama_path: Path) -> None:
    put(tmp_path, "owner/repo-GGUF/sub/model.gguf", tiny_llama_path)
    for name in ("hf://owner/repo-GGUF/sub/model.gguf", Path("hf://owner/repo-GGUF/sub/model.gguf")):
        assert GGUFFile(name).architecture == "llama"
    assert GGUFFile("hf://owner/repo-GGUF@v1/sub/model.gguf").architecture == "llama"
    assert hub == [
        ("owner/repo-GGUF", "sub/model.gguf", None),
        ("owner/repo-GGUF", "sub/model.gguf", None),
        ("owner/repo-GGUF", "sub/model.gguf", "v1"),
    ]


def test_all_parts_of_a_split_model_are_fetched(hub, tmp_path: Path, tiny_llama_path: Path) -> None:
    for number in (1, 2, 3):
        put(tmp_path, f"o/r/q/m-0000{number}-of-00003.gguf", tiny_llama_path)
    assert local_path("hf://o/r/q/m-00002-of-00003.gguf").name == "m-00002-of-00003.gguf"
    assert [file for _, file, _ in hub] == [f"q/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def test_what_the_hub_lacks_is_named(hub, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"hf://o/r/m.gguf: m.gguf cannot be fetched from the Hugging Face hub: 404"):
        GGUFFile("hf://o/r/m.gguf")


@pytest.mark.parametrize("name", ["hf://", "hf://owner", "hf://owner/repo", "hf://owner/repo/", "hf:///repo/m.gguf"])
def test_half_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="needed hf://owner/repo/file.gguf"):
        local_path(name)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'pyggtrain\[hf\]'"):
        local_path("hf://o/r/m.gguf")


def test_other_paths_stay_as_they_are() -> None:
    assert local_path("hf/x.gguf") == Path("hf/x.gguf") and local_path(Path("/a b/é.gguf")) == Path("/a b/é.gguf")


@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="pip install 'pyggtrain[hf]'")
def test_the_real_package_finds_what_its_cache_holds(tmp_path: Path, tiny_llama_path: Path) -> None:
    commit, folder = "0" * 40, tmp_path / "models--o--r"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    blob, link = folder / "blobs" / "abc", folder / "snapshots" / commit / "m.gguf"
    blob.parent.mkdir()
    link.parent.mkdir(parents=True)
    blob.write_bytes(tiny_llama_path.read_bytes())
    link.symlink_to(blob)
    code = """
from pyggtrain.errors import GGUFError
from pyggtrain.gguf import GGUFFile
print(GGUFFile("hf://o/r/m.gguf").path.name)
try:
    GGUFFile("hf://o/r/other.gguf")
except GGUFError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    name, error = done.stdout.split("\n", 1)
    # The link's own name, by which parts of a split model are found, and not that of the blob.
    assert name == "m.gguf" and "other.gguf cannot be fetched from the Hugging Face hub" in error
