"""A transformer layer through the two fused operations of `ops.fused`, from the modules that hold its weights.

What they cannot do (a bias in the feed-forward half, dropout in a pair, other dtypes; on a CPU also what is not plain
in attention) runs through the same modules' own operations instead; `can_fuse` decides, and nothing else differs but
speed, memory and rounding.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from pyggtrain.nn.host_stash import HostStash
from pyggtrain.nn.quant_linear import QuantLinear
from pyggtrain.nn.whole_layer import run_whole
from pyggtrain.ops.attention import PLAIN, Documents, Variant
from pyggtrain.ops.fused import (
    AttentionBlock,
    DeltaBlock,
    FeedForward,
    Kept,
    LinearGroup,
    Pair,
    attention_block,
    can_fuse_on_cpu,
    cpu_attention_block,
    cpu_feed_forward,
    delta_block,
    feed_forward,
)
from pyggtrain.ops.quant_matmul import HALF_DTYPES
from pyggtrain.ops.rope import RopeTables


class Norm(Protocol):
    """What is wanted of a norm: an `RMSNorm`, or anything with its numbers."""

    @property
    def weight(self) -> torch.Tensor:
        """float32 [D]."""
        ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, eq=False)
class AttentionHalf:
    """Names for the modules of x + output(attention(rope(q), rope(k), v)),  q, k, v = qkv(norm(x)).

    Attributes:
        norm, output: as above.
        qkv: three linears, or one that gives all.
        num_heads, num_kv_heads, head_width, softmax_scale, variant: as in `ops.attention`.
        head_norms: of each head of q and of k before rotation, with one eps; None: there are none.
        is_gated: attention's output is gated from rows among q's, see `ops.fused.AttentionBlock`.
    """

    norm: Norm
    qkv: tuple[QuantLinear, ...]
    output: QuantLinear
    num_heads: int
    num_kv_heads: int
    head_width: int
    softmax_scale: float
    head_norms: tuple[Norm, Norm] | None = None
    variant: Variant = PLAIN
    is_gated: bool = False

    @property
    def linears(self) -> tuple[QuantLinear, ...]:
        return (*self.qkv, self.output)

    def can_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the fused operation computes what the modules would, with the pairs as they are.

        Args:
            dtype: of the half's input.
            device: where it lies; "meta" stands for a CPU's (`ops.rehearsal`).
        """
        if _runs_on_cpu(device) and not (
            self.variant.is_plain
            and not self.is_gated
            and can_fuse_on_cpu(self.num_heads, self.num_kv_heads, self.head_width)
        ):
            return False
        return _can_fuse(self.linears, dtype, device)

    def __call__(
        self,
        x_TD: torch.Tensor,
        tables: RopeTables | None,
        documents: Documents,
        kept: Kept,
        stash: HostStash | None = None,
    ) -> torch.Tensor:
        """The half's output [T, D].

        Args:
            x_TD: its input.
            tables, documents, kept: see `ops.fused.attention_block`.
            stash: where what is kept goes; None: it stays.
        """
        norms = self.head_norms
        block = AttentionBlock(
            self.norm.weight,
            self.norm.eps,
            _group(self.qkv),
            _group((self.output,)),
            _bias(self.qkv, x_TD.dtype),
            self.num_heads,
            self.num_kv_heads,
            self.head_width,
            self.softmax_scale,
            output_bias=_bias((self.output,), x_TD.dtype),
            head_norms=None if norms is None else (norms[0].weight, norms[1].weight),
            head_eps=0.0 if norms is None else norms[0].eps,
            variant=self.variant,
            is_gated=self.is_gated,
        )
        pairs = _pairs(self.linears)
        if _runs_on_cpu(x_TD.device):
            compute = self.output.compute
            return cpu_attention_block(x_TD, block, tables, documents, pairs, kept=kept, compute=compute)
        with stash.part() if stash is not None else nullcontext():
            return attention_block(x_TD, block, tables, documents, pairs, kept=kept)


