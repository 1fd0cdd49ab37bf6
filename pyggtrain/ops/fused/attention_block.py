"""x + W_o attention(rope(q), rope(k), v) with q, k, v = W_qkv norm(x): the attention half of a layer.

Kept by forward: x, and if so told rotated q k v and attention's output. Backward, with dy the gradient of the result:

    d_o   = dy W_o                               d_W_o's pair from dy and attention's output
    d_qkv = rope⁻¹(attention backward(d_o))      d_W_qkv's pairs from d_qkv and norm(x), made again
    dx    = dy + norm backward(d_qkv W_qkv)

Some models norm each head of q and k before they turn it. Then q k v are kept as the product gave them: norm and
rotation are passes over memory, and backward makes them again, since the norm's gradient wants what went into it.

Of these some also gate attention's output o (Qiu et al. 2025), from rows of W_q behind each head's own. Gates g lie
among what the product gave, so they are kept with it:

    result = x + W_o h,  h = o ∘ sigmoid(g)        d_o = d_h ∘ sigmoid(g)        d_g = d_h ∘ o ∘ sigmoid'(g)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pyggtrain.ops.attention import PLAIN, Documents, Variant, gpu_attention_backward, gpu_attention_forward
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
        bias: [(H + 2 N) K] in x's dtype, added to q, k and v, or None. output_bias: [D], to the result, or None.
        num_heads, num_kv_heads, head_width: H, N, K.
        softmax_scale: multiplies q·k.
        head_norms: float32 [K] weights of the norms of q's and of k's heads, or None. head_eps: of both.
        variant: what is not plain in attention.
        is_gated: in W_q the K rows of each head are followed by K of its gate, with norms of heads only.
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
    output_bias: torch.Tensor | None = None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    head_eps: float = 0.0
    variant: Variant = PLAIN
    is_gated: bool = False

    @property
    def head_counts(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.num_kv_heads

    def heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """q, k, v and, if there are any, gates in what W_qkv gives: [T, heads, K] each."""
        if not self.is_gated:
            return heads_of(qkv, self.head_counts, self.head_width)
        both, k, v = heads_of(qkv, (2 * self.num_heads, *self.head_counts[1:]), self.head_width)
        return [both[:, ::2], k, v, both[:, 1::2]]


class _Norms(NamedTuple):
    """q and k before the norms of their heads, [T heads, K], and 1 / rms of each head, float32 [T heads]."""

    before: tuple[torch.Tensor, torch.Tensor]
    inverse_rms: tuple[torch.Tensor, torch.Tensor]


class _Heads(NamedTuple):
    """q, k, v as attention reads them, each [T, heads, K], and what their norms' backward wants."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    norms: _Norms | None = None


