"""Forward and backward of short micro-batches as CUDA graphs.

A step launches some three thousand kernels. From Python that takes longer than the GPU needs for 2,048 tokens of an 8B
model (220 ms against 120 on one machine, docs/performance.md). A graph of the whole of it is launched at once. A graph
is made for one shape, so micro-batches are brought to few shapes: tokens are filled up to a multiple of 128 by a
document that nothing is learnt from, targets to a multiple of 64 by targets that count nothing. Gated delta nets
launch a program for each chunk of a document: their tables get room for more documents than there are.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from pyggtrain.nn import Batch, ExpertLinear, Model
from pyggtrain.ops.linear_cross_entropy import IGNORED
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.objectives import LossModule
from pyggtrain.training.paging import Pages

# Longer micro-batches are bound by the GPU, and a graph wins little.
MAX_TOKENS = 6144
# Experts are many small products: 8,192 tokens of 48 layers took 449 ms of an H200 and 564 ms to launch.
MAX_TOKENS_OF_EXPERTS = 16384
# A delta half takes 5 to 6 ms to launch (docs/performance.md), another half some 3: 250 ms for the 32 layers of a model
# of 4B, and an H200 computes 8,192 tokens of it in about as long. Estimated, not measured.
MAX_TOKENS_OF_DELTA_NETS = 8192
# What a graph's pool takes beyond single launches at their peak (H200: 13.26 GiB against 13.21).
POOL_FACTOR = 1.02
# For models whose layers are not two equal halves there are buffers of many sizes, and holes between them: a graph of
# Qwen3-30B-A3B wanted about 1 GiB where single launches took 0.6, and a capture that runs out of memory ends the run.
_HOLES_FACTOR, _HOLES_BYTES = 1.1, 320 << 20
TOKEN_MULTIPLE = 128
TARGET_MULTIPLE = 64
# A shape that comes once is not worth capturing; captured are at most this many, the least used goes first.
MAX_GRAPHS = 8
# Documents of different lengths get room for so many at least, so that few graphs serve all numbers of them. An empty
# one costs at most one chunk of 64 tokens.
MIN_DOCUMENTS = 8

logger = logging.getLogger(__name__)

# See `shape_of`.
Shape = tuple[int, int | None, bool, int, int, int | None]
# Parameters whose gradients an earlier micro-batch of the step has sent to the host: a graph adds to them.
_Key = tuple[Shape, frozenset[int]]


@dataclass(eq=False)
class _Captured:
    """One graph, and the places that it reads and writes. `written`: parameters whose gradients go to the host."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: torch.Tensor
    written: frozenset[int]


