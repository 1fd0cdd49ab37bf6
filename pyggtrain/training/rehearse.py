"""Every buffer of a run's first two optimiser steps, found from the header of the base file alone.

The model is loaded without memory (`ops.rehearsal`), gets its adapter, and the run's own optimiser takes a step with
its own micro-batches: nothing is computed and no weight is read, but each buffer is made and freed in the order of the
real run. So the plan follows from the program itself, for every architecture, checkpoint policy and optimiser, and no
formula has to be kept in step with them.
"""

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from pyggtrain import models
from pyggtrain.adapters.lora import LoraAdapter, LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch, Model
from pyggtrain.ops import rehearsal, workspace
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.masked_diffusion import objective_of
from pyggtrain.training.objectives import Document, Objective
from pyggtrain.training.optim import Optimizer

BASE, ADAPTER, OPTIMISER, GRADIENTS = "base file", "adapter", "optimiser", "gradients"
ACTIVATIONS, LOSS_CHUNK, WORKSPACE = "activations", "loss chunk", "workspace"
# Operations whose own buffers have a name in the plan.
_PART_OF_OPERATION = {"linear_cross_entropy": LOSS_CHUNK}


@dataclass(frozen=True)
class Trace:
    """Buffers in the order in which they are made and given back.

    Attributes:
        sizes: bytes of each.
        parts: what each is for.
        events: n >= 0: buffer n is made; -1 - n: it is given back.
    """

    sizes: Sequence[int]
    parts: Sequence[str]
    events: Sequence[int]

    def peak(self) -> dict[str, int]:
        """Bytes of each part when all together are the most."""
        live = most = most_at = 0
        for index, event in enumerate(self.events):
            live += self.sizes[event] if event >= 0 else -self.sizes[-1 - event]
            if live > most:
                most, most_at = live, index + 1
        totals: dict[str, int] = {}
        for event in self.events[:most_at]:
            buffer, sign = (event, 1) if event >= 0 else (-1 - event, -1)
            totals[self.parts[buffer]] = totals.get(self.parts[buffer], 0) + sign * self.sizes[buffer]
        return totals


class Tape:
    """Writes down buffers while a rehearsal runs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[str] = []
        self.events: list[int] = []
        # (number of events, buffer) of each gradient when it was there.
        self.gradients: list[tuple[int, int]] = []
        self._ignored: set[int] = set()
        # By the address of torch's own record: a fake storage has no data. The reference tells when it is gone.
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def made(self, storage: torch.UntypedStorage, operation: str) -> None:
        """See `rehearsal.NewStorage`."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if num_bytes == 0 or key in self._alive or key in self._ignored:
            return
        buffer = len(self.sizes)
        self.sizes.append(num_bytes)
        self.parts.append(_PART_OF_OPERATION.get(operation, ACTIVATIONS))
        self.events.append(buffer)
        self._alive[key] = buffer, weakref.ref(storage, lambda _: self._freed(key, buffer))

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out the file's own memory, which nobody makes. The tensors have to live as long as the tape."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def name(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Say what the buffers of some tensors are for."""
        for tensor in tensors:
            self.parts[self._buffer_of(tensor)] = part

    def name_gradient(self, gradient: torch.Tensor) -> None:
        """Say that a gradient is complete."""
        buffer = self._buffer_of(gradient)
        self.parts[buffer] = GRADIENTS
        self.gradients.append((len(self.events), buffer))

    def name_rest(self, part: str, *, since: int = 0) -> None:
        """Say what all buffers from number `since` on are for that exist and are called no more than "activations"."""
        for buffer, _ in self._alive.values():
            if buffer >= since and self.parts[buffer] == ACTIVATIONS:
                self.parts[buffer] = part

    def fork(self) -> "Tape":
        """A tape that goes on from here, while this one stays as it is."""
        tape = Tape()
        tape.sizes, tape.parts, tape.events = list(self.sizes), list(self.parts), list(self.events)
        tape._alive, tape._ignored = dict(self._alive), self._ignored
        return tape

    def _buffer_of(self, tensor: torch.Tensor) -> int:
        return self._alive[tensor.untyped_storage()._cdata][0]

    def _freed(self, key: int, buffer: int) -> None:
        del self._alive[key]
        self.events.append(-1 - buffer)


