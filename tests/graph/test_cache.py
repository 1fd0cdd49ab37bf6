"""What is asked once for each file and build is not asked again, and nothing stale or broken is believed."""

from pathlib import Path

import pytest

from pyggtrain.errors import BridgeError
from pyggtrain.gguf import GGUFFile, typed_metadata, write_gguf
from pyggtrain.graph import cache
from pyggtrain.graph.capture import capture
from pyggtrain.graph.model import ImportedModel
from pyggtrain.graph.verify import verify_once


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGGTRAIN_CACHE_DIR", str(tmp_path / "cache"))


def refuse(*args: object, **kwargs: object) -> bytes:
    raise BridgeError("llama.cpp was asked")


def test_a_graph_is_captured_once(tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile.open(tiny_llama_path)
    first = cache.cached_capture(file, num_ctx=None)
    assert first == capture(tiny_llama_path)
    monkeypatch.setattr(cache, "capture_text", refuse)
    assert cache.cached_capture(file, num_ctx=None) == first
    with pytest.raises(BridgeError, match="was asked"):
        cache.cached_capture(file, num_ctx=512)
    other = tmp_path / "other.gguf"
    write_gguf(other, typed_metadata(file) | {"llama.rope.freq_base": 5000.0}, file.tensors.values())
    with pytest.raises(BridgeError, match="was asked"):
        cache.cached_capture(GGUFFile.open(other), num_ctx=None)


def test_another_build_asks_again(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile.open(tiny_llama_path)
    cache.cached_capture(file, num_ctx=None)
    monkeypatch.setattr(cache, "capture_text", refuse)
    monkeypatch.setattr(cache, "_build", lambda: "other")
    with pytest.raises(BridgeError, match="was asked"):
        cache.cached_capture(file, num_ctx=None)


def test_a_damaged_entry_is_made_again(tiny_llama_path: Path) -> None:
    file = GGUFFile.open(tiny_llama_path)
    first = cache.cached_capture(file, num_ctx=None)
    (entry,) = (cache.cache_folder() / "graphs").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    assert cache.cached_capture(file, num_ctx=None) == first
    assert entry.read_bytes() == whole


def test_a_verification_is_made_once(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile.open(tiny_llama_path)
    model = ImportedModel(file)
    first = verify_once(file, model)
    monkeypatch.setattr("pyggtrain.graph.verify.verify", refuse)
    assert verify_once(file, model) == first
    with pytest.raises(BridgeError, match="was asked"):
        verify_once(file, ImportedModel(file, compute="exact"))


def test_a_folder_that_cannot_be_written_costs_only_time(
    tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYGGTRAIN_CACHE_DIR", str(tmp_path / "file"))
    assert cache.cached_capture(GGUFFile.open(tiny_llama_path), num_ctx=None).is_causal
    assert "cannot keep" in caplog.text
