"""What is measured between two lines of metrics."""

import pytest
import torch

from pyggtrain.training.metrics import LoggedStep, StepLog, memory_mib
from pyggtrain.training.optim import StepResult


def test_a_line_is_the_mean_over_units_of_the_steps_since_the_last():
    log = StepLog(10, torch.device("cpu"))
    log.add(LoggedStep(StepResult(1.0, 5.0, {"accuracy": 1.0}), num_units=2, num_tokens=20, num_learnt=7, seconds=1.0))
    log.add(LoggedStep(StepResult(4.0, 6.0, {"accuracy": 0.0}), num_units=1, num_tokens=10, num_learnt=3, seconds=2.0))
    line = log.line(2, 0.5, 1e-3)
    assert (line.loss, line.grad_norm, line.metrics) == (2.0, 6.0, {"accuracy": pytest.approx(2 / 3)})
    assert (line.tokens, line.supervised_tokens, line.tokens_per_second) == (30, 10, 10.0)
    assert line.eta_seconds == 8 * 1.5 and log.num_tokens == 30
    log.add(LoggedStep(StepResult(3.0, 1.0), num_units=1, num_tokens=1, num_learnt=1, seconds=1.0))
    assert log.line(3, 0.5, 1e-3).loss == 3.0


def test_a_skipped_step_does_not_count_into_the_loss():
    log = StepLog(10, torch.device("cpu"))
    log.add(LoggedStep(StepResult(1.0, 5.0), num_units=2, num_tokens=20, num_learnt=7, seconds=1.0))
    skipped = StepResult(float("nan"), 6.0, non_finite="w")
    log.add(LoggedStep(skipped, num_units=1, num_tokens=10, num_learnt=3, seconds=2.0))
    line = log.line(2, 0.5, 1e-3)
    assert (line.loss, line.skipped_tensor) == (1.0, "w")


def test_memory_of_this_process_is_plausible():
    found = memory_mib(torch.device("cpu"))
    assert found is None or 20 < found < 100_000
