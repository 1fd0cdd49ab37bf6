"""The tool-call example: what its held-out rows promise."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from pyggtrain.data import DataSettings, load_examples
from pyggtrain.gguf import Tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "tool_calls.py"


@pytest.fixture(scope="module")
def tool_calls() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_calls", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tool_calls: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool_calls")
    tool_calls.main(folder)
    return folder


def pairs(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row[1]["content"], row[2]["content"]) for row in rows]


def test_same_bytes_every_time(tool_calls: ModuleType, folder: Path, tmp_path: Path) -> None:
    tool_calls.main(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_heldout_rows_share_no_request_no_sentence_and_no_value_with_training(
    tool_calls: ModuleType, folder: Path
) -> None:
    train, heldout = pairs(folder / "train.jsonl"), pairs(folder / "heldout.jsonl")
    assert len(heldout) >= 100
    assert len({request for request, _ in train}) == len(train)
    assert not {request.lower() for request, _ in train} & {request.lower() for request, _ in heldout}
    assert not {call for _, call in train} & {call for _, call in heldout}
    for train_sentences, heldout_sentences in tool_calls.REQUESTS.values():
        assert len(train_sentences) >= 12
        assert not set(train_sentences) & set(heldout_sentences)
    for train_values, heldout_values in tool_calls.VALUES.values():
        assert not set(train_values.split("|")) & set(heldout_values.split("|"))


def test_every_answer_is_one_call_in_its_one_spelling(tool_calls: ModuleType, folder: Path) -> None:
    rows = pairs(folder / "train.jsonl") + pairs(folder / "heldout.jsonl")
    tools = set()
    for request, answer in rows:
        call = json.loads(answer)
        assert answer == tool_calls.tool_call(call["tool"], call["arguments"])
        tools.add(call["tool"])
        # A model of this size can copy a value, not guess it.
        for value in call["arguments"].values():
            assert isinstance(value, bool) or str(value).lower() in request.lower(), (request, answer)
    assert len(tools) == 8


def test_rows_are_short_enough_for_a_laptop(folder: Path, smollm2_tokenizer: Tokenizer) -> None:
    examples, report = load_examples(folder / "train.jsonl", smollm2_tokenizer, DataSettings())
    assert report.warnings == []
    assert report.num_tokens < 40_000
    assert report.lengths[3] <= 80
    assert all(example.num_learnt > 10 for example in examples)
