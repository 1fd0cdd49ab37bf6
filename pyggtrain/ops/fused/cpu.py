"""The two halves of a transformer layer as one operation each, on a CPU in float32.

The same functions as `attention_block` and `feed_forward` of this package, made of the bridge's and torch's products.
What they save over single operations: a hundred calls through autograd and the dispatcher for each layer and step, thin
products of pairs that read one input, and activations that are cheaper to make again than to keep (norms, SwiGLU).

For linears i with a common input x [T, K], A the rows of all A_i one below the other:

    h   = A xᵀ                              all pairs at once, R = Σ R_i
    y_i = x W_iᵀ + s_i h_iᵀ B_iᵀ            h_i the rows of pair i
    dh_i = s_i B_iᵀ dy_iᵀ
    dx  = Σ dy_i W_i + dhᵀ A
    dA  = dh x,   dB_i = s_i (h_i dy_i)ᵀ

Thin products have R as their leading dimension, see `ops.lora_linear`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pyggtrain.ops import quant_matmul
from pyggtrain.ops.attention import Documents
from pyggtrain.ops.fused.attention_block import AttentionBlock
from pyggtrain.ops.fused.feed_forward import FeedForward
from pyggtrain.ops.fused.kept import Kept
from pyggtrain.ops.fused.linear_group import LinearGroup, Pair, heads_of, pairs_of
from pyggtrain.ops.rms_norm import cpu_rms_norm, cpu_rms_norm_backward
from pyggtrain.ops.rope import RopeTables, cpu_rope
from pyggtrain.ops.swiglu import cpu_swiglu, cpu_swiglu_backward

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# torch.nn.attention.SDPBackend.FLASH_ATTENTION, whose import would cost a second.
_FLASH = 1
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class _Linears:
    """Linears with a common input, and their pairs."""

    group: LinearGroup
    compute: str
    pairs: Sequence[Pair]

    def _rows_of_a(self) -> torch.Tensor | None:
        """A [R, K] of all pairs, None if there is no pair."""
        parts = [pair[0] for pair in self.pairs if pair is not None]
        return None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor | None]:
        """Those of R rows that belong to each linear's pair, None for one without."""
        parts: list[torch.Tensor | None] = []
        first = 0
        for pair in self.pairs:
            rank = 0 if pair is None else pair[0].shape[0]
            parts.append(rows[first : first + rank] if rank else None)
            first += rank
        return parts

    def forward(
        self, x_TK: torch.Tensor, *, bias_N: torch.Tensor | None = None, residual_TN: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All results beside each other, [T, Σ N_i], and h [R, T]."""
        num_tokens, num_rows = x_TK.shape[0], self.group.num_rows
        rows_of_a = self._rows_of_a()
        h_RT = x_TK.new_empty(0, num_tokens) if rows_of_a is None else rows_of_a @ x_TK.t()
        start_TN = quant_matmul.start_of(bias_N, residual_TN, num_tokens)
        y_TN = x_TK.new_empty(num_tokens, num_rows) if start_TN is None else start_TN
        for y, part, pair, scale, blocks, type in self._each(y_TN, h_RT):
            if part is not None and pair is not None:
                b_RN = pair[1].t() * scale
                torch.addmm(y, part.t(), b_RN, beta=0.0 if start_TN is None else 1.0, out=y)
            is_begun = part is not None or start_TN is not None
            quant_matmul.forward(x_TK, blocks, type, compute=self.compute, out=y, accumulate=is_begun)
        return y_TN, h_RT

    def backward(
        self, dy_TN: torch.Tensor, x_TK: torch.Tensor, h_RT: torch.Tensor, *, needs_dx: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """dx [T, K], and the gradients of lora_a and lora_b of each pair in turn.

        Args:
            dy_TN: [T, Σ N_i].
            x_TK: the input.
            h_RT: what `forward` returned.
            needs_dx: else None is returned in its place.
        """
        rows_of_a = self._rows_of_a()
        dh_RT = torch.empty_like(h_RT)
        gradients: list[torch.Tensor | None] = []
        for (dy, dh, pair, scale, _, _), h in zip(self._each(dy_TN, dh_RT), self._parts(h_RT), strict=True):
            if dh is None or h is None or pair is None:
                gradients += [None, None]
                continue
            torch.mm(pair[1].t() * scale, dy.t(), out=dh)
            gradients += [dh, (h @ dy).t().mul(scale).contiguous()]
        if rows_of_a is not None:
            # Each gradient has memory of its own, since each may live as long as it likes.
            parts = self._parts(dh_RT @ x_TK)
            gradients[::2] = [None if part is None else part.clone() for part in parts]
        if not needs_dx:
            return None, gradients
        dx_TK = torch.empty_like(x_TK) if rows_of_a is None else dh_RT.t() @ rows_of_a
        is_begun = rows_of_a is not None
        for dy, _, _, _, blocks, type in self._each(dy_TN, dh_RT):
            quant_matmul.backward(dy, blocks, type, compute=self.compute, out=dx_TK, accumulate=is_begun)
            is_begun = True
        return dx_TK, gradients

    def _each(self, wide_TN: torch.Tensor, thin_RT: torch.Tensor) -> Any:
        """(columns of `wide_TN`, rows of `thin_RT` or None, pair, scale, blocks, type) of each linear."""
        group = self.group
        columns = torch.split(wide_TN, list(group.row_counts), dim=1)
        return zip(columns, self._parts(thin_RT), self.pairs, group.scales, group.blocks, group.types, strict=True)


class _Heads(NamedTuple):
    """q, k, v as attention reads them, each [T, heads, K].

    Attributes:
        inverse_rms: 1 / rms of each head of q and of k before their norms, [T, heads, 1]; empty without norms.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    inverse_rms: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class _Attention:
    block: AttentionBlock
    tables: RopeTables | None
    documents: Documents
    kept: Kept
    compute: str

    def product(self, x_TD: torch.Tensor, linears: _Linears) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept of q, k, v [T, (H + 2 N) K]: after rotation, or before the norms of heads; the low-rank
        products.
        """
        y_TD, _ = cpu_rms_norm(x_TD, self.block.norm_weight, self.block.eps)
        qkv_TN, h_RT = linears.forward(y_TD, bias_N=self.block.bias)
        if self.block.head_norms is None:
            self._turn_(self._q_and_k(qkv_TN))
        return qkv_TN, h_RT

    def heads(self, qkv_TN: torch.Tensor) -> _Heads:
        """q, k and v from what `product` gave."""
        block = self.block
        q, k, v = heads_of(qkv_TN, block.head_counts, block.head_width)
        if block.head_norms is None:
            return _Heads(q, k, v)
        (q, r_q), (k, r_k) = (
            cpu_rms_norm(x, weight, block.head_eps) for x, weight in zip((q, k), block.head_norms, strict=True)
        )
        self._turn_(q)
        self._turn_(k)
        return _Heads(q, k, v, (r_q, r_k))

    def attention(self, heads: _Heads) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """o [T, H K] and the log-sum-exp of each document."""
        parts, logsumexps = [], []
        for document in self._documents():
            o, logsumexp = _flash(
                *(_batched(part[document]) for part in heads[:3]), 0.0, True, scale=self.block.softmax_scale
            )
            parts.append(o.transpose(1, 2).flatten(2).squeeze(0))
            logsumexps.append(logsumexp)
        return parts[0] if len(parts) == 1 else torch.cat(parts), logsumexps

    def backward(
        self,
        d_o_TN: torch.Tensor,
        o_TN: torch.Tensor,
        qkv_TN: torch.Tensor,
        heads: _Heads,
        logsumexps: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Gradient of the products q, k and v, [T, (H + 2 N) K]."""
        block = self.block
        d_qkv_TN = torch.empty_like(qkv_TN)
        places = heads_of(d_qkv_TN, block.head_counts, block.head_width)
        d_o, o = (x.view(-1, block.num_heads, block.head_width) for x in (d_o_TN, o_TN))
        for document, logsumexp in zip(self._documents(), logsumexps, strict=True):
            gradients = _flash_backward(
                *(_batched(part[document]) for part in (d_o, *heads[:3], o)),
                logsumexp,
                0.0,
                True,
                scale=block.softmax_scale,
            )
            for place, gradient in zip(places, gradients, strict=True):
                place[document] = gradient.squeeze(0).transpose(0, 1)
        self._turn_(self._q_and_k(d_qkv_TN), is_inverse=True)
        if block.head_norms is not None:
            before = heads_of(qkv_TN, block.head_counts[:2], block.head_width)
            for place, x, r, weight in zip(places[:2], before, heads.inverse_rms, block.head_norms, strict=True):
                place.copy_(cpu_rms_norm_backward(place, x, r, weight))
        return d_qkv_TN

    def _q_and_k(self, qkv_TN: torch.Tensor) -> torch.Tensor:
        """The heads of q and k, which lie beside each other, [T, H + N, K]."""
        (heads,) = heads_of(qkv_TN, (self.block.num_heads + self.block.num_kv_heads,), self.block.head_width)
        return heads

    def _turn_(self, heads_THK: torch.Tensor, *, is_inverse: bool = False) -> None:
        if self.tables is not None:
            cpu_rope(heads_THK, self.tables, is_inverse=is_inverse, out=heads_THK)

    def _documents(self) -> list[slice]:
        return [slice(start, end) for start, end in pairwise(self.documents.bounds)]


@cache
def can_fuse_on_cpu(num_heads: int, num_kv_heads: int, head_width: int) -> bool:
    """Whether torch's flash attention for CPUs takes such heads: these operations call it by name."""
    # The answer is for the CPU, also when a rehearsal is the first to ask.
    with _disable_current_modes():
        q, k = (torch.empty(1, heads, 2, head_width) for heads in (num_heads, num_kv_heads))
        return torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True) == _FLASH


