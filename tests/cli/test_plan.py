"""`pyggtrain plan`: from the header alone, before anything is loaded."""

import json

import pytest

from pyggtrain import _bridge
from pyggtrain.cli import main


@pytest.fixture(autouse=True)
def _no_weight_is_read(monkeypatch):
    def refuse(*arguments) -> None:
        raise AssertionError("a weight was decoded")

    monkeypatch.setattr(_bridge, "dequantize", refuse)
    monkeypatch.setattr(_bridge, "mul_mat", refuse)


def test_parts_settings_and_next_step_are_shown(tiny_llama_path, capsys):
    assert main(["plan", str(tiny_llama_path), "--max-seq-length", "64", "--device", "cpu", "--r", "4"]) == 0
    text = capsys.readouterr().out
    for word in ("base file", "adapter", "optimiser", "gradients", "activations", "program", "total"):
        assert word in text
    assert "none                    2 x 64" in text and "<- chosen" in text
    assert "The fastest setting fits." in text


def test_json_holds_every_setting(tiny_llama_path, capsys):
    arguments = ["--max-seq-length", "64", "--device", "cpu", "--r", "4", "--max-memory", "4TiB", "--json"]
    assert main(["plan", str(tiny_llama_path), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limit_bytes"] == 4 * 2**40
    assert len(found["settings"]) == 12
    assert found["chosen"] == found["settings"][0]
    assert found["chosen"]["per_device_train_batch_size"] * found["chosen"]["gradient_accumulation_steps"] == 8
    assert sum(found["chosen"]["parts"].values()) == found["chosen"]["total_bytes"]


def test_run_that_cannot_fit_is_refused(tiny_llama_path, capsys):
    assert main(["plan", str(tiny_llama_path), "--device", "cpu", "--r", "4", "--max-memory", "1MiB"]) == 2
    captured = capsys.readouterr()
    assert "Nothing fits: A micro-batch of 256 tokens needs about" in captured.err
    assert "short" in captured.out


def test_mistakes_are_those_of_train(tiny_llama_path, capsys):
    assert main(["plan", str(tiny_llama_path), "--max-memory", "lots", "--lr", "1"]) == 2
    text = capsys.readouterr().err
    assert (
        "max_memory: found 'lots'; needed: a size, like 16GiB or 800MiB" in text
        and "it is called learning_rate" in text
    )