@dataclass(eq=False)
class _Run:
    """Constants of one call, and what is kept outside autograd's saved tensors."""

    block: AttentionBlock
    tables: RopeTables | None
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

    def product(self, buffer: torch.Tensor, weight: ExtendedWeight) -> torch.Tensor:
        """What is kept of q, k, v (and gates), [T, (H + 2 N) K] and H K more of gates: after rotation, or before the
        norms of heads.
        """
        block = self.block
        qkv = weight.forward(buffer)
        if block.bias is not None:
            qkv += block.bias
        if block.head_norms is None:
            (turned,) = heads_of(qkv, (block.num_heads + block.num_kv_heads,), block.head_width)
            self._turn_(turned)
        return qkv

    def heads(self, qkv: torch.Tensor) -> _Heads:
        """q, k and v from what `product` gave."""
        from pyggtrain.kernels.rms_norm import rms_norm_forward

        block = self.block
        q, k, v = block.heads(qkv)[:3]
        if block.head_norms is None:
            return _Heads(q, k, v)
        before_q, before_k = (x.reshape(-1, block.head_width) for x in (q, k))
        norm_q, norm_k = block.head_norms
        normed_q, _, rms_q = rms_norm_forward(before_q, norm_q, eps=block.head_eps)
        normed_k, _, rms_k = rms_norm_forward(before_k, norm_k, eps=block.head_eps)
        q, k = normed_q.view(q.shape), normed_k.view(k.shape)
        self._turn_(q)
        self._turn_(k)
        return _Heads(q, k, v, _Norms((before_q, before_k), (rms_q, rms_k)))

    def _turn_(self, heads: torch.Tensor) -> None:
        from pyggtrain.kernels.rope import rope_forward

        if (tables := self.tables) is not None:
            rope_forward(heads, tables.cos_TP, tables.sin_TP, is_neox=tables.pairing == "NEOX", out=heads)

    def heads_backward(
        self, gradients: tuple[torch.Tensor, ...], norms: _Norms | None, places: list[torch.Tensor]
    ) -> None:
        """From gradients of q, k, v as attention read them to those of the product, in `places`. Some are overwritten
        on the way.
        """
        from pyggtrain.kernels.columns import copy_columns_
        from pyggtrain.kernels.rms_norm import rms_norm_backward
        from pyggtrain.kernels.rope import rope_backward

        head_norms, tables = self.block.head_norms, self.tables
        for index, (gradient, place) in enumerate(zip(gradients[:2], places[:2], strict=True)):
            gradient = gradient.contiguous()
            if tables is not None:
                turned = place if norms is None else gradient
                is_neox = tables.pairing == "NEOX"
                gradient = rope_backward(gradient, tables.cos_TP, tables.sin_TP, is_neox=is_neox, out=turned)
            if norms is not None and head_norms is not None:
                flat = gradient.view(-1, self.block.head_width)
                rms_norm_backward(flat, norms.before[index], head_norms[index], norms.inverse_rms[index], out=flat)
            if self.block.is_gated:
                # Gates lie between the heads of q.
                place.copy_(gradient)
            elif gradient is not place:
                copy_columns_(place.flatten(1), gradient.flatten(1))
        copy_columns_(places[2].flatten(1), gradients[2].flatten(1))

    def gated(self, o: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """h [T, H K] from attention's output o [T, H, K] and what `product` gave."""
        if self.block.is_gated:
            o = o * self.block.heads(qkv)[3].sigmoid()
        return o.flatten(1)

    def gate_backward(
        self, d_h: torch.Tensor, o: torch.Tensor, qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """d_o [T, H, K] from d_h [T, H K], and d_g, None without gates."""
        d_h = d_h.view(o.shape)
        if not self.block.is_gated:
            return d_h, None
        opening = self.block.heads(qkv)[3].sigmoid()
        return d_h * opening, torch.ops.aten.sigmoid_backward(d_h * o, opening)

    def attention(self, heads: _Heads) -> tuple[torch.Tensor, tuple[Any, ...]]:
        block = self.block
        return gpu_attention_forward(heads.q, heads.k, heads.v, self.documents, block.softmax_scale, block.variant)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Run, *lora: torch.Tensor | None) -> torch.Tensor:
        block, pairs = run.block, pairs_of(lora)
        weight = run.weight("qkv", pairs[:-1], x.dtype)
        buffer, _ = weight.normed(x, block.norm_weight, eps=block.eps)
        low_rank_qkv = weight.fill_low_rank(buffer)
        qkv = run.product(buffer, weight)
        del buffer, weight
        o_THK, kept = run.attention(run.heads(qkv))
        o = run.gated(o_THK, qkv)
        weight = run.weight("output", pairs[-1:], x.dtype)
        num_rows, width = weight.group.num_rows, weight.group.num_columns
        y = weight.add_forward(x, o)
        low_rank_o = x.new_empty(x.shape[0], 0)
        if weight.padding:
            low_rank_o = o @ weight.values[num_rows:, :width].t()
            y.addmm_(low_rank_o, weight.values[:num_rows, width:].t())
        if block.output_bias is not None:
            y += block.output_bias
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

        run: _Run = ctx.run
        block, pairs = run.block, pairs_of(ctx.lora)
        x, low_rank_qkv, low_rank_o, *saved = ctx.saved_tensors
        num_tokens, d_model = x.shape
        dy = dy.contiguous()
        if run.kept.attention:
            qkv, o_THK, *tensors = saved
            kept = tuple(item if other is None else other[0] for item, other in zip(tensors, ctx.others, strict=True))
            heads = run.heads(qkv)
        else:
            weight = run.weight("qkv", pairs[:-1], x.dtype)
            buffer, _ = weight.normed(x, block.norm_weight, eps=block.eps)
            copy_columns_(buffer[:, d_model:], low_rank_qkv)
            qkv = run.product(buffer, weight)
            del buffer, weight
            heads = run.heads(qkv)
            o_THK, kept = run.attention(heads)

        weight = run.weight("output", pairs[-1:], x.dtype)
        num_rows, width = weight.group.num_rows, weight.group.num_columns
        output_gradients: list[torch.Tensor | None] = [None, None]
        if weight.padding:
            dy_b = dy @ weight.values[:num_rows, width:]
            d_h = dy_b @ weight.values[num_rows:, :width]
            weight.add_backward_(d_h, dy)
            rank = weight.num_ranks
            output_gradients = [
                mm_float32(dy_b[:, :rank].t(), run.gated(o_THK, qkv)).mul_(block.output.scales[0]),
                mm_float32(dy.t(), low_rank_o[:, :rank]),
            ]
        else:
            d_h = weight.backward(dy)
        del weight
        d_o, d_gate = run.gate_backward(d_h, o_THK, qkv)
        gradients = gpu_attention_backward(
            d_o,
            heads.q,
            heads.k,
            heads.v,
            o_THK,
            kept,
            run.documents,
            block.softmax_scale,
            block.variant,
        )
        norms = heads.norms
        del heads, qkv, o_THK, d_h, d_o, kept, saved

        weight = run.weight("qkv", pairs[:-1], x.dtype)
        d_qkv = weight.output_buffer(num_tokens)
        places = block.heads(d_qkv)
        run.heads_backward(gradients, norms, places)
        if d_gate is not None:
            places[3].copy_(d_gate)
        del gradients, norms, d_gate
        buffer, inverse_rms = weight.normed(x, block.norm_weight, eps=block.eps)
        d_normed = weight.backward(d_qkv)
        qkv_gradients = weight.pair_gradients(d_qkv, buffer[:, :d_model], low_rank_qkv)
        run.qkv = run.output = None
        dx = rms_norm_backward(d_normed, x, block.norm_weight, inverse_rms, d_residual=dy, out=d_normed)
        return dx, None, *qkv_gradients, *output_gradients


def attention_block(
    x_TD: torch.Tensor,
    block: AttentionBlock,
    tables: RopeTables | None,
    documents: Documents,
    pairs: Sequence[Pair],
    *,
    kept: Kept,
) -> torch.Tensor:
    """x + W_o attention(rope(W_q y), rope(W_k y), W_v y), y = norm(x), and what else `block` has.

    Args:
        x_TD: [T, D], contiguous.
        block: the frozen part.
        tables: rotation of these T tokens; None: none.
        documents: bounds of the documents.
        pairs: of each linear of `block.qkv`, then that of `block.output`.
        kept: what backward need not compute again.

    Returns:
        [T, D].
    """
    assert block.head_norms is not None or not block.is_gated, "gates, but no norms of heads"
    lora = [item for pair in pairs for item in (pair or (None, None))]
    run = _Run(block, tables, documents, kept)
    y_TD: torch.Tensor = _AttentionFunction.apply(x_TD, run, *lora)  # type: ignore[no-untyped-call]
    return y_TD
