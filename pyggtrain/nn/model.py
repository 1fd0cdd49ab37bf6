"""What training sees of a model, whatever its architecture."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pyggtrain.nn.batch import Batch
from pyggtrain.nn.diffusion import Diffusion
from pyggtrain.nn.expert_linear import ExpertLinear
from pyggtrain.nn.fused_layer import FusedLayer
from pyggtrain.nn.quant_linear import QuantLinear
from pyggtrain.ops.fused import Kept

_BLOCK = re.compile(r"blk\.(\d+)\.")


class Model(nn.Module, ABC):
    """A model file, ready to compute on its own blocks.

    Attributes:
        architecture: `general.architecture` of the file.
        linears: every weight that an adapter may train, by its tensor name: matrices and stacks of experts. llama.cpp
            applies a low-rank pair to exactly these.
        untrainable: the file's other tensors by name, each with the reason why an adapter cannot train it.
        head_is_tied: the output head is the token embedding; no adapter can hold its change.
        checkpoint_policy: which activations are kept for backward, see `nn.checkpointing`.
        kept: the same for each layer by itself, where the model runs fused on a GPU; None: what `checkpoint_policy`
            means there.
        loss_chunk: tokens whose logits exist at the same time in `loss`; None: see
            `ops.linear_cross_entropy`.
        neftune_noise_alpha: strength of the noise that training adds to token embeddings; 0: none.
        before_layer: called with its number before each layer is launched, and with the number of layers before what
            follows them; None: nobody wants to know.
        diffusion: how it fills in masked tokens; None: it continues a text, and no token sees a later one.
    """

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self.architecture = architecture
        self.linears: dict[str, QuantLinear | ExpertLinear] = {}
        self.untrainable: dict[str, str] = {}
        self.head_is_tied = False
        self.checkpoint_policy = "none"
        self.kept: Sequence[Kept] | None = None
        self.loss_chunk: int | None = None
        self.before_layer: Callable[[int], None] | None = None
        self.neftune_noise_alpha = 0.0
        self.diffusion: Diffusion | None = None

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The layers in the order in which they run."""

    @property
    def is_fused(self) -> bool:
        """Whether all layers run as a GPU's coarse operations of `ops.fused`; a CPU's do not count."""
        return False

    @property
    def can_capture(self) -> bool:
        """Whether a step never makes the host wait, and what it launches depends on nothing but shapes: then it may
        become a CUDA graph.
        """
        return self.is_fused

    @property
    def reads_chunks(self) -> bool:
        """Whether layers cut documents into chunks (`ops.attention.Documents.chunks`), whose number decides what is
        launched.
        """
        return False

    def announce(self, layer: int) -> None:
        """Call `before_layer`."""
        if self.before_layer is not None:
            self.before_layer(layer)

    def layer_of(self, name: str) -> int:
        """The first layer that reads a weight, or the number of layers for what only follows them. What no layer reads,
        or nobody knows, counts as the first one's.
        """
        if name == "output.weight":
            return len(self.layers)
        match = _BLOCK.match(name)
        return int(match[1]) if match else 0

    def join_copies(self) -> None:
        """Let what is launched from now on wait for copies of activations that are under way, if there are any."""

    @property
    def stashed_bytes(self) -> int:
        """Bytes of the host's memory that activations have taken in passes so far."""
        return 0

    def release_stash(self) -> None:
        """Give that memory back, between two passes."""

    @property
    def fused_layers(self) -> Sequence[FusedLayer]:
        """The layers in that form; none where there is none."""
        return ()

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Summed cross entropy in nats over the batch's targets (scalar float32 with gradient), and their number.

        Logits are never stored beyond a chunk; without gradients enabled none is computed.
        """

    @abstractmethod
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """float32 [T] with gradient: log-probability in nats of each target, 0 where there is none.

        For losses that weigh tokens by something that is known only after all of them; `loss` is cheaper. Logits are
        never stored beyond a chunk.
        """

    def with_noise(self, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Token embeddings, in training with NEFTune's noise (Jain et al. 2023, 2310.05914, algorithm 1).

        Each number gets a uniform one from ±alpha / sqrt(L D), L being the tokens of its own document.
        """
        if not self.training or self.neftune_noise_alpha == 0.0:
            return x_TD
        lengths = batch.cu_seqlens.diff().long()
        largest = self.neftune_noise_alpha / (lengths * x_TD.shape[1]).to(x_TD.dtype).sqrt()
        # Bounds of documents are on the host, see `Batch`.
        largest_T = largest.repeat_interleave(lengths).to(x_TD.device)
        noise_TD = torch.empty_like(x_TD).uniform_(-1, 1)
        return x_TD + noise_TD * largest_T.unsqueeze(1)

    @abstractmethod
    def logits(self, batch: Batch) -> torch.Tensor:
        """float32 [T, V], one row per token of the batch."""


class SplittableModel(Model):
    """A model that can be split over processes, layer by layer (`training.pipeline`): `embed` runs on the first of
    them, `run_own_layers` on all, `loss_of` or `log_probs_of` on the last.

    Attributes:
        own_layers: those that are computed here.
    """

    own_layers: range

    @abstractmethod
    def embed(self, batch: Batch) -> torch.Tensor:
        """The first layer's input [T, D]."""

    @abstractmethod
    def run_own_layers(self, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The output of the last own layer for the input of the first one, both [T, D]."""

    @abstractmethod
    def loss_of(self, x_TD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
        """As `loss`, from the last layer's output [T, D]."""

    @abstractmethod
    def log_probs_of(self, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """As `log_probs`, from the last layer's output [T, D]."""


def activation_dtype(device: torch.device | str) -> torch.dtype:
    """What activations are computed in unless told otherwise: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def why_untrainable(name: str, *, head_is_tied: bool) -> str:
    """Why an adapter cannot train a tensor that is no linear of the model, as the end of a sentence about it."""
    if name == "token_embd.weight":
        if head_is_tied:
            return "is the embedding and the output head in one (tied), and llama.cpp aborts when an adapter changes it"
        return "is the token embedding, whose training is not implemented"
    if name.endswith("norm.weight"):
        return "is a norm weight, and llama.cpp silently drops those from an adapter"
    if name.startswith("rope_"):
        return "is a table of rotation factors, no weight, and llama.cpp refuses an adapter that names it"
    if name.endswith(".bias"):
        return "is a vector, and LoRA needs a matrix"
    return "is not used by the model, so training it would change nothing"