@dataclass(frozen=True, eq=False)
class DeltaHalf:
    """Names for the modules of x + output(gated norm(delta rule(conv(qkv(y))), gate(y))), y = norm(x).

    Attributes:
        norm, qkv, gate, output: as above.
        alpha_beta: of the log decays and of beta, or one linear that gives both.
        head_norm: the gated norm's; eps is that of all norms.
        conv_weight, a, dt, num_key_heads, num_heads, head_size, is_grouped: as in `ops.fused.DeltaBlock`, keys and
            values of one size.
    """

    norm: Norm
    qkv: QuantLinear
    gate: QuantLinear
    alpha_beta: tuple[QuantLinear, ...]
    output: QuantLinear
    head_norm: Norm
    conv_weight: torch.Tensor
    a: torch.Tensor
    dt: torch.Tensor
    num_key_heads: int
    num_heads: int
    head_size: int
    is_grouped: bool

    @property
    def linears(self) -> tuple[QuantLinear, ...]:
        return (self.qkv, self.gate, *self.alpha_beta, self.output)

    def can_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the fused operation, a GPU's alone, computes what the modules would; see `AttentionHalf`."""
        if _runs_on_cpu(device) or self.output.compute == "fp8":
            return False
        from pyggtrain.kernels.gated_delta_rule.tiles import HEAD_SIZES

        return (
            self.head_size in HEAD_SIZES
            and all(linear.bias is None for linear in self.linears)
            and _can_fuse(self.linears, dtype, device)
        )

    def __call__(
        self, x_TD: torch.Tensor, documents: Documents, kept: Kept, stash: HostStash | None = None
    ) -> torch.Tensor:
        """The half's output [T, D]; arguments as for `AttentionHalf`."""
        block = DeltaBlock(
            self.norm.weight,
            self.norm.eps,
            _group((self.qkv, self.gate)),
            _group(self.alpha_beta),
            _group((self.output,)),
            self.conv_weight,
            self.a,
            self.dt,
            self.head_norm.weight,
            self.num_key_heads,
            self.num_heads,
            self.head_size,
            self.head_size,
            self.is_grouped,
        )
        with stash.part() if stash is not None else nullcontext():
            return delta_block(x_TD, block, documents, _pairs(self.linears), kept=kept)


@dataclass(frozen=True, eq=False)
class FeedForwardHalf:
    """Names for the modules of x + down(silu(gate(z)) ∘ up(z)),  z = norm(x).

    Attributes:
        norm, down: as above.
        gate_up: gate and up, or one linear that gives both, gate first.
    """

    norm: Norm
    gate_up: tuple[QuantLinear, ...]
    down: QuantLinear

    @property
    def linears(self) -> tuple[QuantLinear, ...]:
        return (*self.gate_up, self.down)

    def can_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the fused operation computes what the modules would; arguments as for `AttentionHalf`."""
        return all(linear.bias is None for linear in self.linears) and _can_fuse(self.linears, dtype, device)

    def __call__(self, x_TD: torch.Tensor, kept: Kept, stash: HostStash | None = None) -> torch.Tensor:
        """The half's output [T, D]; arguments as for `AttentionHalf`."""
        block = FeedForward(self.norm.weight, self.norm.eps, _group(self.gate_up), _group((self.down,)))
        pairs = _pairs(self.linears)
        if _runs_on_cpu(x_TD.device):
            return cpu_feed_forward(x_TD, block, pairs, kept=kept, compute=self.down.compute)
        with stash.part() if stash is not None else nullcontext():
            return feed_forward(x_TD, block, pairs, kept=kept)


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """A layer of two halves."""

    attention: AttentionHalf
    feed_forward: FeedForwardHalf

    @property
    def linears(self) -> tuple[QuantLinear, ...]:
        return (*self.attention.linears, *self.feed_forward.linears)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers with equal ones take equal memory but for their pairs."""
        one, two = self.attention, self.feed_forward
        return (*one.output.shape, sum(linear.shape[0] for linear in one.qkv), one.num_heads, *two.down.shape)

    def can_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether both halves can."""
        return self.attention.can_fuse(dtype, device) and self.feed_forward.can_fuse(dtype, device)

    def __call__(
        self,
        x_TD: torch.Tensor,
        tables: RopeTables,
        documents: Documents,
        kept: Kept,
        stash: HostStash | None = None,
    ) -> torch.Tensor:
        """The layer's output [T, D]; arguments as for `AttentionHalf`."""
        if not kept.halves:
            y_TD: torch.Tensor = run_whole(lambda x_TD, kept: self(x_TD, tables, documents, kept), x_TD, stash=stash)
            return y_TD
        return self.feed_forward(self.attention(x_TD, tables, documents, kept, stash), kept, stash)


