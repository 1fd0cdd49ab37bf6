"""A transformer layer through the two fused operations of `ops.fused`, from the modules that hold its weights.

What they cannot do (a bias where they have none, dropout in a pair, other dtypes) runs through the same modules' own
operations instead; `can_fuse` decides, and nothing else differs but speed, memory and rounding.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from pyggtrain.nn.host_stash import HostStash
from pyggtrain.nn.quant_linear import QuantLinear
from pyggtrain.nn.rms_norm import RMSNorm
from pyggtrain.ops.attention import Documents
from pyggtrain.ops.fused import (
    AttentionBlock,
    FeedForward,
    Kept,
    LinearGroup,
    Pair,
    attention_block,
    can_fuse_on_cpu,
    cpu_attention_block,
    cpu_feed_forward,
    feed_forward,
)
from pyggtrain.ops.quant_matmul import HALF_DTYPES
from pyggtrain.ops.rope import RopeTables


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """Names for the modules of a layer of the kind

        h = x + output(attention(rope(q), rope(k), v)),  q, k, v = qkv(attn_norm(x))
        y = h + down(silu(gate(z)) ∘ up(z)),             z = ffn_norm(h)

    Attributes:
        attn_norm, qkv, output: the first half; `qkv` is three linears, or one that gives all.
        ffn_norm, gate, up, down: the second half.
        num_heads, num_kv_heads, head_width, softmax_scale: as in `ops.attention`.
    """

    attn_norm: RMSNorm
    qkv: tuple[QuantLinear, ...]
    output: QuantLinear
    ffn_norm: RMSNorm
    gate: QuantLinear
    up: QuantLinear
    down: QuantLinear
    num_heads: int
    num_kv_heads: int
    head_width: int
    softmax_scale: float

    @property
    def linears(self) -> tuple[QuantLinear, ...]:
        return (*self.qkv, self.output, self.gate, self.up, self.down)

    def can_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the fused operations compute what the modules would, with the pairs as they are.

        Args:
            dtype: of the layer's input.
            device: where it lies; "meta" stands for a CPU's (`ops.rehearsal`).
        """
        if device.type == "cuda":
            is_supported = dtype in HALF_DTYPES and self.output.compute in ("auto", "bf16", "fp8")
        else:
            heads = self.num_heads, self.num_kv_heads, self.head_width
            is_supported = dtype == torch.float32 and can_fuse_on_cpu(*heads)
        return (
            is_supported
            and all(linear.compute == self.output.compute for linear in self.linears)
            and all(linear.bias is None for linear in (self.output, self.gate, self.up, self.down))
            and not any(linear.lora is not None and linear.lora.has_dropout for linear in self.linears)
        )

    def __call__(
        self,
        x_TD: torch.Tensor,
        tables: RopeTables,
        documents: Documents,
        kept: Kept,
        stash: HostStash | None = None,
    ) -> torch.Tensor:
        """The layer's output [T, D].

        Args:
            x_TD: its input.
            tables, documents, kept: see `ops.fused.attention_block`.
            stash: where what is kept goes; None: it stays.
        """
        attention = AttentionBlock(
            self.attn_norm.weight,
            self.attn_norm.eps,
            _group(self.qkv),
            _group((self.output,)),
            _bias(self.qkv, x_TD.dtype),
            self.num_heads,
            self.num_kv_heads,
            self.head_width,
            self.softmax_scale,
        )
        feed = FeedForward(self.ffn_norm.weight, self.ffn_norm.eps, _group((self.gate, self.up)), _group((self.down,)))
        if _runs_on_cpu(x_TD):
            compute, pairs = self.output.compute, _pairs((*self.qkv, self.output))
            h_TD = cpu_attention_block(x_TD, attention, tables, documents, pairs, kept=kept, compute=compute)
            return cpu_feed_forward(h_TD, feed, _pairs((self.gate, self.up, self.down)), kept=kept, compute=compute)
        with stash.part() if stash is not None else nullcontext():
            h_TD = attention_block(x_TD, attention, tables, documents, _pairs((*self.qkv, self.output)), kept=kept)
        with stash.part() if stash is not None else nullcontext():
            return feed_forward(h_TD, feed, _pairs((self.gate, self.up, self.down)), kept=kept)


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
        self, x_TD: torch.Tensor, tables: RopeTables, documents: Documents, kept: Sequence[Kept]
    ) -> torch.Tensor:
        """The last layer's output [T, D].

        Args:
            x_TD: the first layer's input.
            tables, documents: see `ops.fused.attention_block`.
            kept: of each layer.
        """
        uses_host = torch.is_grad_enabled() and any(one.on_host for one in kept)
        if uses_host:
            self._stash = self._stash or HostStash(x_TD.device)
            self._stash.begin()
        for layer, one in zip(self.layers, kept, strict=True):
            x_TD = layer(x_TD, tables, documents, one, self._stash if uses_host and one.on_host else None)
        return x_TD


def _runs_on_cpu(x: torch.Tensor) -> bool:
    """Whether the CPU's halves compute it. A test lets the GPU's do so, in Triton's interpreter."""
    return not x.is_cuda


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