class StepGraphs:
    """Loss and gradients of micro-batches, from a graph where one pays.

    Gradients lie at fixed places from the first call on; `clear` empties them.

    Args:
        model: on a GPU, one that can be captured.
        parameters: name -> trained tensor, `<weight>.<factor>`.
        pages: where gradients go, if they go to the host. A graph of the first micro-batch of a step overwrites what is
            there, one of a later micro-batch adds to it. Graphs wait layer by layer for an update that runs beside
            them, single launches for all of it.

    Attributes:
        has_replayed: whether the last micro-batch was a graph's.
    """

    def __init__(self, model: LossModule, parameters: Mapping[str, torch.Tensor], pages: Pages | None = None) -> None:
        self.model, self._pages = model, pages
        self._max_tokens = max_tokens(model)
        self._reads_chunks = isinstance(model, Model) and model.reads_chunks
        self._parameters = list(parameters.values())
        self._gradients: list[torch.Tensor] = []
        self._graphs: OrderedDict[_Key, _Captured] = OrderedDict()
        # Which masks of attention were asked for.
        self._seen: dict[_Key, list[tuple[int | None, int | None]]] = {}
        self._too_large: set[_Key] = set()
        self._pool: Any = None
        self._scale = torch.zeros((), device=self._parameters[0].device)
        self._last_windows = self._windows_of_layers(parameters) if pages is not None else []
        self.has_replayed = False

    def clear(self) -> None:
        """All gradients zero, at the places where graphs add to them; for a run without pages."""
        if not self._gradients:
            self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        torch._foreach_zero_(self._gradients)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def add_gradients(self, batch: Batch, scale: float) -> torch.Tensor:
        """Add the gradient of `scale` times the batch's summed loss, and return that loss (float32, no gradient).

        Args:
            batch: on the GPU, made by `filled_up` before it went there.
            scale: one over the targets of the step.
        """
        self.has_replayed = False
        if batch.num_tokens > self._max_tokens:
            return self._run_at_once(batch, torch.full_like(self._scale, scale))
        shape = shape_of(batch, reads_chunks=self._reads_chunks)
        if shape[-1] is not None:
            batch.documents.make_room(batch.tokens_T.device, shape[-1])
        key = shape, self._written
        self._scale.fill_(scale)
        captured = self._graphs.get(key)
        if captured is None:
            if key not in self._seen or key in self._too_large:
                loss = self._run_at_once(batch, self._scale)
                self._seen[key] = list(batch.documents.masks)
                return loss
            captured = self._capture(key, batch)
        if captured is None:
            return self._run_at_once(batch, self._scale)
        self._graphs.move_to_end(key)
        if self._pages is not None and not self._last_windows:
            # No layer has waited.
            self._pages.settle()
        self.has_replayed = True
        _overwrite(captured.batch, batch)
        captured.graph.replay()
        if self._pages is not None:
            self._pages.written |= captured.written
        return captured.loss.clone()

    def _run_at_once(self, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        if self._pages is not None:
            self._pages.settle()
        return self._run(batch, scale)

    def _run(self, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        loss_sum, _ = self.model.loss(batch)
        loss = loss_sum * scale
        loss.backward()  # type: ignore[no-untyped-call]
        # A capture ends with every copy done.
        if isinstance(self.model, Model):
            self.model.join_copies()
        if self._pages is not None:
            self._pages.join()
        return loss.detach()

    @property
    def _written(self) -> frozenset[int]:
        return frozenset(() if self._pages is None else self._pages.written)

    def _capture(self, key: _Key, batch: Batch) -> _Captured | None:
        """A graph for a shape; None, and a line in the log, if there is no memory for it."""
        if len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        static = _copied(batch, self._seen[key])
        # What ran before keeps its memory in the allocator, where a graph's own pool cannot use it.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if not self._has_room(batch.num_tokens):
            self._too_large.add(key)
            logger.warning(
                "No memory for a CUDA graph of %d tokens: such micro-batches are launched kernel by kernel.",
                batch.num_tokens,
            )
            return None
        graph, loss = self._record(static)
        captured = self._graphs[key] = _Captured(graph, static, loss, self._written)
        return captured

    def _record(self, static: Batch) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The graph of a batch that stays where it is, and the loss that it writes."""
        graph = torch.cuda.CUDAGraph()
        if isinstance(self.model, Model) and self._last_windows:
            self.model.before_layer = self._wait_for_layer
        try:
            # "relaxed": a kernel's variant that is needed for the first time may be loaded meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
                loss = self._run(static, self._scale)
        except RuntimeError as error:
            # The end of a capture that broke off has an error of its own, which hides the reason.
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        finally:
            if isinstance(self.model, Model):
                self.model.before_layer = None
        self._pool = graph.pool()
        return graph, loss

    def _wait_for_layer(self, layer: int) -> None:
        assert self._pages is not None
        if layer == 0 or self._last_windows[layer] > self._last_windows[layer - 1]:
            self._pages.wait_for(self._last_windows[layer])

    def _windows_of_layers(self, parameters: Mapping[str, torch.Tensor]) -> list[int]:
        """For each layer, and for what follows them, the last of the windows that hold what was read so far."""
        assert self._pages is not None
        if not isinstance(self.model, Model):
            return []
        last = [0] * (len(self.model.layers) + 1)
        for name, parameter in parameters.items():
            layer = self.model.layer_of(name.rpartition(".")[0])
            last[layer] = max(last[layer], self._pages.number_of(parameter))
        return list(accumulate(last, max))

    def _has_room(self, num_tokens: int) -> bool:
        """Whether as much as single launches took at their peak is free for the pool of graphs, or it is there."""
        if any(captured.batch.num_tokens >= num_tokens for captured in self._graphs.values()):
            # Graphs run one after the other, so one pool serves all.
            return True
        device = self._scale.device
        free, total = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
        needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        is_fused = isinstance(self.model, Model) and self.model.is_fused
        pool = POOL_FACTOR * needed if is_fused else _HOLES_FACTOR * needed + _HOLES_BYTES
        return min(free, allowed) > pool


def can_graph(config: TrainConfig, model: LossModule) -> bool:
    """Whether micro-batches of a run may be brought to a few shapes, and their steps captured.

    Pairs of answers must keep their documents; noise on embeddings depends on the documents' lengths.
    """
    can_capture = isinstance(model, Model) and model.can_capture
    return can_capture and config.cuda_graphs and config.method == "sft" and not config.neftune_noise_alpha


def max_tokens(model: LossModule) -> int:
    """Tokens of the longest micro-batch of a model that is worth a graph."""
    if not isinstance(model, Model):
        return MAX_TOKENS
    if any(isinstance(linear, ExpertLinear) for linear in model.linears.values()):
        return MAX_TOKENS_OF_EXPERTS
    return MAX_TOKENS_OF_DELTA_NETS if model.reads_chunks else MAX_TOKENS


def shape_of(batch: Batch, *, reads_chunks: bool) -> Shape:
    """What decides which graph serves a batch: tokens, the length of all documents if they have the same, whether there
    is but one, the bits of the last position in the longest, rows of the head, and the documents that tables of chunks
    have room for (None: nobody reads such tables).
    """
    length = batch.documents.common_length
    # Tables of positions are taken whole for one document, and picked token by token for several; they are made for a
    # power of two of positions.
    is_single, num_positions = batch.num_documents == 1, (batch.longest_document - 1).bit_length()
    room = None
    if reads_chunks:
        room = batch.num_documents
        # Where all have one length, shapes that are alike so far have the same number of them.
        if length is None:
            room = max(MIN_DOCUMENTS, 1 << (room - 1).bit_length())
    return batch.num_tokens, length, is_single, num_positions, batch.supervised.shape[0], room


def filled_up(batch: Batch, max_tokens: int = MAX_TOKENS) -> Batch:
    """The same documents and targets, brought to a shape that comes again; loss and gradients are the same.

    The filler is a document of its own, so no token sees it, and it has no targets; rows of the head that are filled up
    read a token without one.

    Args:
        batch: on the host, where it is known what has a target.
        max_tokens: longer batches are given back as they are.
    """
    num_rows = -batch.num_targets % TARGET_MULTIPLE
    num_filler = -batch.num_tokens % TOKEN_MULTIPLE
    if num_filler == 0 and num_rows and int(batch.targets_T[-1]) != IGNORED:
        num_filler = TOKEN_MULTIPLE
    if batch.num_tokens > max_tokens or (num_filler == 0 and num_rows == 0):
        return batch
    tokens_T, positions_T, targets_T, cu_seqlens = batch.tokens_T, batch.positions_T, batch.targets_T, batch.cu_seqlens
    if num_filler:
        tokens_T = torch.cat([tokens_T, tokens_T.new_zeros(num_filler)])
        positions_T = torch.cat([positions_T, torch.arange(num_filler)])
        targets_T = torch.cat([targets_T, targets_T.new_full((num_filler,), IGNORED)])
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + num_filler])
    last = tokens_T.shape[0] - 1
    supervised = torch.cat([batch.supervised, batch.supervised.new_full((num_rows,), last)])
    return Batch(tokens_T, positions_T, targets_T, cu_seqlens).with_supervised(supervised)


def _copied(batch: Batch, masks: Sequence[tuple[int | None, int | None]]) -> Batch:
    """A batch at places of its own, with masks of attention (by window and chunk) and the tables of chunks that the
    batch has.
    """
    names = ("tokens_T", "positions_T", "targets_T", "cu_seqlens")
    static = Batch(*(getattr(batch, name).clone() for name in names)).with_supervised(
        batch.supervised.clone(), batch.num_targets
    )
    for window, chunk in masks:
        mask = batch.documents.mask(batch.tokens_T.device, window=window, chunk=chunk)
        static.documents.masks[window, chunk] = type(mask)(mask.first_key.clone(), mask.last_query.clone())
    for device, chunks in batch.documents.chunk_tables.items():
        static.documents.chunk_tables[device] = chunks.clone()
    return static


def _overwrite(static: Batch, batch: Batch) -> None:
    """Put a batch where a graph reads."""
    for name in ("tokens_T", "positions_T", "targets_T", "supervised"):
        getattr(static, name).copy_(getattr(batch, name))
    for (window, chunk), old in static.documents.masks.items():
        new = batch.documents.mask(batch.tokens_T.device, window=window, chunk=chunk)
        old.first_key.copy_(new.first_key)
        old.last_query.copy_(new.last_query)
    for device, chunks in static.documents.chunk_tables.items():
        chunks.copy_(batch.documents.chunks(device))
