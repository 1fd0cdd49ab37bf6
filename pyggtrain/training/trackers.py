"""Where metrics go besides the terminal: the run's own JSON lines, and what `report_to` names.

Each is a `Progress`, told about every logged step. Names are those that transformers gives: train/loss, eval/loss.
"""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.metrics import EvalMetrics, StepMetrics, read_metrics
from pyggtrain.training.output import OutputError, OutputFiles, write_text
from pyggtrain.training.progress import Progress


class MetricsFile(Progress):
    """Appends metrics to a JSON-lines file; each line is handed to the system before the next step starts.

    Args:
        path: file to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, num_steps: int, first_step: int) -> None:
        """Keep the lines of the steps that are done; those of later ones, which will be computed again, are removed."""
        is_old = first_step > 0 and self._path.exists()
        kept = [line for line in read_metrics(self._path) if line["step"] <= first_step] if is_old else []
        write_text(self._path, "".join(_line(values) for values in kept))

    def step(self, metrics: StepMetrics) -> None:
        """Append one line.

        Raises:
            OutputError: the disk is full.
        """
        self._append(metrics)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Append one line."""
        self._append(metrics)

    def _append(self, metrics: StepMetrics | EvalMetrics) -> None:
        try:
            with self._path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(_line(_values(metrics)))
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written: {error.strerror}. Free space, then resume.") from error


Log = Callable[[dict[str, float], int], None]
Close = Callable[[], None]


class Tracker(Progress):
    """Sends numbers to a tracking library.

    Args:
        begin: called when training begins, with the steps that are done already; returns what sends (name -> number,
            step), and what closes.
    """

    def __init__(self, begin: Callable[[int], tuple[Log, Close]]) -> None:
        self._begin = begin

    def start(self, num_steps: int, first_step: int) -> None:
        """Open it."""
        self._log, self._close = self._begin(first_step)

    def step(self, metrics: StepMetrics) -> None:
        """Send the step's numbers."""
        self._log({f"train/{name}": value for name, value in _numbers(metrics).items()}, metrics.step)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Send the held-out loss."""
        numbers = {f"eval/{name.removeprefix('eval_')}": value for name, value in _numbers(metrics).items()}
        self._log(numbers, metrics.step)

    def stop(self) -> None:
        """Close what was opened."""
        self._close()


def _tensorboard(config: TrainConfig, files: OutputFiles) -> Tracker:
    def begin(first_step: int) -> tuple[Log, Close]:
        from torch.utils.tensorboard import SummaryWriter

        # Numbers of later steps, from before a resume or of a run that this one replaces, are hidden.
        writer = SummaryWriter(str(files.tensorboard), purge_step=first_step + 1 if first_step else 0)

        def log(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        return log, writer.close

    return Tracker(begin)


def _trackio(config: TrainConfig, files: OutputFiles) -> Tracker:
    def begin(first_step: int) -> tuple[Log, Close]:
        import trackio

        trackio.init(project="pyggtrain", name=_run_name(config, files), config=config.to_dict())
        return lambda numbers, step: trackio.log(numbers, step=step), trackio.finish

    return Tracker(begin)


def _wandb(config: TrainConfig, files: OutputFiles) -> Tracker:
    def begin(first_step: int) -> tuple[Log, Close]:
        import wandb

        run = wandb.init(name=_run_name(config, files), config=config.to_dict())
        # With a step of their own, numbers of a resumed run that come twice do not warn.
        run.define_metric("*", step_metric="step")
        return lambda numbers, step: run.log({**numbers, "step": step}), run.finish

    return Tracker(begin)


TRACKERS: dict[str, Callable[[TrainConfig, OutputFiles], Tracker]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
"""Name in `TrainConfig.report_to` -> what sends numbers there."""


def check_trackers(config: TrainConfig) -> None:
    """Refuse a tracker whose package is missing.

    Raises:
        ConfigError: names all of them.
    """
    missing = [name for name in config.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"report_to: {', '.join(missing)} not installed. `pip install {' '.join(missing)}`, or leave report_to out."
        )


def make_trackers(config: TrainConfig, files: OutputFiles) -> list[Progress]:
    """Return the trackers that the settings name; they open when training begins."""
    return [TRACKERS[name](config, files) for name in config.report_to]


class Together(Progress):
    """Tells several about each event, in order."""

    def __init__(self, members: Sequence[Progress]) -> None:
        self._members = members

    def start(self, num_steps: int, first_step: int) -> None:
        """Tell all."""
        for member in self._members:
            member.start(num_steps, first_step)

    def step(self, metrics: StepMetrics) -> None:
        """Tell all."""
        for member in self._members:
            member.step(metrics)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Tell all."""
        for member in self._members:
            member.evaluated(metrics)

    def message(self, text: str) -> None:
        """Tell all."""
        for member in self._members:
            member.message(text)

    def stop(self) -> None:
        """Tell all."""
        for member in self._members:
            member.stop()


def _run_name(config: TrainConfig, files: OutputFiles) -> str:
    return config.run_name or files.adapter.stem


def _values(metrics: StepMetrics | EvalMetrics) -> dict[str, Any]:
    values = dataclasses.asdict(metrics)
    further = values.pop("metrics")
    return {**values, **further}


def _numbers(metrics: StepMetrics | EvalMetrics) -> dict[str, float]:
    return {name: value for name, value in _values(metrics).items() if isinstance(value, int | float)}


def _line(values: Mapping[str, Any]) -> str:
    # JSON has no NaN; strict readers refuse it.
    clean = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
        if not (name == "skipped_tensor" and value is None)
    }
    return json.dumps(clean, allow_nan=False) + "\n"
