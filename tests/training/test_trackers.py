"""Where metrics go: the file after stops, resumes and numbers that JSON cannot hold; tracking libraries."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.metrics import EvalMetrics, StepMetrics, read_metrics
from pyggtrain.training.output import OutputError, OutputFiles
from pyggtrain.training.trackers import MetricsFile, Together, check_trackers, make_trackers


def metrics(step: int, **changes) -> StepMetrics:
    values = {
        "step": step,
        "epoch": 0.5,
        "loss": 1.0,
        "learning_rate": 1e-4,
        "grad_norm": 2.0,
        "tokens": 10,
        "supervised_tokens": 5,
        "tokens_per_second": 3.0,
        "eta_seconds": 4.0,
        "elapsed_seconds": 5.0,
        "memory_mib": None,
    }
    return StepMetrics(**{**values, **changes})


def started(path: Path, first_step: int = 0) -> MetricsFile:
    file = MetricsFile(path)
    file.start(10, first_step)
    return file


def test_each_line_is_one_json_object(tmp_path):
    path = tmp_path / "m.jsonl"
    file = started(path)
    file.step(metrics(1))
    file.evaluated(EvalMetrics(step=1, eval_loss=2.0, eval_tokens=7))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["supervised_tokens"] == 5 and "skipped_tensor" not in first
    assert second == {"step": 1, "eval_loss": 2.0, "eval_tokens": 7}


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    path = tmp_path / "m.jsonl"
    started(path).step(metrics(1, loss=math.nan, grad_norm=math.inf, skipped_tensor="blk.0.attn_q.weight.lora_b"))
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["loss"] is None and line["grad_norm"] is None and line["skipped_tensor"] == "blk.0.attn_q.weight.lora_b"


def test_resuming_drops_lines_of_steps_that_come_again(tmp_path):
    path = tmp_path / "m.jsonl"
    file = started(path)
    for step in range(1, 6):
        file.step(metrics(step))
    # A line that the end of the process cut off.
    with path.open("a") as stream:
        stream.write('{"step": 6, "lo')
    started(path, 3).step(metrics(4))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_a_new_run_starts_a_new_file(tmp_path):
    path = tmp_path / "m.jsonl"
    started(path).step(metrics(1))
    started(path)
    assert list(read_metrics(path)) == []


def test_full_disk_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    file = started(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(OutputError, match=r"m\.jsonl"):
        file.step(metrics(1))


def test_further_numbers_stand_beside_the_others(tmp_path):
    path = tmp_path / "m.jsonl"
    file = started(path)
    file.step(metrics(1, metrics={"rewards/accuracies": 0.5}))
    file.evaluated(EvalMetrics(step=1, eval_loss=2.0, eval_tokens=7, metrics={"eval_rewards/accuracies": 0.25}))
    first, second = read_metrics(path)
    assert first["rewards/accuracies"] == 0.5 and second["eval_rewards/accuracies"] == 0.25
    assert "metrics" not in first and "metrics" not in second


def config(tmp_path, *names) -> tuple[TrainConfig, OutputFiles]:
    output = tmp_path / "run.gguf"
    return TrainConfig(model="m", data=("d",), output=str(output), report_to=names), OutputFiles(output)


def tell(settings: TrainConfig, files: OutputFiles, first_step: int = 0) -> None:
    trackers = Together(make_trackers(settings, files))
    trackers.start(10, first_step)
    trackers.step(metrics(first_step + 1, loss=1.5, metrics={"rewards/accuracies": 0.5}))
    trackers.evaluated(EvalMetrics(step=first_step + 1, eval_loss=2.0, eval_tokens=7))
    trackers.stop()


def test_tensorboard_reads_what_was_sent(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings, files = config(tmp_path, "tensorboard")
    tell(settings, files)
    tell(settings, files, first_step=1)
    events = EventAccumulator(str(files.tensorboard)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.5), (2, 1.5)]
    assert [event.value for event in events.Scalars("eval/loss")] == [2.0, 2.0]
    assert [event.value for event in events.Scalars("train/rewards/accuracies")] == [0.5, 0.5]
    assert "train/skipped_tensor" not in events.Tags()["scalars"]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_libraries_get_names_steps_and_the_end(tmp_path, monkeypatch, name):
    """Their own interfaces as of trackio 0.43 and wandb 0.2x, without the libraries and their servers."""
    sent, begun, ended = [], [], []
    run = SimpleNamespace(
        log=lambda numbers: sent.append((numbers["step"], numbers)),
        finish=lambda: ended.append(True),
        define_metric=lambda *args, **kwargs: None,
    )
    library = SimpleNamespace(
        init=lambda **arguments: begun.append(arguments) or run,
        log=lambda numbers, step: sent.append((step, numbers)),
        finish=run.finish,
    )
    monkeypatch.setitem(sys.modules, name, library)
    settings, files = config(tmp_path, name)
    tell(settings, files)
    assert begun[0]["name"] == "run" and begun[0]["config"]["r"] == 16
    assert [step for step, _ in sent] == [1, 1] and ended == [True]
    assert sent[0][1]["train/loss"] == 1.5 and sent[1][1]["eval/loss"] == 2.0


def test_a_missing_library_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings, _ = config(tmp_path, "trackio", "wandb")
    with pytest.raises(ConfigError, match="report_to: trackio, wandb not installed"):
        check_trackers(settings)
