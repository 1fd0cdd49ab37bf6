"""Every command in docs/gguf.md does what the page says."""

import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch

from pyggtrain.cli import main
from pyggtrain.gguf import GGUFFile, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.gguf.requantize import requantize

PAGE = Path(__file__).parents[2] / "docs" / "gguf.md"
COMMANDS = re.findall(r"^ {4,6}pyggtrain (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.fixture
def folder(tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page speaks of, small ones."""
    model = GGUFFile(tiny_llama_path)
    requantize(model, tmp_path / "model-f16.gguf", "F16")
    requantize(model, tmp_path / "model.gguf", "Q8_0")
    tensors = list(model.tensors.values())
    for number in range(3):
        keys = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        metadata = {**typed_metadata(model), **keys} if number == 0 else keys
        write_gguf(tmp_path / f"model-0000{number + 1}-of-00003.gguf", metadata, tensors[number::3])
    sums = [quantize_tensor(f"{t.name}.in_sum2", torch.ones(1, t.shape[-1]), "F32") for t in tensors]
    counts = [quantize_tensor(f"{t.name}.counts", torch.ones(1, 1), "F32") for t in tensors]
    write_gguf(tmp_path / "imatrix.gguf", {"general.type": "imatrix"}, [*sums, *counts])
    errors = types.SimpleNamespace(HfHubHTTPError=RuntimeError)
    hub = types.SimpleNamespace(hf_hub_download=lambda repo, name, revision: str(tmp_path / name), errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 9


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(command)
    assert main(arguments) == 0
    assert capsys.readouterr().out
    if arguments[0] == "quantize":
        assert GGUFFile(folder / arguments[2]).architecture == "llama"


def test_the_page_names_every_field_of_the_json(folder: Path) -> None:
    from pyggtrain.model_info import info

    page = PAGE.read_text(encoding="utf-8")
    found = info("model.gguf").to_dict()
    fields = [*found, *found["types"][0], *found["memory"], *found["tensors"][0]]
    assert all(f"`{field}`" in page for field in fields)
