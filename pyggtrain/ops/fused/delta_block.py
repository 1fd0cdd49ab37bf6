"""x + W_o gated_norm(delta_rule(conv(W_qkv y)), W_z y), y = norm(x): the first half of a gated delta net's layer.

    q, k, v = unit length of q and k after silu(conv(W_qkv y))        z = W_z y
    g = a softplus(W_alpha y + dt),  beta = sigmoid(W_beta y)         (Yang et al. 2024, figure 1, as qwen35 has it)

Kept by forward: x, the gates, the rank-sized products, and if so told what W_qkv and W_z give and the delta rule's
output. Convolution and norms are made again in either case, and so are the states of the chunks. Backward, with d_r the
gradient of the result:

    d_h     = d_r W_o                        its pair from d_r and the normed heads h, made again
    d_o, dz = gated norm backward(d_h)
    d_qkv   = conv backward(delta rule backward(d_o)), and the gates' gradients with it
    dx      = d_r + norm backward([d_qkv | dz] [W_qkv; W_z] + [d_alpha | d_beta] [W_alpha; W_beta])

Gates are float32 from their projection on: an error in a log decay is one in everything that it fades.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyggtrain.ops.attention import Documents
from pyggtrain.ops.fused.kept import Kept
from pyggtrain.ops.fused.linear_group import ExtendedWeight, LinearGroup, Pair, heads_of, pairs_of


@dataclass(frozen=True, eq=False)
class DeltaBlock:
    """Frozen part. N key heads of K numbers, G value heads of V, C = 2 N K + G V channels.

    Attributes:
        norm_weight: float32 [D]. eps: of all norms.
        qkv_z: W_qkv (q, k, v: C rows) and W_z (G V rows).
        alpha_beta: W_alpha and W_beta, G rows each; grouped, one linear that gives for each key head first beta and
            then alpha of its value heads.
        output: W_o, one linear.
        conv_weight: float32 [C, W].
        a, dt: float32 [G].
        head_norm_weight: float32 [V].
        num_key_heads, num_heads, key_size, value_size: N, G, K, V.
        is_grouped: value heads that read one key head lie side by side (qwen3next); else value head h reads key head
            h mod N.
    """

    norm_weight: torch.Tensor
    eps: float
    qkv_z: LinearGroup
    alpha_beta: LinearGroup
    output: LinearGroup
    conv_weight: torch.Tensor
    a: torch.Tensor
    dt: torch.Tensor
    head_norm_weight: torch.Tensor
    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    is_grouped: bool = False

    @property
    def num_channels(self) -> int:
        """C."""
        return 2 * self.num_key_heads * self.key_size + self.num_heads * self.value_size

    @property
    def num_values(self) -> int:
        """G V."""
        return self.num_heads * self.value_size

    @property
    def conv_options(self) -> dict[str, Any]:
        """Of the convolution's kernels."""
        return {
            "has_silu": True,
            "num_normed": 2 * self.num_key_heads,
            "head_size": self.key_size,
            "eps": self.eps,
        }

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [T, N, K] and v [T, G, V] of the C columns of `mixed`."""
        q, k = heads_of(mixed, (self.num_key_heads, self.num_key_heads), self.key_size)
        return q, k, self.values(mixed[:, self.num_channels - self.num_values :])

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """G V columns as [T, G, V]."""
        return x.view(-1, self.num_heads, self.value_size)

    def by_key_head(self, x: torch.Tensor) -> torch.Tensor:
        """[T, G, ..] of grouped heads as [T, N, G / N, ..]."""
        return x.view(x.shape[0], self.num_key_heads, -1, *x.shape[2:])

    def gates(self, products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """alpha and b of the first 2 G columns of what W_alpha and W_beta give: [T, G], grouped [T, N, G / N]."""
        if not self.is_grouped:
            return products[:, : self.num_heads], products[:, self.num_heads : 2 * self.num_heads]
        b, alpha = products[:, : 2 * self.num_heads].view(products.shape[0], self.num_key_heads, 2, -1).unbind(2)
        return alpha, b


@dataclass(eq=False)
class _Run:
    """Constants of one call."""

    block: DeltaBlock
    documents: Documents
    kept: Kept

    @property
    def scale(self) -> float:
        return float(self.block.key_size**-0.5)

    def mixed(self, qkv_z: torch.Tensor) -> torch.Tensor:
        """q, k and v, [T, C]."""
        from pyggtrain.kernels.causal_conv1d import causal_conv1d_forward

        block = self.block
        first_token = self.documents.mask(qkv_z.device).first_key
        return causal_conv1d_forward(
            qkv_z[:, : block.num_channels], block.conv_weight, first_token, **block.conv_options
        )

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as the delta rule reads them: it takes key head h mod N for value head h, so grouped heads get one
        of their own.
        """
        q, k, v = self.block.heads(mixed)
        if self.block.is_grouped:
            num_values = self.block.num_heads // self.block.num_key_heads
            q, k = (x.repeat_interleave(num_values, 1) for x in (q, k))
        return q, k, v

    def delta_rule(self, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Its output, [T, G, V]."""
        from pyggtrain.kernels.gated_delta_rule.forward import gated_delta_rule_forward

        chunks = self.documents.chunks(mixed.device)
        return gated_delta_rule_forward(*self.heads(mixed), log_decay, beta, chunks, scale=self.scale)[0]

    def delta_rule_backward(
        self, d_o: torch.Tensor, mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of mixed, log_decay and beta."""
        from pyggtrain.kernels.gated_delta_rule.backward import gated_delta_rule_backward

        block = self.block
        d_mixed = torch.empty_like(mixed)
        q, k, v = self.heads(mixed)
        places = block.heads(d_mixed)
        out = (torch.empty_like(q), torch.empty_like(k), places[2]) if block.is_grouped else places
        chunks = self.documents.chunks(mixed.device)
        *_, d_decay, d_beta = gated_delta_rule_backward(
            d_o, q, k, v, log_decay, beta, chunks, scale=self.scale, out=out
        )
        if block.is_grouped:
            for place, gradient in zip(places[:2], out[:2], strict=True):
                torch.sum(block.by_key_head(gradient), 2, out=place)
        return d_mixed, d_decay, d_beta


def _gate_products(normed: torch.Tensor, weight: ExtendedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """[alpha | b] float32 [T, 2 G] from norm(x) [T, D], and the low-rank products [T, P] to keep."""
    from pyggtrain.kernels.lora import mm_float32

    num_rows, width = weight.group.num_rows, weight.group.num_columns
    products = mm_float32(normed, weight.values[:num_rows, :width].t())
    low_rank = normed @ weight.values[num_rows:, :width].t()
    if weight.padding:
        products += mm_float32(low_rank, weight.values[:num_rows, width:].t())
    return products, low_rank


class _DeltaFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Run, *lora: torch.Tensor | None) -> torch.Tensor:
        from pyggtrain.kernels.delta_gates import delta_gates_forward
        from pyggtrain.kernels.gated_rms_norm import gated_rms_norm_forward

        block, pairs = run.block, pairs_of(lora)
        d_model = x.shape[1]
        weight = ExtendedWeight(block.qkv_z, pairs[:2], x.dtype)
        buffer, _ = weight.normed(x, block.norm_weight, eps=block.eps)
        low_rank_in = weight.fill_low_rank(buffer)
        qkv_z = weight.forward(buffer)
        gates = ExtendedWeight(block.alpha_beta, pairs[2:-1], x.dtype)
        products, low_rank_gates = _gate_products(buffer[:, :d_model], gates)
        del buffer, weight, gates
        alpha, b = block.gates(products)
        if block.is_grouped:
            alpha, b = (part.flatten(1).contiguous() for part in (alpha, b))
        log_decay, beta = delta_gates_forward(alpha, b, block.a, block.dt)
        o = run.delta_rule(run.mixed(qkv_z), log_decay, beta)

        weight = ExtendedWeight(block.output, pairs[-1:], x.dtype)
        normed = weight.input_buffer(x.shape[0])
        z = block.values(qkv_z[:, block.num_channels :])
        place = block.values(normed[:, : block.num_values])
        gated_rms_norm_forward(o, z, block.head_norm_weight, eps=block.eps, out=place)
        low_rank_out = weight.fill_low_rank(normed)
        y = torch.addmm(x, normed, weight.values[: weight.group.num_rows].t())
        ctx.run, ctx.lora = run, lora
        kept = (qkv_z, o) if run.kept.attention else ()
        ctx.save_for_backward(x, alpha, log_decay, beta, low_rank_in, low_rank_gates, low_rank_out, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        from pyggtrain.kernels.causal_conv1d import causal_conv1d_backward
        from pyggtrain.kernels.columns import copy_columns_
        from pyggtrain.kernels.delta_gates import delta_gates_backward
        from pyggtrain.kernels.gated_rms_norm import gated_rms_norm_backward, gated_rms_norm_forward
        from pyggtrain.kernels.lora import mm_float32
        from pyggtrain.kernels.rms_norm import rms_norm_backward

        run: _Run = ctx.run
        block, pairs = run.block, pairs_of(ctx.lora)
        x, alpha, log_decay, beta, low_rank_in, low_rank_gates, low_rank_out, *kept = ctx.saved_tensors
        (num_tokens, d_model), num_heads = x.shape, block.num_heads
        dy = dy.contiguous()
        if kept:
            qkv_z, o = kept
            mixed = run.mixed(qkv_z)
        else:
            weight = ExtendedWeight(block.qkv_z, pairs[:2], x.dtype)
            buffer, _ = weight.normed(x, block.norm_weight, eps=block.eps)
            copy_columns_(buffer[:, d_model:], low_rank_in)
            qkv_z = weight.forward(buffer)
            del buffer, weight
            mixed = run.mixed(qkv_z)
            o = run.delta_rule(mixed, log_decay, beta)
        z = block.values(qkv_z[:, block.num_channels :])

        weight = ExtendedWeight(block.output, pairs[-1:], x.dtype)
        num_rows, width = weight.group.num_rows, weight.group.num_columns
        output_gradients: list[torch.Tensor | None] = [None, None]
        if weight.padding:
            normed = gated_rms_norm_forward(o, z, block.head_norm_weight, eps=block.eps)
            dy_b = dy @ weight.values[:num_rows, width:]
            d_h = dy_b @ weight.values[num_rows:, :width]
            d_h.addmm_(dy, weight.values[:num_rows, :width])
            rank = weight.num_ranks
            output_gradients = [
                mm_float32(dy_b[:, :rank].t(), normed.flatten(1)).mul_(block.output.scales[0]),
                mm_float32(dy.t(), low_rank_out[:, :rank]),
            ]
            del normed
        else:
            d_h = dy @ weight.values

        weight = ExtendedWeight(block.qkv_z, pairs[:2], x.dtype)
        d_qkv_z = weight.output_buffer(num_tokens)
        dz = block.values(d_qkv_z[:, block.num_channels : block.num_channels + block.num_values])
        d_o = block.values(d_h)
        gated_rms_norm_backward(d_o, o, z, block.head_norm_weight, eps=block.eps, do=d_o, dz=dz)
        del o
        d_mixed, d_decay, d_beta = run.delta_rule_backward(d_o, mixed, log_decay, beta)
        del d_h, d_o, mixed
        causal_conv1d_backward(
            d_mixed,
            qkv_z[:, : block.num_channels],
            block.conv_weight,
            run.documents.mask(x.device).first_key,
            **block.conv_options,
            dc=d_mixed,
            out=d_qkv_z[:, : block.num_channels],
        )
        del d_mixed, qkv_z, z, kept

        buffer, inverse_rms = weight.normed(x, block.norm_weight, eps=block.eps)
        d_normed = weight.backward(d_qkv_z)
        in_gradients = weight.pair_gradients(d_qkv_z, buffer[:, :d_model], low_rank_in)
        del d_qkv_z
        weight = ExtendedWeight(block.alpha_beta, pairs[2:-1], x.dtype)
        d_products = weight.output_buffer(num_tokens)
        places = block.gates(d_products)
        d_alpha, d_b = (x.new_empty(num_tokens, num_heads) for _ in range(2)) if block.is_grouped else places
        delta_gates_backward(d_decay, d_beta, alpha, beta, block.a, block.dt, d_alpha=d_alpha, d_b=d_b)
        if block.is_grouped:
            for place, gradient in zip(places, (d_alpha, d_b), strict=True):
                place.copy_(block.by_key_head(gradient))
        d_normed += weight.backward(d_products)
        gate_gradients = weight.pair_gradients(d_products, buffer[:, :d_model], low_rank_gates)
        dx = rms_norm_backward(d_normed, x, block.norm_weight, inverse_rms, d_residual=dy, out=d_normed)
        return dx, None, *in_gradients, *gate_gradients, *output_gradients


def delta_block(
    x_TD: torch.Tensor, block: DeltaBlock, documents: Documents, pairs: Sequence[Pair], *, kept: Kept
) -> torch.Tensor:
    """x + W_o gated_norm(delta_rule(conv(W_qkv y)), W_z y), y = norm(x).

    Args:
        x_TD: [T, D], contiguous.
        block: the frozen part.
        documents: bounds of the documents; each begins with an empty history and state.
        pairs: of W_qkv, W_z, each linear of `block.alpha_beta`, and W_o.
        kept: what backward need not compute again: with `attention`, what W_qkv and W_z give and the delta rule's
            output. The rest of it does not matter here.

    Returns:
        [T, D].
    """
    lora = [item for pair in pairs for item in (pair or (None, None))]
    y_TD: torch.Tensor = _DeltaFunction.apply(  # type: ignore[no-untyped-call]
        x_TD, _Run(block, documents, kept), *lora
    )
    return y_TD
