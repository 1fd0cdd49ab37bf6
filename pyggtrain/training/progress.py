"""What a person sees on stderr while training: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from pyggtrain.training.metrics import EvalMetrics, StepMetrics


class Progress:
    """Receives what happens during a run and shows nothing; the ones below show it."""

    def start(self, num_steps: int, first_step: int) -> None:
        """Training begins; `first_step` steps are already done."""

    def step(self, metrics: StepMetrics) -> None:
        """An optimiser step was taken or skipped."""

    def evaluated(self, metrics: EvalMetrics) -> None:
        """A held-out loss was computed."""

    def message(self, text: str) -> None:
        """Something happened that a person should know."""

    def stop(self) -> None:
        """Training has ended or was stopped."""


class LineProgress(Progress):
    """One plain line for a step, at most one each `interval_seconds`: a log file of a long run stays readable."""

    interval_seconds = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_steps = 0
        self._last = -self.interval_seconds

    def start(self, num_steps: int, first_step: int) -> None:
        """Remember the number of steps."""
        self._num_steps = num_steps

    def step(self, metrics: StepMetrics) -> None:
        """Write the step's line; the last step and skipped steps always get one."""
        now = time.monotonic()
        if (
            metrics.skipped_tensor is None
            and metrics.step < self._num_steps
            and now - self._last < self.interval_seconds
        ):
            return
        self._last = now
        self.message(describe_step(metrics, self._num_steps))

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Write the held-out loss."""
        self.message(f"step {metrics.step}/{self._num_steps}  held-out loss {metrics.eval_loss:.4f}")

    def message(self, text: str) -> None:
        """Write `text` as it is."""
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveProgress(Progress):
    """A bar that is redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._bar = RichProgress(
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[held_out]}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("first step ...", total=None, held_out="")

    def start(self, num_steps: int, first_step: int) -> None:
        """Show the bar."""
        self._bar.update(self._task, total=num_steps, completed=first_step)
        self._bar.start()

    def step(self, metrics: StepMetrics) -> None:
        """Advance the bar."""
        text = describe_step(metrics, int(self._bar.tasks[0].total or 0))
        self._bar.update(self._task, completed=metrics.step, description=text)
        if metrics.skipped_tensor is not None:
            self.message(text)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Show the held-out loss behind the bar."""
        self._bar.update(self._task, held_out=f"held-out loss {metrics.eval_loss:.4f}")

    def message(self, text: str) -> None:
        """Write `text` above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._bar.stop()


def terminal_progress(stream: TextIO | None = None) -> Progress:
    """Return the display that fits `stream` (stderr by default): live on a terminal, lines otherwise."""
    stream = stream or sys.stderr
    return LiveProgress(stream) if stream.isatty() else LineProgress(stream)


def describe_step(metrics: StepMetrics, num_steps: int) -> str:
    """Return the step in one line: "step 12/300  loss 1.2345  131 tokens/s  4:05 left  812 MiB"."""
    parts = [f"step {metrics.step}/{num_steps}", f"loss {metrics.loss:.4f}"]
    if metrics.skipped_tensor is not None:
        parts.append(f"SKIPPED: the gradient of {metrics.skipped_tensor} is not finite")
    parts.append(f"{metrics.tokens_per_second:,.0f} tokens/s")
    parts.append(f"{describe_seconds(metrics.eta_seconds)} left")
    if metrics.memory_mib is not None:
        card = "" if metrics.card_mib is None else f" (card {metrics.card_mib:,.0f})"
        parts.append(f"{metrics.memory_mib:,.0f} MiB{card}")
    return "  ".join(parts)


def describe_seconds(seconds: float) -> str:
    """Return a time as 0:07, 4:05 or 2:03:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
