"""The training loop: rows -> micro-batches -> optimiser steps; held-out losses, metrics, checkpoints, a clean stop.

Everything that a step depends on is a function of (seed, step): which rows it takes, its learning rate, the seeds of
its dropout. So a resumed run takes the same steps as one that was never stopped.
"""

import hashlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from pyggtrain.data.encode import Example
from pyggtrain.data.order import epoch_order
from pyggtrain.nn.batch import Batch
from pyggtrain.training.checkpoint import Checkpoint, Origin, check_same_run, save_checkpoint
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.metrics import EvalMetrics, MetricsFile, StepMetrics, memory_mib, read_metrics
from pyggtrain.training.optim import LossModule, Optimizer, StepResult, StopRequested
from pyggtrain.training.output import OutputFiles
from pyggtrain.training.progress import Progress
from pyggtrain.training.schedule import learning_rate


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run stopped between two steps and its checkpoint is written."""


@dataclass(frozen=True)
class TrainSummary:
    """Outcome of a run.

    Attributes:
        num_steps: optimiser steps of the whole run.
        loss: mean training loss of the last logged steps, in nats per supervised token.
        first_eval_loss, eval_loss: held-out loss before the first and after the last step; None without held-out rows.
        num_skipped: steps skipped because of gradients that were not finite.
        num_tokens, seconds: tokens computed in training, and wall time, since the run started or was resumed.
    """

    num_steps: int
    loss: float
    first_eval_loss: float | None
    eval_loss: float | None
    num_skipped: int
    num_tokens: int
    seconds: float


class Trainer:
    """Trains named parameters of a model on encoded rows.

    Args:
        model: what computes the loss; a `torch.nn.Module`, so that dropout is off while held-out losses are computed.
        parameters: name -> float32 tensor that the model uses and that requires a gradient.
        rows: encoded training rows, at least one.
        held_out: encoded rows that are never trained on; may be empty.
        config: settings.
        files: where to write.
        base_sha256: hash of the base file's header.
        data_sha256: hash of the encoded rows.
        started: when the run was started first (ISO 8601).
        resume_from: state to continue from; None starts anew.
        device: of the parameters.
        progress: told about each step.
    """

    def __init__(
        self,
        model: LossModule,
        parameters: Mapping[str, torch.Tensor],
        rows: Sequence[Example],
        held_out: Sequence[Example],
        *,
        config: TrainConfig,
        files: OutputFiles,
        base_sha256: str,
        data_sha256: str,
        started: str,
        resume_from: Checkpoint | None,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.model, self.parameters, self.rows, self.held_out = model, dict(parameters), rows, held_out
        self.config, self.files, self.device, self.progress = config, files, device, progress
        self.optimizer = Optimizer(self.parameters, config)
        self.steps_per_epoch = math.ceil(len(rows) / config.step_rows)
        self.num_steps = count_steps(config, len(rows))
        self.origin = Origin.of(config, base_sha256, data_sha256, self.num_steps)
        self.started, self.resume_from = started, resume_from

    def run(self) -> TrainSummary:
        """Train to the last step.

        Raises:
            TrainingInterrupted: Ctrl-C or SIGTERM; the checkpoint is written and names no half-done step.
            NonFiniteError: gradients stayed not finite.
            ConfigError: the checkpoint to resume from belongs to another run.
            OutputError: metrics or checkpoint cannot be written.
        """
        done = self._restore(self.resume_from) if self.resume_from is not None else 0
        self._metrics = MetricsFile(self.files.metrics, first_step=done)
        log = _StepLog(self.num_steps, self.device)
        self.progress.start(self.num_steps, done)
        try:
            with _stop_requests() as stop_requested:
                self._evaluate(done, stop_requested)
                while done < self.num_steps:
                    started = time.perf_counter()
                    result = self._step(done, stop_requested)
                    rate = learning_rate(done, self.config, self.num_steps)
                    done += 1
                    log.add(result, time.perf_counter() - started)
                    is_last, is_skipped = done == self.num_steps, result.non_finite is not None
                    if is_last or is_skipped or _is_due(self.config.logging_steps, done):
                        line = log.line(done, done / self.steps_per_epoch, rate)
                        self._metrics.write(line)
                        self.progress.step(line)
                    self._evaluate(done, stop_requested)
                    if is_last or _is_due(self.config.save_steps, done):
                        self._save(done)
                if stop_requested():
                    raise StopRequested
        except StopRequested:
            self._save(done)
            raise TrainingInterrupted(
                f"Stopped after step {done} of {self.num_steps}; the state is in {self.files.checkpoint}. "
                "Continue with the same command and --resume."
            ) from None
        finally:
            self.progress.stop()
        return self._summary(log)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of optimiser step `step`. The last step of an epoch takes what is left of it."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.rows), seed=self.config.seed, epoch=epoch)
        first = step_in_epoch * self.config.step_rows
        return self._batches([self.rows[index] for index in order[first : first + self.config.step_rows]])

    def _batches(self, rows: Sequence[Example]) -> list[Batch]:
        size = self.config.per_device_train_batch_size
        return [
            Batch.from_documents([(row.input_ids, row.labels) for row in rows[start : start + size]]).to(self.device)
            for start in range(0, len(rows), size)
        ]

    def _step(self, step: int, stop_requested: Callable[[], bool]) -> StepResult:
        batches = self.micro_batches(step)
        return self.optimizer.step(
            self.model,
            batches,
            learning_rate=learning_rate(step, self.config, self.num_steps),
            seeds=[_fold(self.config.seed, step, index) for index in range(len(batches))],
            should_stop=stop_requested,
        )

    def _evaluate(self, done: int, stop_requested: Callable[[], bool]) -> None:
        """Compute the held-out loss if it is due after `done` steps and not yet known from before a resume."""
        is_due = done in (0, self.num_steps) or _is_due(self.config.eval_steps or self.steps_per_epoch, done)
        if not self.held_out or not is_due or done in self._eval_losses():
            return
        loss_total, num_targets = 0.0, 0
        self.model.eval()
        # Without no_grad the loss would make gradients in its forward pass.
        with torch.no_grad():
            for batch in self._batches(self.held_out):
                if stop_requested():
                    raise StopRequested
                loss_sum, count = self.model.loss(batch)
                loss_total, num_targets = loss_total + float(loss_sum), num_targets + count
        self.model.train()
        evaluated = EvalMetrics(step=done, eval_loss=loss_total / max(1, num_targets), eval_tokens=num_targets)
        self._metrics.write(evaluated)
        self.progress.evaluated(evaluated)

    def _eval_losses(self) -> dict[int, float]:
        return {line["step"]: line["eval_loss"] for line in read_metrics(self.files.metrics) if "eval_loss" in line}

    def _save(self, done: int) -> None:
        parameters = {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}
        checkpoint = Checkpoint(done, self.started, self.origin, parameters, self.optimizer.state_dict())
        save_checkpoint(self.files.checkpoint, checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> int:
        check_same_run(self.files.checkpoint, checkpoint.origin, self.origin)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(checkpoint.parameters[name])
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.progress.message(f"resumed after step {checkpoint.step} of {self.num_steps} from {self.files.checkpoint}")
        return checkpoint.step

    def _summary(self, log: "_StepLog") -> TrainSummary:
        eval_losses = self._eval_losses()
        losses = [line["loss"] for line in read_metrics(self.files.metrics) if "loss" in line]
        return TrainSummary(
            num_steps=self.num_steps,
            loss=math.nan if losses[-1] is None else losses[-1],
            first_eval_loss=eval_losses.get(0),
            eval_loss=eval_losses.get(self.num_steps),
            num_skipped=self.optimizer.num_skipped,
            num_tokens=log.num_tokens,
            seconds=log.seconds,
        )


def count_steps(config: TrainConfig, num_rows: int) -> int:
    """Return the optimiser steps of a run: `max_steps` if given, else those of all epochs, rounded up."""
    if config.max_steps is not None:
        return config.max_steps
    return math.ceil(config.num_train_epochs * math.ceil(num_rows / config.step_rows))


class _StepLog:
    """Sums up the steps between two lines of metrics."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.num_steps, self.device = num_steps, device
        self.started = time.perf_counter()
        self.num_tokens, self.num_steps_taken, self.seconds = 0, 0, 0.0
        self._results: list[StepResult] = []
        self._interval_seconds = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        self._results.append(result)
        self.num_steps_taken += 1
        self.num_tokens += result.num_tokens
        self.seconds += seconds
        self._interval_seconds += seconds

    def line(self, done: int, epoch: float, rate: float) -> StepMetrics:
        """Return the metrics of the steps since the last line; the gradient norm is the last step's."""
        results, seconds = self._results, self._interval_seconds
        self._results, self._interval_seconds = [], 0.0
        num_targets = sum(result.num_targets for result in results)
        num_tokens = sum(result.num_tokens for result in results)
        counted = [result for result in results if result.non_finite is None] or results
        loss = sum(result.loss * result.num_targets for result in counted) / max(
            1, sum(result.num_targets for result in counted)
        )
        return StepMetrics(
            step=done,
            epoch=epoch,
            loss=loss,
            learning_rate=rate,
            grad_norm=results[-1].grad_norm,
            tokens=num_tokens,
            supervised_tokens=num_targets,
            tokens_per_second=num_tokens / seconds,
            eta_seconds=(self.num_steps - done) * self.seconds / self.num_steps_taken,
            elapsed_seconds=time.perf_counter() - self.started,
            memory_mib=memory_mib(self.device),
            skipped_tensor=results[-1].non_finite,
        )


def _is_due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


def _fold(*numbers: int) -> int:
    """Return a seed below 2^63 that depends on every number; neighbouring inputs give unrelated seeds."""
    text = ",".join(str(number) for number in numbers).encode("ascii")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request that the loop asks for; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may handle signals; elsewhere the program around us decides.
        yield lambda: False
        return
    is_requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested:
            raise KeyboardInterrupt
        is_requested = True

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: is_requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
