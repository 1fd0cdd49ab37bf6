"""What is measured while training: one JSON line for each logged step."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pyggtrain.training.optim import StepResult


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One logged optimiser step.

    Attributes:
        step: finished optimiser steps, from 1.
        epoch: passes over the training rows so far, as a fraction.
        loss: mean over the units of the steps since the last line; for "sft" cross-entropy in nats per supervised
            token.
        learning_rate: used in this step.
        grad_norm: L2 norm of all gradients before clipping.
        tokens: tokens computed in these steps, on all processes.
        supervised_tokens: those of them that the loss is taken over.
        tokens_per_second: mean over the steps since the run started or was resumed.
        eta_seconds: expected time to the last step.
        elapsed_seconds: since the run started or was resumed.
        memory_mib: resident memory of the process (the mapped part of the base file included), or peak memory of the
            GPU's tensors.
        card_mib: on a GPU, memory of the card that is taken, by whatever (what nvidia-smi shows).
        metrics: means over the units of the objective's further numbers.
        skipped_tensor: tensor with a gradient that is not finite, for which the step was skipped.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    tokens_per_second: float
    eta_seconds: float
    elapsed_seconds: float
    memory_mib: float | None
    card_mib: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped_tensor: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvalMetrics:
    """Held-out loss after `step` optimiser steps.

    Attributes:
        eval_loss: mean over the units of the held-out rows; for "sft" cross-entropy in nats per supervised token.
        eval_tokens: supervised tokens of these rows.
        metrics: means of the objective's further numbers.
    """

    step: int
    eval_loss: float
    eval_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepLog:
    """Sums up the steps between two lines of metrics.

    Args:
        num_steps: of the whole run.
        device: whose memory is told.

    Attributes:
        num_tokens, seconds: computed so far, since the run started or was resumed.
    """

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.num_tokens, self.seconds = 0, 0.0
        self._num_steps, self._device = num_steps, device
        self._started = time.perf_counter()
        self._num_steps_taken = 0
        self._steps: list[LoggedStep] = []

    def add(self, step: "LoggedStep") -> None:
        """Take in one step."""
        self._steps.append(step)
        self._num_steps_taken += 1
        self.num_tokens += step.num_tokens
        self.seconds += step.seconds

    def line(self, done: int, epoch: float, rate: float) -> StepMetrics:
        """Return the metrics of the steps since the last line; the gradient norm is the last step's."""
        steps, self._steps = self._steps, []
        num_tokens = sum(step.num_tokens for step in steps)
        counted = [step for step in steps if step.result.non_finite is None] or steps
        num_units = max(1, sum(step.num_units for step in counted))

        def metric(name: str) -> float:
            return mean(lambda result: result.metrics[name])

        def mean(value: Callable[[StepResult], float]) -> float:
            return sum(value(step.result) * step.num_units for step in counted) / num_units

        return StepMetrics(
            step=done,
            epoch=epoch,
            loss=mean(lambda result: result.loss),
            learning_rate=rate,
            grad_norm=steps[-1].result.grad_norm,
            tokens=num_tokens,
            supervised_tokens=sum(step.num_learnt for step in steps),
            tokens_per_second=num_tokens / sum(step.seconds for step in steps),
            eta_seconds=(self._num_steps - done) * self.seconds / self._num_steps_taken,
            elapsed_seconds=time.perf_counter() - self._started,
            memory_mib=memory_mib(self._device),
            card_mib=card_mib(self._device),
            metrics={name: metric(name) for name in steps[-1].result.metrics},
            skipped_tensor=steps[-1].result.non_finite,
        )


@dataclass(frozen=True)
class LoggedStep:
    """What a step did and how long it took.

    Attributes:
        result: loss, norms.
        num_units: what its loss is a mean over, on all processes.
        num_tokens, num_learnt: tokens computed, and those of them that were learnt, on all processes.
        seconds: wall time.
    """

    result: StepResult
    num_units: int
    num_tokens: int
    num_learnt: int
    seconds: float


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; a last line that was cut off (it has no line end) is left out."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        yield json.loads(line)


def card_mib(device: torch.device) -> float | None:
    """Return the memory of a GPU that is taken, by this process and all others, in MiB; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def memory_mib(device: torch.device) -> float | None:
    """Return resident memory (CPU) or peak allocated memory (CUDA) in MiB; None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
