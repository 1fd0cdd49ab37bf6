"""One optimiser step: forward and backward over its micro-batches, then one update of the parameters.

The loss of a step is a mean over all its units (learnt tokens, or pairs), whatever the cut into micro-batches:

    loss = Σ over micro-batches of loss_sum / N,   N = units of all micro-batches together

In float16 gradients of activations would lose their small numbers to a factor 1 / N, so there backward starts from
loss_sum, whose gradient does not depend on N, and the float32 gradients of the pairs are divided at the end.

N is known before the first micro-batch runs, because the rows of a step are known. So the result does not depend on how
the rows are cut up or spread over processes (the mean of per-micro-batch means weighs short rows too much), and a
micro-batch without supervised tokens adds nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pyggtrain.errors import ConfigError, PyggtrainError
from pyggtrain.nn.batch import Batch
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.interrupts import StopRequested
from pyggtrain.training.objectives import Objective
from pyggtrain.training.optimizers import PAGED, DecidesOnDevice, make_optimizer
from pyggtrain.training.paging import Pages
from pyggtrain.training.pipeline import Pipeline
from pyggtrain.training.processes import Processes
from pyggtrain.training.step_graph import StepGraphs


class NonFiniteError(PyggtrainError):
    """Gradients were not finite for several steps in a row."""


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step did, over all processes.

    Attributes:
        loss: mean over the units of the step; for "sft" cross-entropy in nats per learnt token.
        grad_norm: L2 norm of all gradients before clipping.
        metrics: means over the units of the objective's further numbers.
        non_finite: name of the first tensor whose gradient is not finite; the step was then skipped. None: the step was
            taken.
    """

    loss: float
    grad_norm: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    non_finite: str | None = None


