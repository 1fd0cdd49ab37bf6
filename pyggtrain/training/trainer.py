"""The training loop: rows -> micro-batches -> optimiser steps; held-out losses, checkpoints, a clean stop.

Everything that a step depends on is a function of (seed, step): which rows it takes, its learning rate, the seeds of
its dropout and noise. So a resumed run takes the same steps as one that was never stopped, and several processes that
share a step's micro-batches compute what one alone would.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.training.batches import Batches
from pyggtrain.training.checkpoint import Checkpoint, Origin, check_same_run, joined, on_cpu, save_checkpoint
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.evaluation import Evaluations
from pyggtrain.training.interrupts import StopRequested, TrainingInterrupted, stop_requests
from pyggtrain.training.metrics import EvalMetrics, LoggedStep, StepLog
from pyggtrain.training.objectives import Objective
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.output import OutputFiles, remove_leftovers
from pyggtrain.training.pipeline import Pipeline
from pyggtrain.training.processes import Processes, fingerprint
from pyggtrain.training.progress import Progress
from pyggtrain.training.schedule import learning_rate
from pyggtrain.training.step_graph import StepGraphs, can_graph
from pyggtrain.training.trackers import MetricsFile, Together

# Held-out micro-batches that are on the way through the processes of a split model at the same time.
_HELD_OUT_AT_ONCE = 8


@dataclass(frozen=True)
class TrainSummary:
    """Outcome of a run.

    Attributes:
        num_steps: optimiser steps taken.
        num_planned_steps: optimiser steps that the settings asked for; more than `num_steps` after an early stop.
        loss: mean training loss of the last logged steps, over the objective's units (nats per supervised token).
        first_eval_loss, eval_loss: held-out loss before the first step, and of the weights in the adapter; None without
            held-out rows.
        best_step: the step whose weights are in the adapter, if the best ones were asked for.
        num_skipped: steps skipped because of gradients that were not finite.
        num_tokens, seconds: tokens computed in training, and wall time, since the run started or was resumed.
    """

    num_steps: int
    num_planned_steps: int
    loss: float
    first_eval_loss: float | None
    eval_loss: float | None
    best_step: int | None
    num_skipped: int
    num_tokens: int
    seconds: float


class Trainer:
    """Trains named parameters of a model on encoded rows.

    Args:
        objective: what is minimised, and the model that computes it; a `torch.nn.Module`, so that dropout is off while
            held-out losses are computed.
        parameters: name -> float32 tensor that the model uses and that requires a gradient.
        rows: encoded training rows, at least one.
        held_out: encoded rows that are never trained on; may be empty.
        config: settings.
        files: where to write.
        base_sha256: hash of the base file, see `GGUFFile.sample_sha256`.
        data_sha256: hash of the encoded rows.
        held_out_sha256: hash of the rows of `eval_data`; None if held-out rows are part of the data.
        started: when the run was started first (ISO 8601).
        resume_from: state to continue from; None starts anew.
        device: of the parameters.
        progress: told about each step.
        processes: that share the micro-batches of each step; the first one writes and tells.
        pipeline: computes the micro-batches where the model is split over the processes; `parameters` are then those of
            this process's layers.
        other_parameters: those of the other processes' layers, which the first process takes over at the end.
        layers: of the processes, where the model is split.
        check_base: raises if the base file has changed; asked before each step and before its state is kept.
        memory_excess: asked after each step; says what was overstepped if the run takes more memory than it may.

    Raises:
        ConfigError: the rows or the held-out rows do not fit the settings.
    """

    def __init__(
        self,
        objective: Objective,
        parameters: Mapping[str, torch.Tensor],
        rows: Sequence[Any],
        held_out: Sequence[Any],
        *,
        config: TrainConfig,
        files: OutputFiles,
        base_sha256: str,
        data_sha256: str,
        held_out_sha256: str | None = None,
        started: str,
        resume_from: Checkpoint | None,
        device: torch.device,
        progress: Progress,
        processes: Processes | None = None,
        pipeline: Pipeline | None = None,
        other_parameters: Mapping[str, torch.Tensor] | None = None,
        layers: str | None = None,
        check_base: Callable[[], None] = lambda: None,
        memory_excess: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.check_base = check_base
        objective.check([*rows[:1], *held_out[:1]])
        self.objective, self.parameters, self.held_out = objective, dict(parameters), held_out
        self.config, self.files, self.device = config, files, device
        self.processes = processes or Processes()
        self.batches = Batches(objective, rows, held_out, config=config, device=device, processes=self.processes)
        self.progress = Together([MetricsFile(files.metrics), progress] if self.processes.is_first else [])
        self.optimizer = Optimizer(self.parameters, config, self.processes)
        self.optimizer.pipeline, self.other_parameters = pipeline, dict(other_parameters or {})
        if pipeline is None and can_graph(config, objective.model):
            self.optimizer.graphs = StepGraphs(objective.model, self.parameters, self.optimizer.pages)
        self.evaluations = Evaluations(config, has_held_out=len(held_out) > 0)
        self.num_steps = self.batches.num_steps
        self.origin = Origin.of(
            config,
            base_sha256,
            data_sha256,
            self.num_steps,
            held_out_sha256=held_out_sha256,
            num_processes=self.processes.count,
            layers=layers,
        )
        self.started, self.resume_from = started, resume_from
        self._loss = math.nan
        self.memory_excess = memory_excess

    def run(self) -> TrainSummary:
        """Train to the last step, or until the held-out loss says that it is enough; the parameters then hold what is
        to be saved.

        Raises:
            TrainingInterrupted: Ctrl-C or SIGTERM; the checkpoint is written and names no half-done step.
            NonFiniteError: gradients stayed not finite.
            UnsupportedError: the run took more memory than it may; the checkpoint is written.
            ConfigError: the checkpoint to resume from belongs to another run, or the processes differ.
            OutputError: metrics or checkpoint cannot be written.
            ProcessLostError: another process ended.
        """
        done = self._restore(self.resume_from) if self.resume_from is not None else 0
        # Nothing is written before every process has come this far.
        self._check_processes(done)
        if self.processes.is_first:
            remove_leftovers(self.files)
        log = StepLog(self.num_steps, self.device)
        self.progress.start(self.num_steps, done)
        try:
            with stop_requests() as stop_requested:
                self._evaluate(done, stop_requested)
                while done < self.num_steps and not self.evaluations.is_over:
                    done = self._step(done, stop_requested, log)
                    self._evaluate(done, stop_requested)
                    excess = self.memory_excess()
                    if self._is_end(done) or excess is not None or _is_due(self.config.save_steps, done):
                        self._save(done)
                    if excess is not None and not self._is_end(done):
                        raise UnsupportedError(
                            f"{excess} Stopped after step {done} of {self.num_steps}; the state is in "
                            f"{self.files.checkpoint}. Allow more and continue with --resume."
                        )
                if self.processes.any(stop_requested()):
                    raise StopRequested
        except StopRequested:
            self._save(done)
            raise TrainingInterrupted(
                f"Stopped after step {done} of {self.num_steps}; the state is in {self.files.checkpoint}. "
                "Continue with the same command and --resume."
            ) from None
        finally:
            self.progress.stop()
        self._take_saved_weights()
        if self.processes.is_split:
            self._take_over_parts()
        self.processes.leave()
        return self._summary(done, log)

    def _step(self, done: int, stop_requested: Callable[[], bool], log: StepLog) -> int:
        """Take one optimiser step and tell about it; return the number of finished steps."""
        self.check_base()
        started = time.perf_counter()
        step = self.batches.of_step(done)
        rate = learning_rate(done, self.config, self.num_steps)
        result = self.optimizer.step(
            self.objective,
            step.micro_batches,
            num_units=step.num_units,
            learning_rate=rate,
            seeds=step.seeds,
            should_stop=stop_requested,
        )
        done += 1
        seconds = time.perf_counter() - started
        log.add(LoggedStep(result, step.num_units, step.num_tokens, step.num_learnt, seconds))
        is_skipped = result.non_finite is not None
        if done == self.num_steps or is_skipped or _is_due(self.config.logging_steps, done):
            line = log.line(done, done / self.batches.steps_per_epoch, rate)
            self._loss = line.loss
            self.progress.step(line)
        return done

    def _is_end(self, done: int) -> bool:
        return done == self.num_steps or self.evaluations.is_over

    def _evaluate(self, done: int, stop_requested: Callable[[], bool]) -> None:
        """Compute the held-out loss if it is due after `done` steps and not yet known from before a resume."""
        is_due = done in (0, self.num_steps) or _is_due(self.config.eval_steps or self.batches.steps_per_epoch, done)
        if not self.held_out or not is_due or done in self.evaluations.losses:
            return
        with self.optimizer.saved_weights():
            loss, *values = self._held_out_means(stop_requested)
            self.evaluations.add(done, loss, self.parameters)
        metrics = dict(zip((f"eval_{name}" for name in self.objective.metrics), values, strict=True))
        num_learnt = sum(row.num_learnt for row in self.held_out)
        self.progress.evaluated(EvalMetrics(step=done, eval_loss=loss, eval_tokens=num_learnt, metrics=metrics))

    def _held_out_means(self, stop_requested: Callable[[], bool]) -> list[float]:
        """Return loss and the objective's metrics as means over the held-out rows' units."""
        totals = torch.zeros(len(self.objective.metrics) + 2, dtype=torch.float64, device=self.device)
        self.objective.model.eval()
        # Without no_grad the loss would make gradients in its forward pass.
        with torch.no_grad():
            if self.optimizer.pipeline is not None:
                batches = self.batches.held_out()
                while group := list(islice(batches, _HELD_OUT_AT_ONCE)):
                    self.optimizer.pipeline.add_losses(group, totals)
            else:
                for batch in self.batches.held_out():
                    if stop_requested():
                        totals[-1] = 1
                        break
                    loss_sum, values = self.objective.loss(batch)
                    totals[0] += loss_sum
                    totals[1:-1] += values
        self.objective.model.train()
        self.processes.sum_(totals)
        *sums, is_stopping = totals.tolist()
        if is_stopping:
            raise StopRequested
        return [total / max(1, self.batches.num_held_out_units) for total in sums]

    def _save(self, done: int) -> None:
        self.check_base()
        self.optimizer.settle()
        if self.processes.num_replicas > 1:
            # Replicas that have drifted apart would train something that no checkpoint holds.
            self.processes.check_same({f"weights after step {done}": fingerprint(self.parameters)})
        parameters = {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}
        checkpoint = Checkpoint(
            step=done,
            started=self.started,
            origin=self.origin,
            parameters=parameters,
            optimizer=self.optimizer.state_dict(),
            evaluations=self.evaluations.state_dict(),
            loss=self._loss,
        )
        if self.processes.is_split and (parts := self.processes.gather(on_cpu(checkpoint))) is not None:
            checkpoint = joined(parts)
        if self.processes.is_first:
            save_checkpoint(self.files.checkpoint, checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> int:
        check_same_run(self.files.checkpoint, checkpoint.origin, self.origin)
        _copy(checkpoint.parameters, self.parameters)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.evaluations.load_state_dict(checkpoint.evaluations)
        self._loss = checkpoint.loss
        self.progress.message(f"resumed after step {checkpoint.step} of {self.num_steps} from {self.files.checkpoint}")
        return checkpoint.step

    def _check_processes(self, done: int) -> None:
        origin = self.origin
        self.processes.check_same(
            {
                **origin.settings,
                "base file": origin.base_sha256,
                "data": origin.data_sha256,
                "torch": torch.__version__,
                "steps done": done,
                "weights": fingerprint(self.parameters) if self.processes.num_replicas > 1 else None,
            }
        )

    def _take_saved_weights(self) -> None:
        self.optimizer.finish()
        if self.evaluations.best_parameters is not None:
            _copy(self.evaluations.best_parameters, self.parameters)

    def _take_over_parts(self) -> None:
        """Let the first process have the weights of all layers."""
        own = {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}
        for part in self.processes.gather(own) or ():
            _copy(part, {name: value for name, value in self.other_parameters.items() if name in part})

    def _summary(self, done: int, log: StepLog) -> TrainSummary:
        losses = self.evaluations.losses
        best = self.evaluations.best_step if self.evaluations.best_parameters is not None else None
        return TrainSummary(
            num_steps=done,
            num_planned_steps=self.num_steps,
            loss=self._loss,
            first_eval_loss=losses.get(0),
            eval_loss=losses.get(done if best is None else best),
            best_step=best,
            num_skipped=self.optimizer.num_skipped,
            num_tokens=log.num_tokens,
            seconds=log.seconds,
        )


def _copy(source: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(source[name])


def _is_due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0
