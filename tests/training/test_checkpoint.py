"""Checkpoints: what differs is named, damage is told, code inside is never run."""

import pickle
from dataclasses import replace

import pytest
import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training.checkpoint import (
    NOT_PART_OF_THE_RUN,
    Checkpoint,
    Origin,
    check_same_run,
    load_checkpoint,
    save_checkpoint,
)
from pyggtrain.training.config import TrainConfig, field_types


def config(**settings) -> TrainConfig:
    return TrainConfig(**{"model": "m", "data": ("d",), "output": "o", **settings})


def origin(**settings) -> Origin:
    return Origin.of(config(**settings), "a" * 64, "b" * 64, 20)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "тест 日本 é.checkpoint"
    save_checkpoint(
        path,
        Checkpoint(
            step=3,
            started="2026-01-02T03:04:05",
            origin=origin(),
            parameters={"w.lora_a": torch.randn(2, 3)},
            optimizer={"state": {}, "num_skipped": 1},
            evaluations={"losses": {0: 2.0}, "best_parameters": None},
            loss=1.5,
        ),
    )
    return path


def test_what_was_saved_is_loaded(path):
    loaded = load_checkpoint(path)
    check_same_run(path, loaded.origin, origin())
    assert (
        loaded.step == 3
        and loaded.started == "2026-01-02T03:04:05"
        and loaded.optimizer["num_skipped"] == 1
        and loaded.evaluations["losses"] == {0: 2.0}
        and loaded.loss == 1.5
        and loaded.parameters["w.lora_a"].shape == (2, 3)
    )


def test_settings_without_influence_may_change(path):
    moved = origin(
        model="elsewhere", data=("x", "y"), output="p", resume=True, num_threads=3, save_steps=1, logging_steps=9
    )
    check_same_run(path, load_checkpoint(path).origin, moved)


def test_evaluation_may_change_only_while_it_decides_nothing(path):
    assert origin(eval_steps=5).differences(origin(eval_steps=6)) == []
    stops = {"early_stopping_patience": 2}
    assert origin(eval_steps=5, **stops).differences(origin(eval_steps=6, **stops)) == [
        "eval_steps: 5, the checkpoint has 6"
    ]
    one, other = (
        Origin.of(config(load_best_model_at_end=True), "a", "b", 20, held_out_sha256=sha256) for sha256 in ("c", "d")
    )
    assert one.differences(other) == ["hash of eval_data: 'c', the checkpoint has 'd'"]


def test_another_number_of_processes_is_refused():
    two = Origin.of(config(), "a" * 64, "b" * 64, 20, num_processes=2)
    assert two.differences(origin()) == ["number of processes: 2, the checkpoint has 1"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (origin(r=8), "r: 8, the checkpoint has 16"),
        (origin(learning_rate=1e-3), "learning_rate: 0.001, the checkpoint has 0.0002"),
        (origin(seed=1), "seed: 1, the checkpoint has 3407"),
        (
            replace(origin(), base_sha256="c" * 64),
            "model: hash of the file cccccccccccc..., the checkpoint has aaaaaaaaaaaa...",
        ),
        (replace(origin(), data_sha256="c" * 64), "data: hash of the rows cccccccccccc"),
    ],
)
def test_changes_are_refused_by_name(path, changed, expected):
    with pytest.raises(ConfigError, match="cannot resume") as caught:
        check_same_run(path, load_checkpoint(path).origin, changed)
    assert expected in str(caught.value)


def test_all_changes_are_named_together(path):
    with pytest.raises(ConfigError) as caught:
        check_same_run(path, origin(), replace(origin(r=4, lora_dropout=0.1), base_sha256="c" * 64))
    assert all(name in str(caught.value) for name in ("model:", "r:", "lora_dropout:"))


def test_damaged_files_are_refused(path, tmp_path):
    half = tmp_path / "half"
    half.write_bytes(path.read_bytes()[:-100])
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for damaged in (half, empty):
        with pytest.raises(ConfigError, match="not a readable checkpoint"):
            load_checkpoint(damaged)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "proof"), "w"))

    path = tmp_path / "harmful"
    torch.save({"format": 1, "step": Harmful()}, path)
    with pytest.raises(ConfigError):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(ConfigError):
        load_checkpoint(path)
    assert not (tmp_path / "proof").exists()


def test_settings_that_may_differ_exist():
    assert set(field_types()) >= NOT_PART_OF_THE_RUN