class Optimizer:
    """One of `optimizers.OPTIMIZERS` over named float32 parameters, with the guard against non-finite gradients.

    Args:
        parameters: name -> float32 leaf tensor.
        config: which optimiser, its settings, largest gradient norm.
        processes: whose gradients are summed.

    Attributes:
        divides_late: whether gradients are divided by the number of units after backward, not before.
        pages: where gradients and moments are, if they wait on the host (`optimizers.PAGED`, on a GPU). With `graphs`
            an update then runs beside the next step: call `settle` before the parameters are read.

    Raises:
        TypeError: a parameter is not float32. bfloat16 has 8 bits, so updates below 0.4 % of a weight would round to
            nothing.
        ConfigError: the optimiser is not available here, or is paged and the run has several processes.
    """

    max_skipped_in_a_row = 5

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], config: TrainConfig, processes: Processes | None = None
    ) -> None:
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise TypeError(f"{name} is {parameter.dtype}; adapter weights are float32")
        self.parameters = dict(parameters)
        self.max_grad_norm = config.max_grad_norm
        self.processes = processes or Processes()
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.graphs: StepGraphs | None = None
        self.divides_late = config.compute == "fp16"
        self.pipeline: Pipeline | None = None
        self._optimizer = make_optimizer(self.parameters, config)
        self.pages: Pages | None = None
        if config.optim in PAGED and next(iter(self.parameters.values())).is_cuda:
            if self.processes.count > 1:
                raise ConfigError(
                    f"optim: {config.optim} keeps gradients on the host, where {self.processes.count} processes cannot "
                    f"sum them. Set optim to {config.optim.removeprefix('paged_')}, or use one process."
                )
            self.pages = Pages(list(self.parameters.values()), self._optimizer)

    def step(
        self,
        objective: Objective,
        micro_batches: Sequence[Batch],
        *,
        num_units: int,
        learning_rate: float,
        seeds: Sequence[int],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Run forward and backward over all micro-batches, then update the parameters once.

        Args:
            objective: what is minimised.
            micro_batches: those of the step that this process computes.
            num_units: of the whole step, over all processes.
            learning_rate: of this step.
            seeds: one for each micro-batch: torch's generators are set to it, so dropout depends on the step alone and
                not on what ran before (resuming needs no generator state).
            should_stop: asked before each micro-batch.

        Raises:
            StopRequested: `should_stop` said so on some process; no parameter has changed.
            NonFiniteError: the gradients were not finite in `max_skipped_in_a_row` steps in a row.
            ProcessLostError: another process ended.
        """
        device = next(iter(self.parameters.values())).device
        # Loss, the objective's metrics, whether to stop: kept on the device, since reading them here would make the
        # host wait for every micro-batch.
        totals = torch.zeros(len(objective.metrics) + 2, device=device)
        is_stopping = False
        scale = 1.0 if self.divides_late else 1 / max(1, num_units)
        self.clear_gradients()
        if self.pipeline is not None:
            # A micro-batch that has begun must go through all processes, so nobody stops in between.
            if self.processes.any(should_stop()):
                raise StopRequested
            self.pipeline.add_gradients(micro_batches, seeds, num_units, totals)
            micro_batches = seeds = ()
        for batch, seed in zip(micro_batches, seeds, strict=True):
            if should_stop():
                is_stopping = True
                totals[-1] = 1
                break
            # Without a supervised token the sum is zero and so is its gradient; some kernels refuse such an empty
            # product.
            if batch.num_targets == 0:
                continue
            torch.manual_seed(seed)
            if self.graphs is not None:
                totals[0] += self.graphs.add_gradients(batch, scale)
                continue
            loss_sum, values = objective.loss(batch)
            loss = loss_sum if self.divides_late else loss_sum / num_units
            loss.backward()  # type: ignore[no-untyped-call]
            totals[0] += loss.detach()
            totals[1:-1] += values / num_units
        if self.divides_late and num_units > 0 and self.pipeline is None:
            totals[0] /= num_units
        if self.pages is not None:
            self.pages.join()
        elif self.divides_late and num_units > 0 and self.pipeline is None:
            torch._foreach_div_([one.grad for one in self.parameters.values() if one.grad is not None], num_units)
        if self.pipeline is not None:
            self.processes.sum_(totals)
        elif self.processes.count > 1:
            self._sum_over_processes(totals)
            is_stopping = bool(totals[-1] > 0)
        if is_stopping:
            self.clear_gradients()
            raise StopRequested
        if num_units == 0:
            self.clear_gradients()
        page_factor = 1 / max(1, num_units) if self.divides_late else 1.0
        result = self._update(totals, objective.metrics, learning_rate, page_factor)
        self.clear_gradients()
        return result

    def clear_gradients(self) -> None:
        """Free all gradients, or empty them where CUDA graphs add to them."""
        if self.pages is not None:
            self.pages.clear()
        elif self.graphs is not None:
            self.graphs.clear()
        else:
            self._optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Let what reads the parameters from now on see the last update."""
        if self.pages is not None:
            self.pages.settle()

    @contextmanager
    def saved_weights(self) -> Iterator[None]:
        """Let the parameters hold what would be saved, for the time of a `with` block.

        For most optimisers these are the parameters themselves, for a schedule-free one the average of its steps.
        Afterwards they are copied back, and not computed back, so that looking at them changes no bit of the run.
        """
        self.settle()
        if not self._has_average:
            yield
            return
        trained = [parameter.detach().clone() for parameter in self.parameters.values()]
        self.finish()
        try:
            yield
        finally:
            self._optimizer.train()  # type: ignore[attr-defined]
            with torch.no_grad():
                for parameter, value in zip(self.parameters.values(), trained, strict=True):
                    parameter.copy_(value)

    def finish(self) -> None:
        """Let the parameters hold what is to be saved, for good: no step follows."""
        self.settle()
        if self._has_average:
            self._optimizer.eval()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return what the optimiser keeps by parameter name and by group, and how many steps were skipped."""
        return {
            "state": {name: self._state_of(parameter) for name, parameter in self.parameters.items()},
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._optimizer.param_groups
            ],
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, copying each tensor to the device of its parameter.

        Not by torch's own method, which casts everything to the parameter's type: codes of 8 bits would become floats.
        """
        for name, parameter in self.parameters.items():
            kept = state["state"][name]
            if self.pages is not None:
                self.pages.set_state(parameter, kept)
                continue
            self._optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
                for key, value in kept.items()
            }
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update(values)
        self.num_skipped = state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return dict(self._optimizer.state[parameter]) if self.pages is None else self.pages.state_of(parameter)

    @property
    def _has_average(self) -> bool:
        return "train_mode" in self._optimizer.param_groups[0]

    def _sum_over_processes(self, totals: torch.Tensor) -> None:
        """Sum gradients and totals over all processes, in one tensor and so in one message."""
        parameters = list(self.parameters.values())
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters
        ]
        flat = self.processes.sum_(torch.cat([gradient.flatten() for gradient in (*gradients, totals)]))
        *pieces, summed = torch.split(flat, [tensor.numel() for tensor in (*parameters, totals)])
        for parameter, piece in zip(parameters, pieces, strict=True):
            if parameter.grad is None:
                parameter.grad = piece.view_as(parameter)
            else:
                parameter.grad.copy_(piece.view_as(parameter))
        totals.copy_(summed)

    def _update(
        self, totals: torch.Tensor, metrics: Sequence[str], learning_rate: float, page_factor: float
    ) -> StepResult:
        """Clip and update, unless something is not finite. Gradients on the host are `page_factor` too large."""
        if self.pages is None:
            gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            total_norm = torch.nn.utils.get_total_norm(gradients)
        else:
            total_norm = torch.linalg.vector_norm(self.pages.norms) * page_factor
        if self.pipeline is not None:
            total_norm = self.processes.sum_(total_norm.square()).sqrt()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_ratio"]
        if self._decides_on_device:
            self._update_on_device(totals[0], total_norm, page_factor)
        loss, *values, _, grad_norm = torch.cat([totals, total_norm.reshape(1).to(totals)]).tolist()
        non_finite = None if math.isfinite(grad_norm) and math.isfinite(loss) else self._first_non_finite()
        if non_finite is not None:
            if self._decides_on_device:
                self._take_back()
            self._skip(non_finite)
        else:
            if not self._decides_on_device:
                self._clip_and_step(total_norm, page_factor)
            self.num_skipped_in_a_row = 0
        return StepResult(loss, grad_norm, dict(zip(metrics, values, strict=True)), non_finite)

    @property
    def _decides_on_device(self) -> bool:
        """Whether the update can be launched before the host knows norm and loss."""
        return isinstance(self._optimizer, DecidesOnDevice) and next(iter(self.parameters.values())).is_cuda

    @property
    def _runs_beside(self) -> bool:
        """Whether the update runs beside the next step: graphs wait for each layer's part of it. What is launched
        kernel by kernel would want the update's memory for itself.
        """
        return self.graphs is not None and self.graphs.has_replayed

    def _clip_and_step(self, total_norm: torch.Tensor, page_factor: float) -> None:
        if self.pages is None:
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.max_grad_norm, total_norm)
            self._optimizer.step()
        elif self.max_grad_norm > 0:
            # As torch clips.
            self.pages.update(factor=(self.max_grad_norm / (total_norm + 1e-6)).clamp(max=1.0) * page_factor)
        else:
            self.pages.update(factor=page_factor)

    def _update_on_device(self, loss: torch.Tensor, total_norm: torch.Tensor, page_factor: float) -> None:
        """Update without waiting for the device."""
        assert isinstance(self._optimizer, DecidesOnDevice)
        limit = self.max_grad_norm if self.max_grad_norm > 0 else math.inf
        self._optimizer.grad_scale = ((total_norm + 1e-6) / limit).clamp(min=1.0)
        self._optimizer.found_inf = (~torch.isfinite(total_norm + loss)).float()
        if self.pages is None:
            self._optimizer.step()
        else:
            self.pages.update(factor=page_factor, beside=self._runs_beside)

    def _take_back(self) -> None:
        """Undo what the host has counted for a step that the device has left out."""
        states = self._optimizer.state.values() if self.pages is None else self.pages.states()
        assert isinstance(self._optimizer, DecidesOnDevice)
        for state in states:
            self._optimizer.take_back(state)

    def _skip(self, name: str) -> None:
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= self.max_skipped_in_a_row:
            raise NonFiniteError(
                f"{name}: {self.num_skipped_in_a_row} optimiser steps in a row gave a loss or gradient that is not "
                "finite; needed: finite numbers. Checkpoints hold finite values only. Lower learning_rate, or look for "
                'broken rows in the data; with compute="exact" the cause is not rounding.'
            )

    def _first_non_finite(self) -> str:
        if self.pages is not None:
            for name, norm in zip(self.parameters, self.pages.norms.tolist(), strict=True):
                if not math.isfinite(norm):
                    return name
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return "the loss or the norm of all gradients"
