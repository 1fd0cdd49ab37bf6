"""x + W_o attention(rope(q), rope(k), v) with q, k, v = W_qkv norm(x): the attention half of a layer.

Kept by forward: x, and if so told rotated q k v and attention's output. Backward, with dy the gradient of the result:

    d_o   = dy W_o                               d_W_o's pair from dy and attention's output
    d_qkv = rope⁻¹(attention backward(d_o))      d_W_qkv's pairs from d_qkv and norm(x), made again
    dx    = dy + norm backward(d_qkv W_qkv)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyggtrain.ops.attention import Documents, gpu_attention_backward, gpu_attention_forward
from pyggtrain.ops.fused.kept import Kept
from pyggtrain.ops.fused.linear_group import ExtendedWeight, LinearGroup, Pair, heads_of, pairs_of
from pyggtrain.ops.rope import RopeTables


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Frozen part.

    Attributes:
        norm_weight: float32 [D]. eps: of the norm.
        qkv: q, k and v, or one linear that gives all three.
        output: W_o, one linear.
        bias: [(H + 2 N) K] in x's dtype, added to q, k and v, or None.
        num_heads, num_kv_heads, head_width: H, N, K.
        softmax_scale: multiplies q·k.
    """

    norm_weight: torch.Tensor
    eps: float
    qkv: LinearGroup
    output: LinearGroup
    bias: torch.Tensor | None
    num_heads: int
    num_kv_heads: int
    head_width: int
    softmax_scale: float

    @property
    def head_counts(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.num_kv_heads


@dataclass(eq=False)
class _Run:
    """Constants of one call, and what is kept outside autograd's saved tensors."""

    block: AttentionBlock
    tables: RopeTables
    documents: Documents
    kept: Kept
    qkv: ExtendedWeight | None = None
    output: ExtendedWeight | None = None

    def weight(self, name: str, pairs: Sequence[Pair], dtype: torch.dtype) -> ExtendedWeight:
        """The extended weight "qkv" or "output", decoded unless it was kept."""
        known: ExtendedWeight | None = getattr(self, name)
        if known is not None:
            return known
        made = ExtendedWeight(getattr(self.block, name), pairs, dtype)
        if self.kept.weights:
            setattr(self, name, made)
        return made

    def rotated(self, buffer: torch.Tensor, weight: ExtendedWeight) -> torch.Tensor:
        """q, k, v [T, (H + 2 N) K] after rotation."""
        from pyggtrain.kernels.rope import rope_forward

        block = self.block
        qkv = weight.forward(buffer)
        if block.bias is not None:
            qkv += block.bias
        (turned,) = heads_of(qkv, (block.num_heads + block.num_kv_heads,), block.head_width)
        rope_forward(turned, self.tables.cos_TP, self.tables.sin_TP, is_neox=self.tables.pairing == "NEOX", out=turned)
        return qkv

    def attention(self, qkv: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        q, k, v = heads_of(qkv, self.block.head_counts, self.block.head_width)
        return gpu_attention_forward(q, k, v, self.documents, self.block.softmax_scale)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Run, *lora: torch.Tensor | None) -> torch.Tensor:
        block, pairs = run.block, pairs_of(lora)
        weight = run.weight("qkv", pairs[:-1], x.dtype)
        buffer, _ = weight.normed(x, block.norm_weight, eps=block.eps)
        low_rank_qkv = weight.fill_low_rank(buffer)
        qkv = run.rotated(buffer, weight)
        del buffer, weight
        o_THK, kept = run.attention(qkv)
        o = o_THK.flatten(1)
        weight = run.weight("output", pairs[-1:], x.dtype)
        num_rows, width = weight.group.num_rows, weight.group.num_columns
        y = weight.add_forward(x, o)
        low_rank_o = x.new_empty(x.shape[0], 0)
        if weight.padding:
            low_rank_o = o @ weight.values[num_rows:, :width].t()
            y.addmm_(low_rank_o, weight.values[:num_rows, width:].t())
        ctx.run, ctx.lora = run, lora
        if run.kept.attention:
            ctx.others = [None if isinstance(item, torch.Tensor) else (item,) for item in kept]
            tensors = [item if isinstance(item, torch.Tensor) else None for item in kept]
            ctx.save_for_backward(x, low_rank_qkv, low_rank_o, qkv, o_THK, *tensors)
        else:
            ctx.save_for_backward(x, low_rank_qkv, low_rank_o)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        from pyggtrain.kernels.columns import copy_columns_
        from pyggtrain.kernels.lora import mm_float32
        from pyggtrain.kernels.rms_norm import rms_norm_backward
        from pyggtrain.kernels.rope import rope_backward

        run: _Run = ctx.run
        block, pairs = run.block, pairs_of(ctx.lora)
        x, low_rank_qkv, low_rank_o, *saved = ctx.saved_tensors
        num_tokens, d_model = x.shape
        dy = dy.contiguous()
        if run.kept.attention:
            qkv, o_THK, *tensors = saved
            kept = tuple(item if other is None else other[0] for item, other in zip(tensors, ctx.others, strict=True))
        else:
            weight = run.weight("qkv", pairs[:-1], x.dtype)
            buffer, _ = weight.normed(x, block.norm_weight, eps=block.eps)
            copy_columns_(buffer[:, d_model:], low_rank_qkv)
            qkv = run.rotated(buffer, weight)
            del buffer, weight
            o_THK, kept = run.attention(qkv)

        weight = run.weight("output", pairs[-1:], x.dtype)
        num_rows, width = weight.group.num_rows, weight.group.num_columns
        output_gradients: list[torch.Tensor | None] = [None, None]
        if weight.padding:
            dy_b = dy @ weight.values[:num_rows, width:]
            d_o = dy_b @ weight.values[num_rows:, :width]
            weight.add_backward_(d_o, dy)
            rank = weight.num_ranks
            output_gradients = [
                mm_float32(dy_b[:, :rank].t(), o_THK.flatten(1)).mul_(block.output.scales[0]),
                mm_float32(dy.t(), low_rank_o[:, :rank]),
            ]
        else:
            d_o = weight.backward(dy)
        del weight
        q, k, v = heads_of(qkv, block.head_counts, block.head_width)
        d_q, d_k, d_v = gpu_attention_backward(
            d_o.view(num_tokens, block.num_heads, -1), q, k, v, o_THK, kept, run.documents, block.softmax_scale
        )
        del q, k, v, qkv, o_THK, d_o, kept, saved

        weight = run.weight("qkv", pairs[:-1], x.dtype)
        d_qkv = weight.output_buffer(num_tokens)
        places = heads_of(d_qkv, block.head_counts, block.head_width)
        is_neox = run.tables.pairing == "NEOX"
        for gradient, place in ((d_q, places[0]), (d_k, places[1])):
            rope_backward(gradient, run.tables.cos_TP, run.tables.sin_TP, is_neox=is_neox, out=place)
        copy_columns_(places[2].flatten(1), d_v.flatten(1))
        del d_q, d_k, d_v
        buffer, inverse_rms = weight.normed(x, block.norm_weight, eps=block.eps)
        d_normed = weight.backward(d_qkv)
        qkv_gradients = weight.pair_gradients(d_qkv, buffer[:, :d_model], low_rank_qkv)
        run.qkv = run.output = None
        dx = rms_norm_backward(d_normed, x, block.norm_weight, inverse_rms, d_residual=dy, out=d_normed)
        return dx, None, *qkv_gradients, *output_gradients


def attention_block(
    x_TD: torch.Tensor,
    block: AttentionBlock,
    tables: RopeTables,
    documents: Documents,
    pairs: Sequence[Pair],
    *,
    kept: Kept,
) -> torch.Tensor:
    """x + W_o attention(rope(W_q y), rope(W_k y), W_v y), y = norm(x).

    Args:
        x_TD: [T, D], contiguous.
        block: the frozen part.
        tables: rotation of these T tokens.
        documents: bounds of the documents.
        pairs: of each linear of `block.qkv`, then that of `block.output`.
        kept: what backward need not compute again.

    Returns:
        [T, D].
    """
    lora = [item for pair in pairs for item in (pair or (None, None))]
    run = _Run(block, tables, documents, kept)
    y_TD: torch.Tensor = _AttentionFunction.apply(x_TD, run, *lora)  # type: ignore[no-untyped-call]
    return y_TD
