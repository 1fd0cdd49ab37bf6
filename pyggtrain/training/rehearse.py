"""Every buffer of a run's first two optimiser steps, found from the header of the base file alone.

The model is loaded without memory (`ops.rehearsal`), gets its adapter, and the run's own optimiser takes a step with
its own micro-batches: nothing is computed and no weight is read, but each buffer is made and freed in the order of the
real run. So the plan follows from the program itself, for every architecture, checkpoint policy and optimiser, and no
formula has to be kept in step with them. A GPU's run is rehearsed the same way, on any machine (`ops.gpu_rehearsal`).
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
from pyggtrain.ops import gpu_rehearsal, rehearsal, workspace
from pyggtrain.ops.fused import Kept
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.masked_diffusion import objective_of
from pyggtrain.training.objectives import Document, Objective
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.optimizers import PAGED, make_optimizer
from pyggtrain.training.paging import Pages
from pyggtrain.training.step_graph import StepGraphs, can_graph, filled_up, max_tokens

BASE, ADAPTER, OPTIMISER, GRADIENTS = "base file", "adapter", "optimiser", "gradients"
ACTIVATIONS, LOSS_CHUNK, WORKSPACE = "activations", "loss chunk", "workspace"
# Operations whose own buffers have a name in the plan.
_PART_OF_OPERATION = {"linear_cross_entropy": LOSS_CHUNK}
_CPU = torch.device("cpu")
# A GPU's allocator gives out multiples of so many bytes.
_GPU_GRANULE = 512


@dataclass(frozen=True)
class Trace:
    """Buffers in the order in which they are made and given back.

    Attributes:
        sizes: bytes of each.
        parts: what each is for.
        events: n >= 0: buffer n is made; -1 - n: it is given back.
        captured: the events of forward and backward in the last step, (first, end), where these run as a CUDA graph.
        sent_bytes: what the host holds of what is copied there from a GPU in a step, to wait.
    """

    sizes: Sequence[int]
    parts: Sequence[str]
    events: Sequence[int]
    captured: tuple[int, int] | None = None
    sent_bytes: int = 0

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

    def peak_outside_graph(self) -> tuple[int, int]:
        """What a CUDA graph of forward and backward has at its peak, and the most bytes that are there in the same step
        without it: a graph's memory stays its own, so both are there at the same time.
        """
        assert self.captured is not None, "the step runs as single launches"
        first, end = self.captured
        live, before, inside, outside = 0, 0, 0, 0
        made: set[int] = set()
        for index, event in enumerate(self.events):
            buffer = event if event >= 0 else -1 - event
            live += self.sizes[buffer] if event >= 0 else -self.sizes[buffer]
            if index == first - 1:
                before = outside = live
            elif first <= index < end:
                (made.add if event >= 0 else made.discard)(buffer)
                inside = max(inside, live - before)
            elif index >= end:
                # What the graph's end has left lies in its own memory.
                left = sum(self.sizes[one] for one in made)
                outside = max(outside, live - left)
                if event < 0:
                    made.discard(buffer)
        return inside, outside


class Tape:
    """Writes down buffers while a rehearsal runs.

    Args:
        granule: sizes are rounded up to a multiple of it.
    """

    def __init__(self, granule: int = 1) -> None:
        self._granule = granule
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
        self.sizes.append(-(-num_bytes // self._granule) * self._granule)
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
        tape = Tape(self._granule)
        tape.sizes, tape.parts, tape.events = list(self.sizes), list(self.parts), list(self.events)
        tape._alive, tape._ignored = dict(self._alive), self._ignored
        return tape

    def buffers(self) -> list[int]:
        """Numbers of the buffers that are there."""
        return [buffer for buffer, _ in self._alive.values()]

    def lasting(self) -> list[torch.UntypedStorage]:
        """The storages that are there and are called no more than "activations"."""
        found = [reference() for buffer, reference in self._alive.values() if self.parts[buffer] == ACTIVATIONS]
        return [storage for storage in found if storage is not None]

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
        device: that the run computes on, a CPU or a GPU, which need not be there.
        dtype: of activations; None: the device's own.

    Attributes:
        objective: what a step minimises.
        model: without memory.
        num_parameters: trained numbers.
        is_fused: all layers run as the halves of `ops.fused`, on a GPU as `nn.Model.is_fused` says.
        base_bytes: of the file's tensors; on a GPU, of what loading puts there.
        paths: of the file and its parts.

    Raises:
        UnsupportedError, GGUFError, ConfigError: as loading the model and attaching the adapter would raise them.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: TrainConfig,
        lora: LoraConfig,
        device: torch.device = _CPU,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._config = config
        self._is_on_gpu = device.type == "cuda"
        self._device = gpu_rehearsal.GPU if self._is_on_gpu else device
        self._tape = Tape(_GPU_GRANULE if self._is_on_gpu else 1)
        self._last = self._tape
        # Bytes of each copy to the host, by where it goes.
        # By place on the host: what is sent there, each time how much and the place's size.
        self._sent: dict[int, list[tuple[int, int]]] = {}
        self.paths = file.paths
        self.base_bytes = sum(tensor.num_bytes for tensor in file.tensors.values())
        header = self._header = GGUFFile.open(file.path)
        header.tensors = {
            name: replace(tensor, blocks=rehearsal.without_memory(tensor.blocks))
            for name, tensor in file.tensors.items()
        }
        self._tape.ignore(tensor.blocks for tensor in header.tensors.values())
        with self._on_stage(self._tape):
            self.model: Model = models.load(
                header,
                implementation=config.model_impl,
                device=self._device,
                dtype=dtype,
                compute="auto" if config.compute == "fp16" else config.compute,
                is_checked=False,
            )
            self._tape.name_rest(BASE)
            if self._is_on_gpu:
                self.base_bytes = sum(self._tape.sizes[buffer] for buffer in self._tape.buffers())
            adapter: LoraAdapter = attach(self.model, lora, seed=config.seed)
            self._parameters = {
                f"{name}.{half}": getattr(pair, half)
                for name, pair in adapter.pairs.items()
                for half in ("lora_a", "lora_b")
            }
            if self._is_on_gpu and config.optim in PAGED:
                # Moves the pairs to where each trace finds them.
                Pages(list(self._parameters.values()), make_optimizer(self._parameters, config)).close()
            self._tape.name_rest(ADAPTER)
            self.is_fused = self.model.is_fused if self._is_on_gpu else self._is_fused_on_cpu()
        self.model.neftune_noise_alpha = config.neftune_noise_alpha
        self.model.train()
        self.objective: Objective = objective_of(self.model, config, is_largest=True)
        self.num_parameters = adapter.num_parameters

    def _is_fused_on_cpu(self) -> bool:
        layers = self.model.fused_layers
        return len(layers) == len(self.model.layers) and all(
            layer.can_fuse(torch.float32, torch.device("meta")) for layer in layers
        )

    def trace(self, policy: str, documents: Sequence[Document], *, kept: Sequence[Kept] | None = None) -> Trace:
        """The first two optimiser steps of a run whose micro-batches all hold these documents.

        Args:
            policy: see `nn.checkpointing`.
            documents: rows of the longest micro-batch.
            kept: of each layer, where a GPU runs all of them fused; None: as the policy says.
        """
        tape = self._tape.fork()
        if self._is_on_gpu:
            for storage in self._last.lasting():
                # Tables that the model has made in an earlier trace, and keeps. On a CPU it makes them each time.
                tape.made(storage, "")
            self._last = tape
        self.model.checkpoint_policy = policy
        self.model.kept = kept
        batch = Batch.from_documents(documents)
        with self._on_stage(tape), self._gradients_named(tape):
            can_capture = self._is_on_gpu and can_graph(self._config, self.model)
            if self._is_on_gpu:
                batch = (filled_up(batch, max_tokens(self.model)) if can_capture else batch).to(self._device)
            optimizer = Optimizer(self._parameters, self._config)
            if optimizer.pages is not None:
                # What stays where there is room is not needed.
                optimizer.pages.room = lambda device: 0
            if can_capture:
                optimizer.graphs = StepGraphs(self.model, self._parameters, optimizer.pages)
            before, self._sent = len(tape.events), {}
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
            if optimizer.pages is not None:
                optimizer.pages.close()
        for parameter in self._parameters.values():
            parameter.grad = None
        step, end = events[before:], after_backward - before
        # Where graphs or pages hold gradients, a further micro-batch is the same once more.
        if self._config.gradient_accumulation_steps > 1 and not can_capture and optimizer.pages is None:
            more = _onto_gradients(tape, step, before, after_backward)
            step, end = [*step[:end], *more, *step[end:]], end + len(more)
        later = _again(tape, step)
        captured = None
        if can_capture and batch.num_tokens <= max_tokens(self.model):
            given_back = {-1 - event for event in step if event < 0}
            num_kept = sum(event >= 0 and event not in given_back for event in step[:end])
            captured = len(events), len(events) + end - num_kept
        return Trace(tape.sizes, tape.parts, [*events, *later], captured, self._sent_bytes())

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

    def _note_sent(self, num_bytes: int, place: int, size: int) -> None:
        self._sent.setdefault(place, []).append((num_bytes, size))

    def _sent_bytes(self) -> int:
        # What goes alone has a piece of its own (`nn.host_stash`); many share a slab (`training.paging`).
        return sum(
            sent[0][1] if len(sent) == 1 else sum(num_bytes for num_bytes, _ in sent) for sent in self._sent.values()
        )

    @contextmanager
    def _on_stage(self, tape: Tape) -> Iterator[None]:
        # What loading says about the file, it will say again when the run loads it.
        log = logging.getLogger("pyggtrain")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            if self._is_on_gpu:
                with gpu_rehearsal.gpu_rehearsal(tape.made, self._note_sent):
                    yield
            else:
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