def _batched(x_THK: torch.Tensor) -> torch.Tensor:
    return x_THK.transpose(0, 1).unsqueeze(0)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Attention, *lora: torch.Tensor | None) -> torch.Tensor:
        pairs = pairs_of(lora)
        qkv, h_qkv = run.product(x, _Linears(run.block.qkv, run.compute, pairs[:-1]))
        o, logsumexps = run.attention(run.heads(qkv))
        output = _Linears(run.block.output, run.compute, pairs[-1:])
        y, h_output = output.forward(o, bias_N=run.block.output_bias, residual_TN=x)
        ctx.run = run
        kept = (qkv, o, *logsumexps) if run.kept.attention else ()
        ctx.num_kept = len(kept)
        ctx.save_for_backward(x, h_qkv, h_output, *kept, *lora)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        run: _Attention = ctx.run
        x, h_qkv, h_output, *rest = ctx.saved_tensors
        kept, lora = rest[: ctx.num_kept], rest[ctx.num_kept :]
        pairs = pairs_of(lora)
        qkv_linears = _Linears(run.block.qkv, run.compute, pairs[:-1])
        if kept:
            qkv, o, *logsumexps = kept
            heads = run.heads(qkv)
        else:
            qkv, _ = run.product(x, qkv_linears)
            heads = run.heads(qkv)
            o, logsumexps = run.attention(heads)
        output = _Linears(run.block.output, run.compute, pairs[-1:])
        d_o, output_gradients = output.backward(dy, o, h_output, needs_dx=True)
        assert d_o is not None
        d_qkv = run.backward(d_o, o, qkv, heads, logsumexps)
        del qkv, heads, o, d_o, kept, rest
        y, r = cpu_rms_norm(x, run.block.norm_weight, run.block.eps)
        d_normed, qkv_gradients = qkv_linears.backward(d_qkv, y, h_qkv, needs_dx=ctx.needs_input_grad[0])
        dx = None if d_normed is None else cpu_rms_norm_backward(d_normed, x, r, run.block.norm_weight).add_(dy)
        return dx, None, *qkv_gradients, *output_gradients


