"""One model over several processes, layer by layer, through torch.distributed.pipelining.

Process k holds a run of neighbouring layers; the micro-batches of a step go through all processes one after another, a
new one entering while the others are on their way (schedule 1F1B: Narayanan et al. 2021, 2104.04473; GPipe where a step
has fewer micro-batches than there are processes). So the cut may be anywhere, and unequal devices take unequal parts.

Every process reads all rows. What travels is the output of a process's last layer, and on the way back its gradient,
filled up to a common length, since torch's stages know one shape; the filler is cut off before anything is computed.
The last process has head and loss. An optimiser updates the pairs of its own process; the norm of all gradients, by
which they are clipped, and the decision to skip a step are common to all.

Losses and gradients are those of one process. Dropout is not: each process begins its part of a micro-batch with a seed
of its own, where one process would go on drawing.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pyggtrain.errors import ConfigError
from pyggtrain.nn import Batch, SplittableModel
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.objectives import OBJECTIVES, DocumentLogProbs, Objective
from pyggtrain.training.processes import Processes

# Lengths of what travels are rounded up to a multiple of this, so that few shapes come up.
_TOKEN_MULTIPLE = 128
# Stages with their buffers that are kept: one for each length and number of micro-batches.
_MAX_STAGES = 4


@dataclass(frozen=True)
class Split:
    """Which layers each process has.

    Attributes:
        starts: the first layer of each process, and the number of all layers.
    """

    starts: tuple[int, ...]

    def layers(self, rank: int) -> range:
        """Those of one process."""
        return range(self.starts[rank], self.starts[rank + 1])

    def __str__(self) -> str:
        return ", ".join(f"{first}-{end - 1}" for first, end in zip(self.starts, self.starts[1:], strict=False))


def split_layers(sizes: Sequence[float], shares: Sequence[float]) -> Split:
    """Cut layers into neighbouring parts whose sizes come near to the shares, none of them empty.

    Args:
        sizes: of each layer, in any unit.
        shares: of each process, in any unit.

    Raises:
        ConfigError: fewer layers than processes.
    """
    if len(sizes) < len(shares):
        raise ConfigError(
            f"split_mode: {len(shares)} processes for {len(sizes)} layers; needed: a layer for each. Start fewer."
        )
    starts, done, wanted = [0], 0.0, 0.0
    for rank, share in enumerate(shares[:-1]):
        wanted += share / sum(shares) * sum(sizes)
        end = starts[-1] + 1
        done += sizes[starts[-1]]
        # One layer at least has to be left for each process that follows.
        most = len(sizes) - (len(shares) - rank - 1)
        while end < most and done + sizes[end] / 2 <= wanted:
            done += sizes[end]
            end += 1
        starts.append(end)
    return Split((*starts, len(sizes)))


def shares_of(config: TrainConfig, processes: Processes, free_bytes: int | None) -> list[float]:
    """The share of the layers that each process gets: as set, or by the free memory of each device.

    Args:
        free_bytes: of this process's device; processes of one machine share that of a CPU.

    Raises:
        ConfigError: another number of shares than of processes.
    """
    if config.tensor_split:
        if len(config.tensor_split) != processes.count:
            raise ConfigError(
                f"tensor_split: {len(config.tensor_split)} shares for {processes.count} processes; needed: one for each"
            )
        return list(config.tensor_split)
    known = processes.all_gather(free_bytes)
    return [1.0] * processes.count if None in known else [float(number or 0) for number in known]


class _Tail:
    """The part of a model behind the last layer, as the loss module of an objective."""

    def __init__(self, model: SplittableModel) -> None:
        self._model = model
        self.x_TD: torch.Tensor | None = None

    @property
    def training(self) -> bool:
        return self._model.training

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        assert self.x_TD is not None, "the layers have run"
        return self._model.loss_of(self.x_TD, batch)

    def log_probs(self, batch: Batch) -> torch.Tensor:
        assert self.x_TD is not None, "the layers have run"
        return self._model.log_probs_of(self.x_TD, batch)

    def train(self, mode: bool = True) -> Any:
        return self._model.train(mode)

    def eval(self) -> Any:
        return self._model.eval()


class _Part(nn.Module):
    """This process's part of a micro-batch, as torch's stage calls it: (input, number of the micro-batch) -> output."""

    def __init__(self, pipeline: "Pipeline", num_tokens: int) -> None:
        super().__init__()
        # Behind a list: the stage moves and looks through its submodules, and the model's are placed already.
        self._pipeline = [pipeline]
        self._num_tokens = num_tokens

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self._pipeline[0].compute(x, int(index), self._num_tokens)


class Pipeline:
    """Forward and backward of micro-batches over all processes.

    Args:
        model: of which this process computes `own_layers`.
        config: settings.
        processes: of the run.
        device: of this process.
        width: numbers of a token that travel.
        dtype: theirs.
    """

    def __init__(
        self,
        model: SplittableModel,
        config: TrainConfig,
        processes: Processes,
        device: torch.device,
        *,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._processes, self._device = model, processes, device
        self._width, self._dtype = width, dtype
        self._tail = _Tail(model)
        self._objective: Objective = OBJECTIVES[config.method](self._tail, config)  # type: ignore[arg-type]
        self._schedules: OrderedDict[tuple[int, int, bool], Any] = OrderedDict()
        self._batches: Sequence[Batch] = ()
        self._seeds: Sequence[int] = ()
        self._num_units = 1
        self._totals = torch.zeros(0)
        self._error: Exception | None = None

    def add_gradients(
        self, batches: Sequence[Batch], seeds: Sequence[int], num_units: int, totals: torch.Tensor
    ) -> None:
        """Run micro-batches forward and backward, and add to the gradients of this process's pairs.

        Args:
            batches: of a step.
            seeds: one for each of them.
            num_units: what the loss of the step is a mean over.
            totals: loss and the objective's metrics of the step are added here on the last process, nothing on others.

        Raises:
            ProcessLostError: another process ended.
        """
        kept = [number for number, batch in enumerate(batches) if batch.num_targets]
        self._run([batches[number] for number in kept], [seeds[number] for number in kept], num_units, totals)

    def add_losses(self, batches: Sequence[Batch], totals: torch.Tensor) -> None:
        """Run micro-batches forward only; summed losses and metrics are added to `totals` on the last process."""
        with torch.no_grad():
            self._run(batches, (), 1, totals)

    def add_document_log_probs(self, batches: Sequence[Batch], found: list[torch.Tensor]) -> None:
        """Run micro-batches forward only; on the last process the log-probabilities of each one's documents, float64
        [B], are appended to `found`.
        """
        trained, self._objective = self._objective, DocumentLogProbs(self._tail, found)
        try:
            self.add_losses(batches, torch.zeros(2))
        finally:
            self._objective = trained

    def compute(self, x: torch.Tensor, number: int, num_tokens: int) -> torch.Tensor:
        """This process's part of micro-batch `number` of those at work.

        Args:
            x: [num_tokens, D] from the process before, filled up; the first process does not use it.
            number: of the micro-batch.
            num_tokens: that travel.

        Returns:
            [num_tokens, D] for the next process, filled up; on the last one the loss [1].
        """
        try:
            batch, rank = self._batches[number], self._processes.rank
            if self._seeds:
                # The first process draws what one alone would draw first: the noise on embeddings.
                torch.manual_seed(self._seeds[number] if rank == 0 else _fold(self._seeds[number], rank))
            x_TD = self._model.embed(batch) if rank == 0 else x[: batch.num_tokens]
            x_TD = self._model.run_own_layers(x_TD, batch)
            if rank + 1 < self._processes.count:
                return functional.pad(x_TD, (0, 0, 0, num_tokens - batch.num_tokens))
            self._tail.x_TD = x_TD
            loss_sum, values = self._objective.loss(batch)
            self._tail.x_TD = None
            mean = loss_sum / self._num_units
            self._totals[0] += mean.detach()
            self._totals[1:-1] += values / self._num_units
            return mean.reshape(1).float()
        except Exception as error:
            # So that a fault of this process is not taken for a lost connection.
            self._error = error
            raise

    def _run(self, batches: Sequence[Batch], seeds: Sequence[int], num_units: int, totals: torch.Tensor) -> None:
        if not batches:
            return
        self._batches, self._seeds, self._num_units, self._totals = batches, seeds, num_units, totals
        num_tokens = max(batch.num_tokens for batch in batches)
        num_tokens += -num_tokens % _TOKEN_MULTIPLE
        schedule = self._schedule(len(batches), num_tokens)
        numbers = torch.arange(len(batches))
        arguments = (numbers,) if self._processes.rank == 0 else ()
        is_last = self._processes.rank + 1 == self._processes.count
        target = numbers if is_last and torch.is_grad_enabled() else None
        self._error = None
        with self._processes.explained():
            try:
                schedule.step(*arguments, index=numbers, target=target)
            except RuntimeError:
                if self._error is None:
                    raise
        if self._error is not None:
            raise self._error

    def _schedule(self, num_batches: int, num_tokens: int) -> Any:
        """torch's schedule for so many micro-batches of so many tokens; every process asks for the same ones."""
        has_backward = torch.is_grad_enabled()
        key = num_batches, num_tokens, has_backward
        if key not in self._schedules:
            if len(self._schedules) >= _MAX_STAGES:
                self._schedules.popitem(last=False)
            self._schedules[key] = self._make_schedule(num_batches, num_tokens, has_backward)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make_schedule(self, num_batches: int, num_tokens: int, has_backward: bool) -> Any:
        # Importing takes a second, which runs without a split need not spend.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        rank, count = self._processes.rank, self._processes.count

        # What a stage sends back is decided by whether its example wants a gradient.
        travelling = torch.empty(num_tokens, self._width, dtype=self._dtype, device=self._device)
        loss = torch.empty(1, dtype=torch.float32, device=self._device)
        travelling.requires_grad_(has_backward)
        loss.requires_grad_(has_backward)
        stage = PipelineStage(
            _Part(self, num_tokens),
            rank,
            count,
            self._device,
            input_args=(torch.empty(1, dtype=torch.int64) if rank == 0 else travelling,),
            output_args=(loss if rank + 1 == count else travelling,),
        )
        kind = Schedule1F1B if has_backward and num_batches >= count else ScheduleGPipe
        loss_of: Callable[..., torch.Tensor] | None = (lambda output, target: output.sum()) if has_backward else None
        return kind(stage, num_batches, loss_fn=loss_of, scale_grads=False)


def _fold(seed: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed},{rank}".encode("ascii")).digest()[:8], "little") >> 1