class Rehearsal:
    """A model and its adapter without memory, ready to rehearse steps.

    Args:
        file: the base; only its header is read.
        config: settings of the run.
        lora: what to train.

    Attributes:
        objective: what a step minimises.
        num_parameters: trained numbers.
        is_fused: all layers run as the halves of `ops.fused`.
        base_bytes: of the file's tensors.
        paths: of the file and its parts.

    Raises:
        UnsupportedError, GGUFError, ConfigError: as loading the model and attaching the adapter would raise them.
    """

    def __init__(self, file: GGUFFile, config: TrainConfig, lora: LoraConfig) -> None:
        self._config = config
        self._tape = Tape()
        self.paths = file.paths
        self.base_bytes = sum(tensor.num_bytes for tensor in file.tensors.values())
        header = self._header = GGUFFile.open(file.path)
        header.tensors = {
            name: replace(tensor, blocks=rehearsal.without_memory(tensor.blocks))
            for name, tensor in file.tensors.items()
        }
        self._tape.ignore(tensor.blocks for tensor in header.tensors.values())
        with self._on_stage(self._tape):
            self._model: Model = models.load(
                header, implementation=config.model_impl, compute=config.compute, is_checked=False
            )
            self._tape.name_rest(BASE)
            adapter: LoraAdapter = attach(self._model, lora, seed=config.seed)
            self._tape.name_rest(ADAPTER)
        self._model.neftune_noise_alpha = config.neftune_noise_alpha
        self._model.train()
        self.objective: Objective = objective_of(self._model, config, is_largest=True)
        self._parameters = {
            f"{name}.{half}": getattr(pair, half)
            for name, pair in adapter.pairs.items()
            for half in ("lora_a", "lora_b")
        }
        self.num_parameters = adapter.num_parameters
        layers = self._model.fused_layers
        self.is_fused = len(layers) == len(self._model.layers) and all(
            layer.can_fuse(torch.float32, torch.device("meta")) for layer in layers
        )

    def trace(self, policy: str, documents: Sequence[Document]) -> Trace:
        """The first two optimiser steps of a run whose micro-batches all hold these documents.

        Args:
            policy: see `nn.checkpointing`.
            documents: rows of the longest micro-batch.
        """
        tape = self._tape.fork()
        self._model.checkpoint_policy = policy
        batch = Batch.from_documents(documents)
        with self._on_stage(tape), self._gradients_named(tape):
            optimizer = Optimizer(self._parameters, self._config)
            before = len(tape.events)
            optimizer.step(
                self.objective,
                [batch],
                num_units=1,
                learning_rate=self._config.learning_rate,
                seeds=[0],
            )
            tape.name(workspace.held(), WORKSPACE)
            after_backward = tape.gradients[-1][0]
            tape.name_rest(OPTIMISER, since=1 + max(tape.events[:after_backward]))
            # Taken down while the optimiser's state is there.
            events = list(tape.events)
        step = events[before:]
        if self._config.gradient_accumulation_steps > 1:
            more = _onto_gradients(tape, step, before, after_backward)
            step = [*step[: after_backward - before], *more, *step[after_backward - before :]]
        return Trace(tape.sizes, tape.parts, [*events, *_again(tape, step)])

    @contextmanager
    def _gradients_named(self, tape: Tape) -> Iterator[None]:
        def name(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None, "the hook runs once the gradient is there"
            tape.name_gradient(parameter.grad)

        hooks = [parameter.register_post_accumulate_grad_hook(name) for parameter in self._parameters.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _on_stage(self, tape: Tape) -> Iterator[None]:
        # What loading says about the file, it will say again when the run loads it.
        log = logging.getLogger("pyggtrain")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with rehearsal.rehearsal(tape.made):
                yield
        finally:
            log.setLevel(level)


def _onto_gradients(tape: Tape, step: Sequence[int], before: int, after_backward: int) -> list[int]:
    """The events of a further micro-batch of a step: the same once more, but its gradients are added to those that are
    there and go at once.
    """
    going: dict[int, list[int]] = {}
    for num_events, buffer in tape.gradients:
        going.setdefault(num_events - before, []).append(buffer)
    passing = {-1 - event for event in step if event < 0}
    more = []
    for index, event in enumerate(step[: after_backward - before]):
        more += [-1 - buffer for buffer in going.pop(index, ())]
        more.append(event)
    more += [-1 - buffer for buffers in going.values() for buffer in buffers]
    # What backward had left is gone before the next micro-batch begins.
    left = {event for event in more if event >= 0} - {-1 - event for event in more if event < 0}
    return _again(tape, [*more, *(-1 - buffer for buffer in sorted(left & passing))])


def _again(tape: Tape, step: Sequence[int]) -> list[int]:
    """The events of a step once more, with new buffers for those that it gave back; those that it kept are there."""
    given_back = {-1 - event for event in step if event < 0}
    renamed: dict[int, int] = {}
    events = []
    for event in step:
        buffer = event if event >= 0 else -1 - event
        if buffer not in given_back:
            continue
        if event >= 0:
            renamed[buffer] = len(tape.sizes)
            tape.sizes.append(tape.sizes[buffer])
            tape.parts.append(tape.parts[buffer])
        events.append(renamed[buffer] if event >= 0 else -1 - renamed[buffer])
    return events