@dataclass(frozen=True, eq=False)
class _FeedForward:
    block: FeedForward
    kept: Kept
    compute: str

    def gate_up(self, x_TD: torch.Tensor, linears: _Linears) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up beside each other, [T, 2 F]; the low-rank products."""
        y_TD, _ = cpu_rms_norm(x_TD, self.block.norm_weight, self.block.eps)
        return linears.forward(y_TD)


class _FeedForwardFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _FeedForward, *lora: torch.Tensor | None) -> torch.Tensor:
        pairs = pairs_of(lora)
        gate_up, h_in = run.gate_up(x, _Linears(run.block.gate_up, run.compute, pairs[:-1]))
        a = cpu_swiglu(*gate_up.chunk(2, dim=1))
        z, h_down = _Linears(run.block.down, run.compute, pairs[-1:]).forward(a, residual_TN=x)
        ctx.run = run
        ctx.save_for_backward(x, h_in, h_down, gate_up if run.kept.gate_up else None, *lora)
        return z

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> Any:
        run: _FeedForward = ctx.run
        x, h_in, h_down, gate_up, *lora = ctx.saved_tensors
        pairs = pairs_of(lora)
        gate_up_linears = _Linears(run.block.gate_up, run.compute, pairs[:-1])
        if gate_up is None:
            gate_up, _ = run.gate_up(x, gate_up_linears)
        gate, up = gate_up.chunk(2, dim=1)
        down = _Linears(run.block.down, run.compute, pairs[-1:])
        d_a, down_gradients = down.backward(dz, cpu_swiglu(gate, up), h_down, needs_dx=True)
        assert d_a is not None
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=1)
        cpu_swiglu_backward(d_a, gate, up, d_gate=d_gate, d_up=d_up)
        del d_a, gate, up, gate_up
        y, r = cpu_rms_norm(x, run.block.norm_weight, run.block.eps)
        d_normed, in_gradients = gate_up_linears.backward(d_gate_up, y, h_in, needs_dx=ctx.needs_input_grad[0])
        dx = None if d_normed is None else cpu_rms_norm_backward(d_normed, x, r, run.block.norm_weight).add_(dz)
        return dx, None, *in_gradients, *down_gradients


def cpu_attention_block(
    x_TD: torch.Tensor,
    block: AttentionBlock,
    tables: RopeTables | None,
    documents: Documents,
    pairs: Sequence[Pair],
    *,
    kept: Kept,
    compute: str,
) -> torch.Tensor:
    """`attention_block` for float32 on a CPU; attention has to be plain.

    Args:
        kept: `weights` and `on_host` mean nothing here.
        compute: of the products with frozen weights, see `ops.quant_linear`.
    """
    lora = [item for pair in pairs for item in (pair or (None, None))]
    run = _Attention(block, tables, documents, kept, compute)
    y_TD: torch.Tensor = _AttentionFunction.apply(x_TD, run, *lora)  # type: ignore[no-untyped-call]
    return y_TD


def cpu_feed_forward(
    x_TD: torch.Tensor, block: FeedForward, pairs: Sequence[Pair], *, kept: Kept, compute: str
) -> torch.Tensor:
    """`feed_forward` for float32 on a CPU; arguments as in `cpu_attention_block`."""
    lora = [item for pair in pairs for item in (pair or (None, None))]
    run = _FeedForward(block, kept, compute)
    z_TD: torch.Tensor = _FeedForwardFunction.apply(x_TD, run, *lora)  # type: ignore[no-untyped-call]
    return z_TD
