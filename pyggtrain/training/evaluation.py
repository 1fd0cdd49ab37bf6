"""Held-out losses of a run: which was best, whether to go on, and the weights that had the best one."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig


class Evaluations:
    """Remembers the held-out losses of a run.

    They are part of the checkpoint, so that a resumed run stops where it would have stopped, with the weights that it
    would have kept.

    Args:
        config: patience, threshold, whether the best weights are kept.
        has_held_out: whether there are held-out rows.

    Attributes:
        losses: optimiser steps done -> held-out loss, in order.
        best_parameters: name -> float32 tensor on the CPU, as they were at the best step; None if they are not kept.

    Raises:
        ConfigError: a setting needs held-out rows and there are none.
    """

    def __init__(self, config: TrainConfig, *, has_held_out: bool) -> None:
        for name, is_set in (
            ("early_stopping_patience", config.early_stopping_patience is not None),
            ("load_best_model_at_end", config.load_best_model_at_end),
        ):
            if is_set and not has_held_out:
                raise ConfigError(
                    f"{name}: needs held-out rows, and there are none. Give eval_data, or enough rows for eval_split."
                )
        self._config = config
        self.losses: dict[int, float] = {}
        self.best_parameters: dict[str, torch.Tensor] | None = None

    def add(self, step: int, loss: float, parameters: Mapping[str, torch.Tensor]) -> None:
        """Note the held-out loss of the parameters after `step` optimiser steps."""
        self.losses[step] = loss
        if self._config.load_best_model_at_end and self.best_step == step:
            self.best_parameters = {name: value.detach().cpu().clone() for name, value in parameters.items()}

    @property
    def best_step(self) -> int | None:
        """The step with the lowest held-out loss, the first one among equals; None before the first."""
        finite = {step: loss for step, loss in self.losses.items() if math.isfinite(loss)}
        return min(finite, key=finite.__getitem__) if finite else None

    @property
    def is_over(self) -> bool:
        """Whether the held-out loss has not become better `early_stopping_patience` times in a row."""
        if self._config.early_stopping_patience is None:
            return False
        best, num_worse = math.inf, 0
        for loss in self.losses.values():
            if loss < best - self._config.early_stopping_threshold:
                best, num_worse = loss, 0
            else:
                num_worse += 1
        return num_worse >= self._config.early_stopping_patience

    def state_dict(self) -> dict[str, Any]:
        """Return losses and best parameters."""
        return {"losses": dict(self.losses), "best_parameters": self.best_parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.losses, self.best_parameters = dict(state["losses"]), state["best_parameters"]
