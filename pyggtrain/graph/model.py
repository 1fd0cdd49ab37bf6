"""A file's model, imported from llama.cpp's own graph of it. It has the face of every model, `nn.Model`.

Products with matrices are `nn.QuantLinear`s under the file's names, so adapters, checkpointing and export see no
difference to a hand-written model. Which of them can be trained is what llama.cpp's own graph shows
(`rewrite.take_out_adapter`).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pyggtrain import ops
from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.cache import cached_capture
from pyggtrain.graph.capture import DOCUMENT_UNIT
from pyggtrain.graph.frame import Frame, in_full
from pyggtrain.graph.half import Half
from pyggtrain.graph.halves import find_halves, fused_layer
from pyggtrain.graph.importer import Program, import_steps, make_program
from pyggtrain.graph.ir import Graph, fit, fit_document
from pyggtrain.graph.mixtures import Mixture, find_mixtures
from pyggtrain.graph.program import Region, Step
from pyggtrain.graph.rewrite import Reach, name_rows_of_tokens, rewritten
from pyggtrain.graph.weights import FrozenTensor, Weights, as_matrix
from pyggtrain.nn import (
    Batch,
    Diffusion,
    ExpertLinear,
    FusedLayer,
    HostStash,
    Model,
    QuantLinear,
    RopeTableCache,
    activation_dtype,
    can_run_fused,
    kept_by,
)
from pyggtrain.ops.fused import Kept
from pyggtrain.ops.linear_cross_entropy import IGNORED, default_chunk

logger = logging.getLogger(__name__)


def training_graph(file: GGUFFile, *, num_ctx: int | None = None) -> tuple[Graph, Reach]:
    """What llama.cpp computes for a file, as a graph to train with, and which weights an adapter changes in it.

    Raises:
        BridgeError: llama.cpp cannot build it.
        UnsupportedError: it depends on the number of tokens in a way that is not implemented.
    """
    return rewritten(fit(cached_capture(file, num_ctx=num_ctx)))


def document_graph(file: GGUFFile, num_tokens: int, *, num_ctx: int | None = None) -> tuple[Graph, Reach]:
    """As `training_graph`, of one document of `num_tokens` tokens (a multiple of `capture.DOCUMENT_UNIT`)."""
    graph = fit_document(cached_capture(file, num_ctx=num_ctx, num_tokens=num_tokens))
    return rewritten(name_rows_of_tokens(graph, file.metadata))


class _EncoderError(UnsupportedError):
    """Tokens of the model see later ones."""


class ImportedModel(Model):
    """A model file of any architecture that llama.cpp runs.

    Args:
        file: opened GGUF file.
        device: where to compute.
        dtype: of activations, see `Frame.dtype`; None: `nn.activation_dtype(device)`, float32 if compute is "exact".
        compute: how products with quantised weights are computed, see `ops.quant_linear`.
        num_ctx: context that llama.cpp will serve with; longrope files choose their factors by it. None: the file's
            `context_length`.

    Attributes:
        linears, untrainable, head_is_tied, checkpoint_policy, loss_chunk: see `nn.Model`.
        takes_one_document: documents of a batch run one after another: a state would carry from one to the next, or
            blocks of tokens are counted from the first token on.
        unit: documents are filled up to a multiple of so many tokens; None: they are not.
        num_logits: of a token.
        question: what else than the file decides what is computed.

    Raises:
        BridgeError: llama.cpp cannot build the graph.
        UnsupportedError: an operation or an input of it is not implemented.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compute: str = "auto",
        num_ctx: int | None = None,
    ) -> None:
        super().__init__(file.architecture)
        self.dtype = dtype or (torch.float32 if compute == "exact" else activation_dtype(device))
        self.question = f"{device} {self.dtype} {compute} {num_ctx}"
        self._rope_caches: dict[object, RopeTableCache] = {}
        self._stash: HostStash | None = None
        self._device = torch.device(device)
        # In half precision, which its fused operations want.
        self._runs_on_gpu = can_run_fused(self.dtype, self._device)
        self._file = file
        self.num_ctx = num_ctx
        self._compute = compute
        self._weights = Weights(self, file, device=device, compute=compute)
        self._programs: dict[int | None, Program] = {}
        # A few graphs exist only for documents of a given length: one program for each length then.
        self.unit: int | None = None
        try:
            first, reach = self._add_program(None)
        except _EncoderError:
            raise
        except UnsupportedError as error:
            logger.info("%s Taking the graph of single documents instead.", error)
            self.unit = DOCUMENT_UNIT
            first, reach = self._add_program(DOCUMENT_UNIT)
        self.num_logits = first.num_logits
        # Only where nothing follows the product, not even a bias, does the loss need no logits.
        head = first.head
        self._head_loss = _head_loss(self._weights.modules[head[0]], compute) if first.has_plain_head else None
        self.linears = self._weights.linears
        self.head_is_tied = head[0] == "token_embd.weight"
        self.untrainable = {
            name: _why_untrainable(name, reach, self.head_is_tied) for name in file.tensors if name not in self.linears
        }
        self.takes_one_document = first.is_recurrent or self.unit is not None
        if first.is_recurrent:
            logger.info("%s carries a state from token to token: documents run one after another.", file.architecture)
        elif self.takes_one_document:
            logger.info(
                "%s groups tokens in blocks: documents run one after another, filled up to a multiple of %d tokens.",
                file.architecture,
                DOCUMENT_UNIT,
            )

    def _add_program(self, num_tokens: int | None) -> tuple[Program, Reach]:
        """The program of documents of `num_tokens` tokens; None: of any batch."""
        if num_tokens is None:
            graph, reach = training_graph(self._file, num_ctx=self.num_ctx)
        else:
            graph, reach = document_graph(self._file, num_tokens, num_ctx=self.num_ctx)
        if graph.is_diffusion:
            self.diffusion = Diffusion.of(self._file.metadata)
        elif not graph.is_causal:
            raise _EncoderError(
                f"{self._file.path} is an encoder ({self._file.architecture}): its tokens see later ones, "
                "and training needs a decoder."
            )
        steps, leaves = import_steps(graph, reach, self._weights, compute=self._compute)
        # A half's attention sees no later token.
        found = find_halves(graph, self._weights) if graph.is_causal else []
        halves: list[Half | Mixture] = [half for half in found if half.modules.can_fuse(self.dtype, self._device)]
        if self._runs_on_gpu:
            halves += find_mixtures(graph, self._weights)
        program = make_program(graph, steps, leaves, halves)
        self._programs[num_tokens] = program
        return program, reach

    def _prepared(self, batch: Batch) -> tuple[Program, Batch]:
        """The program for a batch, and the batch as it takes it: a document may have to be filled up at its end."""
        if self.unit is None:
            return self._programs[None], batch
        num_missing = -batch.num_tokens % self.unit
        num_tokens = batch.num_tokens + num_missing
        if num_tokens not in self._programs:
            self._add_program(num_tokens)
        return self._programs[num_tokens], filled_up(batch, num_missing)

    def _frame(self, batch: Batch, rows: torch.Tensor, *, takes_all: bool = False) -> Frame:
        return Frame(
            batch,
            rows,
            takes_all=takes_all,
            dtype=self.dtype,
            rope_caches=self._rope_caches,
            with_noise=self.with_noise,
        )

    @property
    def _program(self) -> Program:
        """That of any batch, or of the shortest document."""
        return self._programs[self.unit]

    @property
    def layers(self) -> list[nn.Module]:
        return list(self._program.layers)

    @property
    def fused_layers(self) -> list[FusedLayer]:
        layers = [fused_layer(region.halves) for region in self._program.layers]
        return [layer for layer in layers if layer is not None]

    @property
    def is_fused(self) -> bool:
        """Layers that are alike, each an attention half and a feed-forward half, and no document by itself."""
        layers = self.fused_layers
        return (
            self._runs_on_gpu
            and 0 < len(layers) == len(self._program.layers)
            and not self.takes_one_document
            and all(layer.can_fuse(self.dtype, self._device) for layer in layers)
            and len({layer.sizes for layer in layers}) == 1
        )

    @property
    def can_capture(self) -> bool:
        return self.is_fused or (
            self._runs_on_gpu and self._program.is_capturable and not self.takes_one_document and not self._is_random
        )

    @property
    def reads_chunks(self) -> bool:
        return self._program.has_delta_halves

    @property
    def _is_random(self) -> bool:
        """Whether layers draw random numbers."""
        return any(linear.lora is not None and linear.lora.has_dropout for linear in self.linears.values())

    def hidden(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """The head's input, float32 [O, D], of the tokens `rows` (int64 [O]) of a batch that the graph takes as a
        whole.
        """
        program, batch = self._prepared(batch)
        # Rows with a target come in their order, see `Batch.supervised`.
        frame = self._frame(batch, rows, takes_all=rows.shape[0] == batch.num_targets == batch.num_tokens)
        known: dict[int, torch.Tensor] = {}
        kept_by_layer = self.kept or kept_by(self.checkpoint_policy, len(program.layers))
        stash = self._begin_stash(kept_by_layer)
        # Nothing but fused halves can wait on the host.
        policy = "layers" if self.checkpoint_policy == "offload" else self.checkpoint_policy
        is_random = self._is_random
        remaining = enumerate(kept_by_layer)
        # What stands before the layers counts as the first one's.
        self.announce(0)
        for region, is_layer, dead in zip(program.regions, program.is_layer, program.dead, strict=True):
            values = [known[index] for index in region.inputs]
            if is_layer:
                number, kept = next(remaining)
                if number > 0:
                    self.announce(number)
                place = stash if kept.on_host else None
                outputs = region(*values, frame=frame, policy=policy, is_random=is_random, kept=kept, stash=place)
            else:
                outputs = region(*values, frame=frame)
            known |= zip(region.outputs, (outputs,) if len(region.outputs) == 1 else outputs, strict=True)
            for index in dead:
                del known[index]
        self.announce(len(program.layers))
        (x_OD,) = known.values()
        return x_OD if program.selects_rows else x_OD[rows]

    def layer_of(self, name: str) -> int:
        """See `nn.Model`. Layers of the program, which need not be the file's blocks."""
        return self._first_readers.get(name, 0)

    @cached_property
    def _first_readers(self) -> dict[str, int]:
        program = self._program
        regions = [*program.layers, program.tail]
        readers = [(weight, number) for number, region in enumerate(regions) for weight in _weights_of(region)]
        elsewhere = {
            weight
            for region, is_layer in zip(program.regions, program.is_layer, strict=True)
            if not is_layer
            for weight in _weights_of(region)
        }
        # The last to be put down is the first to read.
        return {weight: number for weight, number in reversed(readers) if weight not in elsewhere}

    def join_copies(self) -> None:
        """See `nn.Model`."""
        if self._stash is not None:
            self._stash.join()

    @property
    def stashed_bytes(self) -> int:
        """See `nn.Model`."""
        return 0 if self._stash is None else self._stash.num_bytes

    def release_stash(self) -> None:
        """See `nn.Model`."""
        if self._stash is not None:
            self._stash.release()

    def _begin_stash(self, kept: Sequence[Kept]) -> HostStash | None:
        """Where a pass with gradients keeps what is to wait on the host, if anything is."""
        # It holds one pass; documents one by one are several before their backward.
        if not torch.is_grad_enabled() or self.takes_one_document or not any(one.on_host for one in kept):
            return None
        self._stash = self._stash or HostStash(self._device)
        self._stash.begin()
        return self._stash

    def run_steps(self, batch: Batch) -> Iterator[tuple[Step, torch.Tensor]]:
        """Each step of the graph with its value for all tokens of a batch, without anything being freed: to look
        inside.
        """
        program, batch = self._prepared(batch)
        frame = self._frame(batch, torch.arange(batch.num_tokens, device=batch.tokens_T.device))
        known: dict[int, torch.Tensor] = {}
        for region in (*program.regions, program.tail):
            yield from region.run(frame, known)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Summed cross entropy in nats over the batch's targets (scalar float32 with gradient), and their number."""
        losses = [self._loss(part) for part in self._parts(batch)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), batch.num_targets

    def logits(self, batch: Batch) -> torch.Tensor:
        """float32 [T, V], one row per token of the batch."""
        rows = []
        for part in self._parts(batch):
            all_tokens = torch.arange(part.num_tokens, device=part.tokens_T.device)
            rows.append(self._logits_of(part, all_tokens, self.hidden(part, all_tokens)))
        return torch.cat(rows)

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """float32 [T] with gradient: log-probability in nats of each target, 0 where there is none."""
        return torch.cat([self._log_probs(part) for part in self._parts(batch)])

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """The batch, or its documents one by one where the graph takes only one."""
        bounds = batch.cu_seqlens.tolist()
        if not self.takes_one_document or len(bounds) == 2:
            yield batch
            return
        for start, end in pairwise(bounds):
            yield Batch(
                tokens_T=batch.tokens_T[start:end],
                positions_T=batch.positions_T[start:end],
                targets_T=batch.targets_T[start:end],
                cu_seqlens=batch.cu_seqlens.new_tensor([0, end - start]),
            )

    def _loss(self, batch: Batch) -> torch.Tensor:
        rows = _rows_with_target(batch)
        x_OD = self.hidden(batch, rows)
        targets_O = batch.targets_T[rows]
        if self._head_loss is not None:
            return self._head_loss(x_OD, targets_O, self.loss_chunk)[0]
        return self._chunked_loss(batch, rows, x_OD, targets_O)

    def _log_probs(self, batch: Batch) -> torch.Tensor:
        rows = _rows_with_target(batch)
        found_O = ops.log_probs(
            lambda chosen, x: self._logits_of(batch, rows[chosen], x),
            self.hidden(batch, rows),
            batch.targets_T[rows],
            self.num_logits,
            chunk=self.loss_chunk,
        )
        return found_O.new_zeros(batch.num_tokens).index_copy(0, rows, found_O)

    def _chunked_loss(
        self, batch: Batch, rows: torch.Tensor, x_OD: torch.Tensor, targets_O: torch.Tensor
    ) -> torch.Tensor:
        """Cross entropy where something follows the head (a soft-cap, a scale, a bias): logits of a chunk are computed
        again in backward.
        """

        def chunk_loss(rows: torch.Tensor, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = in_full(self._logits_of(batch, rows, x))
            return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

        size = self.loss_chunk or default_chunk(self.num_logits, targets_O.shape[0])
        losses = [
            checkpoint(chunk_loss, *chunk, use_reentrant=False) if torch.is_grad_enabled() else chunk_loss(*chunk)
            for chunk in zip(*(torch.split(part, size) for part in (rows, x_OD, targets_O)), strict=True)
        ]
        return torch.stack(losses).sum()

    def _logits_of(self, batch: Batch, rows: torch.Tensor, x_OD: torch.Tensor) -> torch.Tensor:
        program, batch = self._prepared(batch)
        return program.tail(x_OD, frame=self._frame(batch, rows))  # type: ignore[no-any-return]


def filled_up(batch: Batch, num_missing: int) -> Batch:
    """A batch of one document with tokens after its end, which none before them sees and nothing is learnt from."""
    if not num_missing:
        return batch
    end = batch.num_tokens
    return Batch(
        tokens_T=functional.pad(batch.tokens_T, (0, num_missing)),
        positions_T=torch.arange(end + num_missing, device=batch.positions_T.device),
        targets_T=functional.pad(batch.targets_T, (0, num_missing), value=IGNORED),
        cu_seqlens=batch.cu_seqlens.new_tensor([0, end + num_missing]),
    )


def _weights_of(region: Region) -> set[str]:
    return {weight for step in region.steps for weight in step.weights}


def _rows_with_target(batch: Batch) -> torch.Tensor:
    """int64 [O]: only tokens with a target pass the last block's feed-forward and the head; at least one does."""
    rows = batch.supervised
    return rows if rows.shape[0] else rows.new_zeros(1)


def _head_loss(
    head: QuantLinear | ExpertLinear | FrozenTensor, compute: str
) -> Callable[[torch.Tensor, torch.Tensor, int | None], tuple[torch.Tensor, int]]:
    """The loss of hidden states, targets and chunk size at a head that nothing follows."""
    assert not isinstance(head, ExpertLinear), "an output head of experts"
    if isinstance(head, QuantLinear):
        return lambda x_OD, targets_O, chunk: head.cross_entropy(x_OD, targets_O, chunk=chunk)
    weight = as_matrix(head.quant)
    return lambda x_OD, targets_O, chunk: ops.linear_cross_entropy(
        x_OD, weight, targets_O, chunk=chunk, compute=compute
    )


def _why_untrainable(name: str, reach: Reach, head_is_tied: bool) -> str:
    """Why a tensor is not trained by an adapter; ends a sentence that begins with its name."""
    if name == "token_embd.weight":
        if head_is_tied:
            return "is the embedding and the output head in one (tied), and llama.cpp aborts when an adapter changes it"
        return "is the token embedding, whose training is not implemented"
    if name in reach.missed:
        return reach.missed[name]
    return "is no matrix that llama.cpp multiplies by, so an adapter cannot change it"