def can_run_fused(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GPU's fused operations are for activations of a dtype on a device."""
    return device.type == "cuda" and dtype in HALF_DTYPES


class HasFusedForm(Protocol):
    """A layer of a model that can also run fused."""

    def fused(self) -> FusedLayer:
        """Its fused form."""
        ...

    def __call__(
        self, x_TD: torch.Tensor, tables: RopeTables, documents: Documents, kept: Kept, stash: HostStash | None
    ) -> torch.Tensor:
        """Its output, fused, keeping for backward what it is told to, where it is told to."""
        ...


class FusedLayers:
    """The layers of a model, one after the other, each keeping what it is told to.

    Args:
        layers: first to last.
    """

    def __init__(self, layers: Sequence[HasFusedForm]) -> None:
        self.layers = list(layers)
        self._stash: HostStash | None = None

    def can_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether every layer can, for inputs of a dtype on a device."""
        return all(layer.fused().can_fuse(dtype, device) for layer in self.layers)

    def __call__(
        self,
        x_TD: torch.Tensor,
        tables: RopeTables,
        documents: Documents,
        kept: Sequence[Kept],
        announce: Callable[[int], None] = lambda number: None,
    ) -> torch.Tensor:
        """The last layer's output [T, D].

        Args:
            x_TD: the first layer's input.
            tables, documents: see `ops.fused.attention_block`.
            kept: of each layer.
            announce: called before each layer with its number, from 0 on.
        """
        uses_host = torch.is_grad_enabled() and any(one.on_host for one in kept)
        if uses_host:
            self._stash = self._stash or HostStash(x_TD.device)
            self._stash.begin()
        for number, (layer, one) in enumerate(zip(self.layers, kept, strict=True)):
            announce(number)
            x_TD = layer(x_TD, tables, documents, one, self._stash if uses_host and one.on_host else None)
        return x_TD

    def join_copies(self) -> None:
        """See `nn.Model.join_copies`."""
        if self._stash is not None:
            self._stash.join()


def _runs_on_cpu(device: torch.device) -> bool:
    """Whether the CPU's halves compute it. A test lets the GPU's do so, in Triton's interpreter."""
    return device.type != "cuda"


def _can_fuse(linears: Sequence[QuantLinear], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linears multiply in one way, which the halves of a device know, and have no dropout in their pairs."""
    compute = linears[0].compute
    if device.type == "cuda":
        is_supported = dtype in HALF_DTYPES and compute in ("auto", "bf16", "fp8")
    else:
        is_supported = dtype == torch.float32
    return is_supported and all(
        linear.compute == compute and not (linear.lora is not None and linear.lora.has_dropout) for linear in linears
    )


def _group(linears: Sequence[QuantLinear]) -> LinearGroup:
    return LinearGroup(
        blocks=tuple(linear.weight for linear in linears),
        types=tuple(linear.quant_type for linear in linears),
        row_counts=tuple(linear.shape[0] for linear in linears),
        num_columns=linears[0].shape[1],
        scales=tuple(0.0 if linear.lora is None else linear.lora.scale for linear in linears),
        is_fp8=linears[0].compute == "fp8",
    )


def _pairs(linears: Sequence[QuantLinear]) -> list[Pair]:
    return [None if linear.lora is None else (linear.lora.lora_a, linear.lora.lora_b) for linear in linears]


def _bias(linears: Sequence[QuantLinear], dtype: torch.dtype) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        linear.weight.new_zeros(linear.shape[0], dtype=dtype) if linear.bias is None else linear.bias.to(dtype)
        for linear in linears
    ]
    return torch.cat(parts)
