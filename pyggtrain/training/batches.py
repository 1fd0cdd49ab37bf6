"""The rows of each optimiser step, cut into micro-batches and spread over processes: a function of seed and step."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pyggtrain.nn.batch import Batch
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.data import micro_batches
from pyggtrain.training.objectives import Objective
from pyggtrain.training.processes import Processes
from pyggtrain.training.reference_log_probs import ReferencedPair
from pyggtrain.training.step_graph import can_graph, filled_up, max_tokens


@dataclass(frozen=True)
class Step:
    """What one optimiser step computes.

    Attributes:
        micro_batches: those of this process.
        seeds: one for each of them. They depend on the micro-batch's place in the whole step, so dropout is the same
            however many processes share the step.
        num_units: what the loss is a mean over, on all processes.
        num_tokens, num_learnt: tokens, and learnt ones, on all processes.
    """

    micro_batches: list[Batch]
    seeds: list[int]
    num_units: int
    num_tokens: int
    num_learnt: int


class Batches:
    """Training and held-out rows of a run as micro-batches.

    Args:
        objective: knows the documents of a row, and what its loss is a sum over.
        rows: encoded training rows, at least one.
        held_out: encoded rows that are never trained on.
        config: sizes and seed.
        device: where batches go.
        processes: n copies of the model share a step: copy k takes the micro-batches k, k + n, ...

    Attributes:
        steps_per_epoch: optimiser steps in one pass over the rows; the last one takes what is left.
        num_steps: optimiser steps of the run.
    """

    def __init__(
        self,
        objective: Objective,
        rows: Sequence[Any],
        held_out: Sequence[Any],
        *,
        config: TrainConfig,
        device: torch.device,
        processes: Processes,
    ) -> None:
        self._objective, self._rows, self._held_out = objective, rows, held_out
        self._config, self._device, self._processes = config, device, processes
        self._fills_up = can_graph(config, objective.model)
        self._max_tokens = max_tokens(objective.model)
        self._plan = micro_batches(config, rows, processes.num_replicas)
        self.steps_per_epoch = self._plan.steps_per_epoch
        self.num_steps = count_steps(config, self._plan.num_units, processes.num_replicas)

    def of_step(self, step: int) -> Step:
        """Return what optimiser step `step` computes, counted from 0 over all epochs."""
        micro_batches = self.rows_of_step(step)
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        own = self._own(list(enumerate(micro_batches)))
        return Step(
            micro_batches=[self._batch(micro_batch) for _, micro_batch in own],
            seeds=[_fold(self._config.seed, step, index) for index, _ in own],
            num_units=self._objective.num_units(rows),
            num_tokens=sum(row.num_tokens for row in rows),
            num_learnt=sum(row.num_learnt for row in rows),
        )

    def rows_of_step(self, step: int) -> list[list[Any]]:
        """Return the rows of each micro-batch of a step, over all processes."""
        return [[self._rows[index] for index in indices] for indices in self._plan.of_step(step)]

    def held_out(self) -> Iterator[Batch]:
        """Yield the held-out micro-batches of this process."""
        for rows in self._own(self._cut(self._held_out)):
            yield self._batch(rows)

    @cached_property
    def num_held_out_units(self) -> int:
        """What the held-out loss is a mean over, on all processes."""
        return self._objective.num_units(self._held_out)

    def _batch(self, rows: Sequence[Any]) -> Batch:
        documents = [document for row in rows for document in self._objective.documents(row)]
        batch = Batch.from_documents(documents)
        if all(isinstance(row, ReferencedPair) for row in rows):
            sums = [value for row in rows for value in row.reference]
            batch = replace(batch, reference_B=torch.tensor(sums, dtype=torch.float64))
        return (filled_up(batch, self._max_tokens) if self._fills_up else batch).to(self._device)

    def _cut(self, rows: Sequence[Any]) -> list[list[Any]]:
        size = self._config.micro_batch_size
        return [list(rows[start : start + size]) for start in range(0, len(rows), size)]

    def _own(self, items: list[Any]) -> list[Any]:
        return items[self._processes.replica :: self._processes.num_replicas]


def count_steps(config: TrainConfig, num_rows: int, num_processes: int = 1) -> int:
    """Return the optimiser steps of a run: `max_steps` if given, else those of all epochs, rounded up.

    Args:
        num_rows: rows in one epoch, or packs.
    """
    if config.max_steps is not None:
        return config.max_steps
    return math.ceil(config.num_train_epochs * math.ceil(num_rows / (config.step_rows * num_processes)))


def _fold(*numbers: int) -> int:
    """Return a seed below 2^63 that depends on every number; neighbouring inputs give unrelated seeds."""
    text = ",".join(str(number) for number in numbers).encode("ascii")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
