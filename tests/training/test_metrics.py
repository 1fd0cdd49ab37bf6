"""The metrics file after stops, resumes and numbers that JSON cannot hold."""

import json
import math

import pytest
import torch

from pyggtrain.training.metrics import EvalMetrics, MetricsFile, StepMetrics, memory_mib, read_metrics
from pyggtrain.training.output import OutputError


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


def test_each_line_is_one_json_object(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, first_step=0)
    file.write(metrics(1))
    file.write(EvalMetrics(step=1, eval_loss=2.0, eval_tokens=7))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["supervised_tokens"] == 5 and "skipped_tensor" not in first
    assert second == {"step": 1, "eval_loss": 2.0, "eval_tokens": 7}


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    path = tmp_path / "m.jsonl"
    MetricsFile(path, first_step=0).write(
        metrics(1, loss=math.nan, grad_norm=math.inf, skipped_tensor="blk.0.attn_q.weight.lora_b")
    )
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["loss"] is None and line["grad_norm"] is None and line["skipped_tensor"] == "blk.0.attn_q.weight.lora_b"


def test_resuming_drops_lines_of_steps_that_come_again(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, first_step=0)
    for step in range(1, 6):
        file.write(metrics(step))
    # A line that the end of the process cut off.
    with path.open("a") as stream:
        stream.write('{"step": 6, "lo')
    MetricsFile(path, first_step=3).write(metrics(4))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_a_new_run_starts_a_new_file(tmp_path):
    path = tmp_path / "m.jsonl"
    MetricsFile(path, first_step=0).write(metrics(1))
    MetricsFile(path, first_step=0)
    assert list(read_metrics(path)) == []


def test_full_disk_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, first_step=0)
    path.unlink()
    path.mkdir()
    with pytest.raises(OutputError, match=r"m\.jsonl"):
        file.write(metrics(1))


def test_memory_of_this_process_is_plausible():
    found = memory_mib(torch.device("cpu"))
    assert found is None or 20 < found < 100_000
