"""What is measured while training: one JSON line for each logged step."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyggtrain.training.output import OutputError, write_text


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One logged optimiser step.

    Attributes:
        step: finished optimiser steps, from 1.
        epoch: passes over the training rows so far, as a fraction.
        loss: mean cross-entropy in nats over the supervised tokens of the step.
        learning_rate: used in this step.
        grad_norm: L2 norm of all gradients before clipping.
        tokens: tokens computed in this step.
        supervised_tokens: those that the loss is taken over.
        tokens_per_second: mean over the steps since the run started or was resumed.
        eta_seconds: expected time to the last step.
        elapsed_seconds: since the run started or was resumed.
        memory_mib: resident memory of the process (the mapped part of the base file included), or peak memory of the
            GPU.
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
    skipped_tensor: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvalMetrics:
    """Held-out loss after `step` optimiser steps: mean cross-entropy in nats over `eval_tokens` supervised tokens."""

    step: int
    eval_loss: float
    eval_tokens: int


class MetricsFile:
    """Appends metrics to a JSON-lines file; each line is on the disk before the next step starts.

    Args:
        path: file to write.
        first_step: steps that a checkpoint has behind it. Lines of later steps, which will be computed again, are
            removed; 0 starts anew.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._path = path
        kept = (
            [line for line in read_metrics(path) if line["step"] <= first_step] if first_step and path.exists() else []
        )
        write_text(path, "".join(_line(values) for values in kept))

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Append one line.

        Raises:
            OutputError: the disk is full.
        """
        try:
            with self._path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(_line(dataclasses.asdict(metrics)))
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written: {error.strerror}. Free space, then resume.") from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; a last line that was cut off (it has no line end) is left out."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        yield json.loads(line)


def memory_mib(device: torch.device) -> float | None:
    """Return resident memory (CPU) or peak allocated memory (CUDA) in MiB; None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _line(values: dict[str, Any]) -> str:
    # JSON has no NaN; strict readers refuse it.
    clean = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
        if not (name == "skipped_tensor" and value is None)
    }
    return json.dumps(clean, allow_nan=False) + "\n"
