"""One optimiser step: exact token normalisation, non-finite guard, clipping, AdamW on float32 masters.

Loss and gradient of a step are means over the supervised tokens of the *whole* step:

    loss = sum over micro-batches of loss_sum / N,   N = supervised tokens of all micro-batches together

N is known before the first micro-batch runs, because the micro-batches of a step are collected first. So the result
does not depend on how the rows are cut up (the mean of per-micro-batch means weighs short rows too much), and a
micro-batch without supervised tokens adds nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pyggtrain.errors import PyggtrainError
from pyggtrain.nn.batch import Batch
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.step_graph import StepGraphs


class LossModule(Protocol):
    """The face of a model that training needs."""

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Return the sum of cross-entropies over the supervised tokens (float32 scalar) and their number."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Turn dropout on."""
        ...

    def eval(self) -> Any:
        """Turn dropout off."""
        ...


class NonFiniteError(PyggtrainError):
    """Gradients were not finite for several steps in a row."""


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """A stop was asked for between two micro-batches; nothing has changed since the last finished step."""


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step did.

    Attributes:
        loss: mean cross-entropy in nats over the supervised tokens of the step.
        grad_norm: L2 norm of all gradients before clipping.
        num_tokens: tokens computed.
        num_targets: supervised tokens.
        non_finite: name of the first tensor whose gradient is not finite; the step was then skipped. None: the step was
            taken.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    num_targets: int
    non_finite: str | None


class Optimizer:
    """AdamW over named float32 parameters, with the guard against non-finite gradients.

    Args:
        parameters: name -> float32 leaf tensor.
        config: betas, epsilon, weight decay, largest gradient norm.

    Raises:
        TypeError: a parameter is not float32. bfloat16 has 8 bits, so updates below 0.4 % of a weight would round to
            nothing.
    """

    max_skipped_in_a_row = 5

    def __init__(self, parameters: Mapping[str, torch.Tensor], config: TrainConfig) -> None:
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise TypeError(f"{name} is {parameter.dtype}; adapter weights are float32")
        self.parameters = dict(parameters)
        self.max_grad_norm = config.max_grad_norm
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.graphs: StepGraphs | None = None
        self._adamw = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(
        self,
        model: LossModule,
        micro_batches: Sequence[Batch],
        *,
        learning_rate: float,
        seeds: Sequence[int],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Run forward and backward over all micro-batches, then update the parameters once.

        Args:
            model: what computes the loss.
            micro_batches: all micro-batches of the step.
            learning_rate: of this step.
            seeds: one for each micro-batch: torch's generators are set to it, so dropout depends on the step alone and
                not on what ran before (resuming needs no generator state).
            should_stop: asked before each micro-batch.

        Raises:
            StopRequested: `should_stop` said so; no parameter has changed.
            NonFiniteError: the gradients were not finite in `max_skipped_in_a_row` steps in a row.
        """
        num_targets = sum(batch.num_targets for batch in micro_batches)
        loss_total = torch.zeros(())
        self.clear_gradients()
        for batch, seed in zip(micro_batches, seeds, strict=True):
            if should_stop():
                self.clear_gradients()
                raise StopRequested
            # Without a supervised token the sum is zero and so is its gradient; some kernels refuse such an empty
            # product.
            if batch.num_targets == 0:
                continue
            torch.manual_seed(seed)
            # Kept on the device: reading it here would make the host wait for every micro-batch.
            loss_total = loss_total + self._backward(model, batch, num_targets)
        grad_norm = self._clip()
        loss = float(loss_total)
        non_finite = None if math.isfinite(grad_norm) and math.isfinite(loss) else self._first_non_finite()
        if non_finite is None:
            self._update(learning_rate)
        else:
            self._skip(non_finite)
        self.clear_gradients()
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        return StepResult(loss, grad_norm, num_tokens, num_targets, non_finite)

    def _backward(self, model: LossModule, batch: Batch, num_targets: int) -> torch.Tensor:
        """Add one micro-batch's gradients; return its part of the step's mean loss."""
        if self.graphs is not None:
            return self.graphs.add_gradients(batch, 1 / num_targets)
        loss_sum, _ = model.loss(batch)
        mean = loss_sum / num_targets
        mean.backward()  # type: ignore[no-untyped-call]
        return mean.detach()

    def clear_gradients(self) -> None:
        """Free all gradients, or empty them where CUDA graphs add to them."""
        if self.graphs is not None:
            self.graphs.clear()
        else:
            self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's moments and step count by parameter name, and how many steps were skipped."""
        moments = {name: dict(self._adamw.state[parameter]) for name, parameter in self.parameters.items()}
        return {"moments": moments, "num_skipped": self.num_skipped, "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, copying each moment to the device of its parameter."""
        for name, moments in state["moments"].items():
            parameter = self.parameters[name]
            self._adamw.state[parameter] = {key: value.to(parameter.device) for key, value in moments.items()}
        self.num_skipped = state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]

    def _clip(self) -> float:
        """Scale gradients down to `max_grad_norm` (0: leave them); return the norm before."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(gradients)
        norm = float(total_norm)
        if self.max_grad_norm > 0 and math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.max_grad_norm, total_norm)
        return norm

    def _update(self, learning_rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.num_skipped_in_a_row = 0

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
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return "the loss or the norm of all gradients"
