"""Rows of a run: mixes with weights, rows set aside, packing, and the chat template that is asked for."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from pyggtrain.data.store import StoredPairs
from pyggtrain.errors import ConfigError, DataError
from pyggtrain.gguf import Tokenizer
from pyggtrain.training.config import TrainConfig, build_config
from pyggtrain.training.data import RunData, load_data, micro_batches, run_template

STARTED = datetime(2031, 2, 3, 4, 5, 6)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)


def written(folder: Path, name: str, count: int) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count)))
    return str(path)


def loaded(tokenizer: Tokenizer, *data: str, as_pairs: bool = False, **settings: object) -> RunData:
    config = TrainConfig(model="m", data=data, output="o.gguf", **settings)  # type: ignore[arg-type]
    return load_data(config, tokenizer, max_length=64, started=STARTED, as_pairs=as_pairs)


def sources(data: RunData) -> list[str]:
    return [row.source for row in data.rows]  # type: ignore[union-attr]


def test_weights_say_how_often_an_epoch_shows_the_rows_of_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    half, once, more = (written(tmp_path, name, 10) for name in ("half", "once", "more"))
    data = loaded(tokenizer, f"{half}:0.5", once, f"{more}:2.3", eval_split=0)
    found = sources(data)
    names = [source.split(":")[0] for source in found]
    assert (names.count("half"), names.count("once"), names.count("more")) == (5, 10, 23)
    assert all(found.count(f"once:{line}") == 1 for line in range(1, 11))
    assert sorted({found.count(f"more:{line}") for line in range(1, 11)}) == [2, 3]
    assert len(set(found)) == 5 + 10 + 10
    assert "half has weight 0.5: 5 rows an epoch" in data.lines()
    assert sources(loaded(tokenizer, f"{half}:0.5", once, f"{more}:2.3", eval_split=0)) == found
    assert sources(loaded(tokenizer, f"{half}:0.5", once, f"{more}:2.3", eval_split=0, seed=1)) != found


def test_weights_are_part_of_what_a_resumed_run_compares(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, "a", 10)
    hashes = [loaded(tokenizer, name).sha256 for name in (path, f"{path}:1", f"{path}:2")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_no_row_is_both_learnt_and_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = written(tmp_path, "a", 40), written(tmp_path, "b", 40)
    data = loaded(tokenizer, f"{first}:3", f"{second}:0.5", eval_split=0.2)
    held_out = {row.source for row in data.held_out}
    assert len(held_out) == 16
    assert not held_out & set(sources(data))
    assert {source.split(":")[0] for source in held_out} == {"a", "b"}


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_weights_that_mean_nothing_are_refused(tokenizer: Tokenizer, tmp_path: Path, weight: str) -> None:
    path = written(tmp_path, "a", 3)
    with pytest.raises(ConfigError, match=f"the weight of .*a is {weight}; needed: a number above 0"):
        loaded(tokenizer, f"{path}:{weight}")


def test_files_named_twice_or_weighted_away_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, "a", 3)
    with pytest.raises(ConfigError, match="is named twice; name it once, with a weight"):
        loaded(tokenizer, path, f"{path}:2")
    with pytest.raises(DataError, match="Nothing is left to train on: a has weight 0.1: 0 rows"):
        loaded(tokenizer, f"{path}:0.1")


def test_a_colon_in_a_path_is_no_weight(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, "run:2", 3)
    assert len(loaded(tokenizer, path).rows) == 3
    with pytest.raises(DataError, match="a:b cannot be read"):
        loaded(tokenizer, str(tmp_path / "a:b"))


def test_yaml_may_give_weights_as_a_mapping(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: m\noutput: o\ndata:\n  chat.jsonl: 1\n  extra.csv: 0.5\n")
    assert build_config({}, run).data == ("chat.jsonl:1", "extra.csv:0.5")


def test_pairs_are_split_and_mixed_as_pairs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "q", "chosen": f"good {number}", "rejected": "bad"} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = loaded(tokenizer, f"{path}:2", as_pairs=True, eval_split=0.1)
    assert isinstance(data.rows, StoredPairs) and isinstance(data.held_out, StoredPairs)
    assert (len(data.rows), len(data.held_out)) == (72, 4)
    assert all(pair.chosen.source == pair.rejected.source for pair in data.rows)
    assert not {pair.source for pair in data.rows} & {pair.source for pair in data.held_out}


def test_documents_for_the_comparison_are_few_and_held_out_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = loaded(tokenizer, written(tmp_path, "a", 500), eval_split=0.1)
    documents = data.documents()
    assert len(documents) == 250
    assert list(documents[0][0]) == list(data.held_out[0].input_ids)  # type: ignore[union-attr]


@pytest.mark.parametrize("packing", [False, True])
def test_micro_batches_follow_the_settings(tokenizer: Tokenizer, tmp_path: Path, packing: bool) -> None:
    data = loaded(tokenizer, written(tmp_path, "a", 30), eval_split=0)
    config = TrainConfig(
        model="m", data=("d",), output="o", packing=packing, max_seq_length=64, per_device_train_batch_size=3
    )
    plan = micro_batches(config, data.rows)
    lengths = data.rows.lengths
    largest = max(sum(lengths[index] for index in part) for part in plan.of_step(0))
    assert largest <= sum(lengths[index] for index in plan.largest(3)) <= 3 * 64
    assert (largest > 3 * max(lengths)) == packing
    # A list of rows, as tests and other programs have it, means the same.
    assert micro_batches(config, list(data.rows)).of_step(1) == plan.of_step(1)


def test_chat_template_may_be_a_file_or_a_name_in_the_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    class Model:
        bos_id = eos_id = None
        chat_template = "default"
        chat_templates = {"rag": "rag"}  # noqa: RUF012

    def template(name: str | None) -> str:
        config = TrainConfig(model="m", data=("d",), output="o", chat_template=name)
        found = run_template(config, Model(), STARTED)  # type: ignore[arg-type]
        assert found is not None
        # The day, and nothing that changes within it: rows must be found in the cache again.
        assert found.now == datetime(2031, 2, 3)
        return found.source

    path = tmp_path / "own.jinja"
    path.write_text("own")
    assert [template(name) for name in (None, "rag", str(path))] == ["default", "rag", "own"]
    with pytest.raises(ConfigError, match=r"chat_template: rga cannot be read: .* further templates \(rag\)"):
        template("rga")
