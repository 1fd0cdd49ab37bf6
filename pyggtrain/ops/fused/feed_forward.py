"""x + W_down (silu(W_gate y) ∘ W_up y) with y = norm(x): the feed-forward half of a layer.

Kept by forward: x and the rank-sized products; gate and up if so told. Backward, with dz the gradient of the result:

    d_a        = dz W_down,  a = silu(g) ∘ u     its pair from dz and a, made again while g and u are at hand
    d_g, d_u   = SwiGLU backward(d_a)            in place of g and u
    dx         = dz + norm backward([d_g | d_u] [W_gate; W_up])

Long rows are taken in parts of tokens, so that no buffer of width F grows with them; each weight is decoded once for
all parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyggtrain.ops.fused.kept import Kept
from pyggtrain.ops.fused.linear_group import ExtendedWeight, LinearGroup, Pair, add_gradients, pairs_of

# Tokens in a part. Matrix products are at full speed from some 4,096 rows on.
MAX_TOKENS = 8192


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Frozen part.

    Attributes:
        norm_weight: float32 [D]. eps: of the norm.
        gate_up: gate and up, F rows each, or one linear that gives both.
        down: one linear.
    """

    norm_weight: torch.Tensor
    eps: float
    gate_up: LinearGroup
    down: LinearGroup

    @property
    def width(self) -> int:
        """F."""
        return self.down.num_columns


@dataclass(eq=False)
class _Run:
    """Constants of one call, and what is kept outside autograd's saved tensors."""

    block: FeedForward
    kept: Kept
    weights: tuple[ExtendedWeight, ExtendedWeight] | None = None
    gate_up: list[torch.Tensor] | None = None

    def gate_and_up(self, buffer: torch.Tensor, weight: ExtendedWeight) -> torch.Tensor:
        """A buffer [t, at least 2 F] whose first 2 F columns are gate and up."""
        gate_up = weight.result_buffer(buffer.shape[0])
        weight.forward(buffer, out=gate_up[:, : weight.group.num_rows])
        return gate_up


def _parts(num_tokens: int) -> Iterator[slice]:
    """Parts of nearly equal length."""
    count = -(-num_tokens // MAX_TOKENS)
    length = -(-num_tokens // count)
    for first in range(0, num_tokens, length):
        yield slice(first, min(first + length, num_tokens))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _FeedForwardFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Run, *lora: torch.Tensor | None) -> torch.Tensor:
        from pyggtrain.kernels.swiglu import swiglu_forward

        block, pairs = run.block, pairs_of(lora)
        num_ff = block.width
        needs_backward = any(ctx.needs_input_grad)
        gate_up_weight = ExtendedWeight(block.gate_up, pairs[:-1], x.dtype)
        down: ExtendedWeight | None = None
        z = torch.empty_like(x)
        low_rank_in: list[torch.Tensor] = []
        low_rank_down: list[torch.Tensor] = []
        kept_gate_up: list[torch.Tensor] = []
        parts = list(_parts(x.shape[0]))
        for part in parts:
            buffer, _ = gate_up_weight.normed(x[part], block.norm_weight, eps=block.eps)
            low_rank_in.append(gate_up_weight.fill_low_rank(buffer))
            gate_up = run.gate_and_up(buffer, gate_up_weight)
            del buffer
            if len(parts) == 1 and not run.kept.weights:
                # One weight at a time where nothing is lost by it.
                del gate_up_weight
            if down is None:
                down = ExtendedWeight(block.down, pairs[-1:], x.dtype)
            a = down.input_buffer(gate_up.shape[0])
            swiglu_forward(gate_up[:, :num_ff], gate_up[:, num_ff : 2 * num_ff], out=a[:, :num_ff])
            if run.kept.gate_up and needs_backward:
                kept_gate_up.append(gate_up)
            del gate_up
            low_rank_down.append(down.fill_low_rank(a))
            down.add_forward(x[part], a, out=z[part])
            del a
        assert down is not None
        if run.kept.weights and needs_backward:
            run.weights = (gate_up_weight, down)
        run.gate_up = kept_gate_up or None
        ctx.run, ctx.lora = run, lora
        ctx.save_for_backward(x, _joined(low_rank_in), _joined(low_rank_down))
        return z

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> Any:
        from pyggtrain.kernels.columns import copy_columns_
        from pyggtrain.kernels.rms_norm import rms_norm_backward
        from pyggtrain.kernels.swiglu import swiglu_backward

        run: _Run = ctx.run
        block, pairs = run.block, pairs_of(ctx.lora)
        x, low_rank_in, low_rank_down = ctx.saved_tensors
        d_model, num_ff = x.shape[1], block.width
        dz = dz.contiguous()
        if run.kept.gate_up and run.gate_up is None:
            raise RuntimeError("a feed-forward half that keeps gate and up overwrites them: backward runs once")
        weights = run.weights or (
            ExtendedWeight(block.gate_up, pairs[:-1], x.dtype),
            ExtendedWeight(block.down, pairs[-1:], x.dtype),
        )
        kept_gate_up, run.gate_up, run.weights = run.gate_up, None, None
        gate_up_weight, down = weights
        dx = torch.empty_like(x)
        in_gradients: list[torch.Tensor | None] | None = None
        down_gradients: list[torch.Tensor | None] | None = None
        for index, part in enumerate(_parts(x.shape[0])):
            buffer, inverse_rms = gate_up_weight.normed(x[part], block.norm_weight, eps=block.eps)
            if kept_gate_up is None:
                copy_columns_(buffer[:, d_model:], low_rank_in[part])
                gate_up = run.gate_and_up(buffer, gate_up_weight)
            else:
                gate_up = kept_gate_up[index]
                kept_gate_up[index] = gate_up.new_empty(0)
            gate, up = gate_up[:, :num_ff], gate_up[:, num_ff : 2 * num_ff]
            dz_part = down.output_buffer(gate.shape[0])
            dz_part[:, :d_model] = dz[part]
            d_a = down.backward(dz_part)
            # Not unpacked: a name for d_gate would keep this part of gate and up through the next.
            a = swiglu_backward(d_a, gate, up, d_gate=gate, d_up=up, y=d_a)[2]
            down_gradients = add_gradients(down_gradients, down.pair_gradients(dz_part, a, low_rank_down[part]))
            del d_a, a, dz_part, gate, up
            d_normed = gate_up_weight.backward(gate_up)
            in_gradients = add_gradients(
                in_gradients, gate_up_weight.pair_gradients(gate_up, buffer[:, :d_model], low_rank_in[part])
            )
            del gate_up, buffer
            rms_norm_backward(d_normed, x[part], block.norm_weight, inverse_rms, d_residual=dz[part], out=dx[part])
            del d_normed
        assert in_gradients is not None and down_gradients is not None
        return dx, None, *in_gradients, *down_gradients


def feed_forward(x_TD: torch.Tensor, block: FeedForward, pairs: Sequence[Pair], *, kept: Kept) -> torch.Tensor:
    """x + W_down (silu(W_gate y) ∘ W_up y), y = norm(x).

    Args:
        x_TD: [T, D], contiguous.
        block: the frozen part.
        pairs: of each linear of `block.gate_up`, then that of `block.down`.
        kept: what backward need not compute again.

    Returns:
        [T, D].
    """
    lora = [item for pair in pairs for item in (pair or (None, None))]
    z_TD: torch.Tensor = _FeedForwardFunction.apply(x_TD, _Run(block, kept), *lora)  # type: ignore[no-untyped-call]
    return z_TD
