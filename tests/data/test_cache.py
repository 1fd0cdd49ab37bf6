import json
import os
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggtrain.data import ChatTemplate, DataSettings, load_examples, load_pairs
from pyggtrain.data import cache as cache_module
from pyggtrain.data.cache import cached_examples
from pyggtrain.data.encode import encode_into
from pyggtrain.data.row_encoder import RowEncoder
from pyggtrain.data.store import ExampleStore, StoredExamples, StoredPairs
from pyggtrain.errors import DataError
from pyggtrain.gguf import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYGGTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time rows are really encoded."""
    calls: list[int] = []
    encode_into = cache_module.encode_into

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return encode_into(*args, **kwargs)

    monkeypatch.setattr(cache_module, "encode_into", counted)
    return calls


def test_a_store_holds_what_encoding_gives(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = written(tmp_path, "a.jsonl", [chat("q", "word " * number) for number in range(1, 40)])
    second = written(tmp_path, "b.jsonl", [{"text": "x " * 90}, {"text": "y"}])
    settings = DataSettings(max_length=100, too_long="drop")
    store = cached_examples([first, second], smollm2_tokenizer, settings)
    examples, report = load_examples([first, second], smollm2_tokenizer, settings)
    assert [store.example(index) for index in range(len(store))] == examples
    assert store.report == report
    assert store.lengths.tolist() == [example.num_tokens for example in examples]
    assert store.files.tolist() == [0] * 39 + [1] * 2
    some = StoredExamples(store, np.array([5, 2, 2]))
    assert [len(some), *some[1:]] == [3, examples[2], examples[2]]
    assert some.lengths.tolist() == [examples[5].num_tokens, examples[2].num_tokens, examples[2].num_tokens]


def test_pairs_are_stored_as_two_examples(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "good " * number, "rejected": "bad"} for number in range(1, 5)]
    path = written(tmp_path, "p.jsonl", rows)
    store = cached_examples([path], smollm2_tokenizer, DataSettings(), as_pairs=True)
    pairs, report = load_pairs(path, smollm2_tokenizer, DataSettings())
    stored = StoredPairs(store, np.arange(4))
    assert list(stored) == pairs
    assert store.report == report
    assert stored.lengths.tolist() == [pair.num_tokens for pair in pairs]
    assert stored.example(2) == pairs[2].chosen


def test_equal_rows_are_encoded_once_and_any_difference_counts(
    smollm2_tokenizer: Tokenizer, tmp_path: Path, encodings: list[int], cache: Path
) -> None:
    path = written(tmp_path, "a.jsonl", [chat("q", "a")])

    def encoded(path: Path = path, settings: DataSettings | None = None, **options: Any) -> int:
        cached_examples([path], smollm2_tokenizer, settings or DataSettings(), **options)
        return len(encodings)

    def template(**options: Any) -> ChatTemplate:
        return ChatTemplate.of_model(smollm2_tokenizer, **options)

    assert [encoded(), encoded()] == [1, 1]
    # The file may move; its contents decide.
    os.utime(path, (0, 0))
    moved = written(tmp_path / "other", "a.jsonl", [chat("q", "a")])
    assert encoded(moved) == 1
    assert encoded(settings=DataSettings(learnt_turns="last")) == 2
    assert encoded(chat_template=template()) == 3
    assert encoded(chat_template=template(now=datetime(2031, 2, 3))) == 3
    assert encoded(chat_template=template(variables={"enable_thinking": False})) == 4
    dated = "{{ date_string }}" + (smollm2_tokenizer.chat_template or "")
    assert encoded(chat_template=template(source=dated, now=datetime(2031, 2, 3))) == 5
    assert encoded(chat_template=template(source=dated, now=datetime(2031, 2, 4))) == 6
    written(tmp_path, "a.jsonl", [chat("q", "b")])
    assert encoded() == 7
    assert not [entry for entry in cache.iterdir() if entry.name.endswith(".tmp")]


def test_a_damaged_or_deleted_store_is_made_again(
    smollm2_tokenizer: Tokenizer, tmp_path: Path, encodings: list[int], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, "a.jsonl", [chat("q", "a")])
    whole = cached_examples([path], smollm2_tokenizer, DataSettings()).example(0)
    (folder,) = cache.iterdir()
    for damage in ("ids.bin", "store.json"):
        (folder / damage).write_bytes(b"{")
        assert cached_examples([path], smollm2_tokenizer, DataSettings()).example(0) == whole
        assert "is damaged" in caplog.text
        caplog.clear()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert cached_examples([path], smollm2_tokenizer, DataSettings()).example(0) == whole
    assert len(encodings) == 4


def test_rows_that_cannot_be_used_leave_nothing_behind(
    smollm2_tokenizer: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    path = written(tmp_path, "a.jsonl", [chat("q", "a"), chat("q", "")])
    with pytest.raises(DataError, match="a.jsonl:2"):
        cached_examples([path], smollm2_tokenizer, DataSettings())
    assert list(cache.iterdir()) == []
    with pytest.raises(DataError, match="missing.jsonl cannot be read"):
        cached_examples([tmp_path / "missing.jsonl"], smollm2_tokenizer, DataSettings())


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(
    smollm2_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "a.jsonl", [chat("q", "a")])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYGGTRAIN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DataError, match="PYGGTRAIN_CACHE_DIR"):
        cached_examples([path], smollm2_tokenizer, DataSettings())


def test_a_store_that_another_process_wrote_meanwhile_is_taken(
    smollm2_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "a.jsonl", [chat("q", "a")])
    encode_into = cache_module.encode_into

    def slow(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(cache_module, "encode_into", encode_into)
        cached_examples([path], smollm2_tokenizer, DataSettings())
        return encode_into(*args, **kwargs)

    monkeypatch.setattr(cache_module, "encode_into", slow)
    assert isinstance(cached_examples([path], smollm2_tokenizer, DataSettings()), ExampleStore)


def test_files_of_one_name_are_told_apart(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    paths = [written(tmp_path / folder, "a.jsonl", [chat("q", folder)]) for folder in ("x", "y")]
    store = cached_examples(paths, smollm2_tokenizer, DataSettings())
    assert store.files.tolist() == [0, 1]
    assert [store.example(index).source for index in (0, 1)] == [f"{path}:1" for path in paths]


def test_all_cores_give_the_same_store_as_one(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Rows of all kinds, bad ones and long ones among them: examples, order and report are equal."""
    rows: list[dict[str, Any]] = []
    for number in range(700):
        rows.append(chat(f"question {number}", "word " * (number % 60 + 1)))
        if number % 50 == 0:
            rows.append({"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]})
            rows.append(chat("q", ""))
    path = written(tmp_path, "a.jsonl", rows)
    settings = DataSettings(max_length=64, too_long="drop", bad_rows="skip")
    results = []
    for workers in (1, 3):
        examples: list[Any] = []
        encoder = RowEncoder(smollm2_tokenizer, settings)
        results.append((encode_into(examples.append, path, encoder, num_workers=workers), examples))
    assert results[0] == results[1]
    assert results[0][0].num_dropped > 14
    with pytest.raises(DataError, match="14 of 728 rows cannot be used"):
        encode_into(examples.append, path, RowEncoder(smollm2_tokenizer, DataSettings()), num_workers=2)


def test_memory_does_not_grow_with_the_rows(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """20,000 rows of 6 MB and 1.2 million tokens; benchmarks/bench_data.py streams a million."""
    path = written(tmp_path, "a.jsonl", [{"text": f"{number} " + "word " * 55} for number in range(20_000)])
    tracemalloc.start()
    store = cached_examples([path], smollm2_tokenizer, DataSettings(), num_workers=2)
    for index in range(0, len(store), 7):
        store.example(index)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == 20_000
    assert store.report.num_tokens > 1_100_000
    # Ids and labels alone would take 9 MB as arrays and five times that as lists.
    assert most < 5_000_000, most


def test_a_killed_worker_is_an_error_and_not_a_hang(smollm2_tokenizer: Tokenizer) -> None:
    class Deadly(RowEncoder):
        def encode_chunk(self, rows: Any) -> Any:
            os._exit(9)

    with pytest.raises(DataError, match="was killed"):
        encode_into(print, [chat("q", "a")], Deadly(smollm2_tokenizer, DataSettings()), num_workers=2)
