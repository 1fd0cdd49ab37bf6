"""residual + Σ_j w[t, j] W_down a,  a = silu(W_gate y[t]) ∘ W_up y[t],  with the matrices of expert ids[t, j].

Each product may have a bias, and the gated unit may be another one of `kernels/expert_swiglu.py`.

The router's choice and weights come from outside, so any router can stand before it; the gradient of w goes back to it.
Slots are sorted by expert once (`kernels/moe_routing.py`), and every product is one launch over all experts.

Kept by forward: y, ids and w, the low-rank numbers of gate and up, and if so told gate and up. Backward, with dout the
gradient of the result, s a slot and e its expert:

    da    = W_downᵀ dout[t]                   without w: then dw[s] = a · da, and W_down a is never made again
    w a, d_gate, d_up                         from gate, up and da, in place of gate, up and da
    dy[t] = Σ_j W_gateᵀ d_gate + W_upᵀ d_up   gate and up in one float32 sum
    down's pair from dout and w a, gate's and up's from d_gate, d_up and y

Long rows are taken in parts of tokens, so that no buffer of S rows grows with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyggtrain.ops import expert_product
from pyggtrain.ops.expert_product import Decoded, ExpertStack
from pyggtrain.ops.fused.kept import Kept
from pyggtrain.ops.fused.linear_group import Pair, pairs_of

# Slots in a part.
MAX_SLOTS = 2**17


@dataclass(frozen=True, eq=False)
class ExpertFeedForward:
    """Frozen part.

    Attributes:
        gate, up: W [E, F, D], without factors of experts. down: W [E, D, F].
        scales: alpha / r of the pairs of gate, up and down; any number where there is none.
        alpha, offset, limit: of the gated unit, see `kernels.expert_swiglu.Glu`.
    """

    gate: ExpertStack
    up: ExpertStack
    down: ExpertStack
    scales: tuple[float, float, float]
    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None

    @property
    def width(self) -> int:
        """F."""
        return self.gate.num_rows

    @property
    def num_experts(self) -> int:
        return self.gate.num_experts


@dataclass(eq=False)
class _Run:
    """Constants of one call, and what is kept outside autograd's saved tensors."""

    block: ExpertFeedForward
    kept: Kept
    gate_up: torch.Tensor | None = None

    def gate_and_up(
        self, y: torch.Tensor, routing: Any, pairs: Sequence[Pair], low_rank: torch.Tensor, decoded: Decoded | None
    ) -> torch.Tensor:
        """[S, 2 F] in the order of the places."""
        block = self.block
        return expert_product.forward(
            y,
            [block.gate, block.up],
            routing,
            out=y.new_empty(routing.num_slots, 2 * block.width),
            slots_per_row=routing.num_chosen,
            low_rank=_low_rank(low_rank, pairs[:2], is_backward=False),
            decoded=decoded,
        )


def _low_rank(h: torch.Tensor | None, pairs: Sequence[Pair], *, is_backward: bool) -> Any:
    """The low-rank term of a product: h [S, P BR] with the factors of P pairs; None without pairs."""
    from pyggtrain.kernels.grouped_matmul import LowRank

    if pairs[0] is None or h is None:
        return None
    return LowRank(h, tuple(pair[0 if is_backward else 1] for pair in pairs if pair is not None))


class _ExpertFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        residual: torch.Tensor | None,
        run: _Run,
        *lora: torch.Tensor | None,
    ) -> torch.Tensor:
        from pyggtrain.kernels import moe_routing
        from pyggtrain.kernels.expert_swiglu import Glu, expert_swiglu_forward
        from pyggtrain.kernels.grouped_lora import project

        block, pairs = run.block, pairs_of(lora)
        routing = moe_routing.sort_by_expert(ids, block.num_experts)
        low_rank = _projected(y, pairs[:2], block.scales, routing)
        gate_up = run.gate_and_up(y, routing, pairs, low_rank, _decoded_together(block, routing, y.dtype))
        a = y.new_empty(routing.num_slots, block.width)
        glu = Glu(block.alpha, block.offset, block.limit)
        expert_swiglu_forward(gate_up[:, : block.width], gate_up[:, block.width :], glu=glu, out=a)
        if run.kept.gate_up and any(ctx.needs_input_grad):
            run.gate_up = gate_up
        del gate_up
        h = None if pairs[2] is None else project(a, [pairs[2][0]], routing, scales=block.scales[2:])
        z = y.new_empty(routing.num_slots, y.shape[1])
        expert_product.forward(
            a,
            [block.down],
            routing,
            out=z,
            to_slots=True,
            low_rank=_low_rank(h, pairs[2:], is_backward=False),
        )
        out = moe_routing.combine(z, routing.num_chosen, probs=probs, residual=residual)
        ctx.run, ctx.lora, ctx.num_chosen, ctx.has_residual = run, lora, routing.num_chosen, residual is not None
        ctx.save_for_backward(y, routing.slot, routing.bounds, ids, probs, low_rank)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        from pyggtrain.kernels import moe_routing
        from pyggtrain.kernels.expert_swiglu import Glu, expert_swiglu_backward
        from pyggtrain.kernels.grouped_lora import outer, project, turned

        run: _Run = ctx.run
        block, pairs = run.block, pairs_of(ctx.lora)
        y, slot, bounds, ids, probs, low_rank = ctx.saved_tensors
        routing = moe_routing.Routing(slot, bounds, ctx.num_chosen)
        num_chosen, width = routing.num_chosen, block.width
        dout = dout.contiguous()
        decoded = _decoded_together(block, routing, y.dtype)
        is_sliced = decoded is not None and not decoded.is_whole
        gate_up = None
        if run.kept.gate_up:
            if run.gate_up is None:
                raise RuntimeError("experts that keep gate and up overwrite them: backward runs once")
            gate_up, run.gate_up = run.gate_up, None
        elif not is_sliced:
            gate_up = run.gate_and_up(y, routing, pairs, low_rank, decoded)

        da = y.new_empty(routing.num_slots, width)
        dh = None
        if pairs[2] is not None:
            lora_b = turned(pairs[2][1], y.dtype)
            dh = project(dout, [lora_b], routing, scales=block.scales[2:], slots_per_row=num_chosen)
        expert_product.backward(
            dout,
            [block.down],
            routing,
            out=da,
            slots_per_row=num_chosen,
            low_rank=_low_rank(dh, pairs[2:], is_backward=True),
        )
        dy_S = d_low_rank = None
        if gate_up is None:
            assert decoded is not None, "packed products are not sliced"
            gate_up, dy_S, d_low_rank, d_probs = _backward_by_slices(
                run, y, da, routing, probs, pairs, low_rank, decoded
            )
        else:
            gate, up = gate_up[:, :width], gate_up[:, width:]
            glu = Glu(block.alpha, block.offset, block.limit)
            d_probs = expert_swiglu_backward(da, gate, up, routing, probs, glu=glu, d_gate=gate, d_up=up, weighted=da)
        if block.down.bias is not None:
            d_probs += (dout.float() @ block.down.bias.float().t()).gather(1, ids.long())
        weighted = da
        gradients: list[torch.Tensor | None] = []
        if pairs[2] is not None and dh is not None:
            lora_a, _ = pairs[2]
            rank = lora_a.shape[1]
            h = project(weighted, [lora_a], routing, scales=block.scales[2:])
            gradients = [
                outer(dh, weighted, routing, rank=rank, is_lora_b=False),
                outer(h, dout, routing, rank=rank, is_lora_b=True, slots_per_row=num_chosen),
            ]
        else:
            gradients = [None, None]
        del weighted, da, dh

        in_gradients: list[torch.Tensor | None] = [None] * 4
        if pairs[0] is not None:
            if d_low_rank is None:
                d_low_rank = project(gate_up, _turned(pairs[:2], y.dtype), routing, scales=block.scales[:2])
            in_gradients = _input_gradients(y, gate_up, pairs[:2], routing, low_rank, d_low_rank)
        if dy_S is None:
            dy_S = y.new_empty(routing.num_slots, y.shape[1])
            expert_product.backward(
                gate_up,
                [block.gate, block.up],
                routing,
                out=dy_S,
                to_slots=True,
                low_rank=_low_rank(d_low_rank, pairs[:2], is_backward=True),
                decoded=decoded,
            )
        dy = moe_routing.combine(dy_S, num_chosen)
        return dy, None, d_probs.to(probs.dtype), dout if ctx.has_residual else None, None, *in_gradients, *gradients


def _projected(y: torch.Tensor, pairs: Sequence[Pair], scales: Sequence[float], routing: Any) -> torch.Tensor:
    """s A y of gate and up side by side, [S, 2 BR]; empty without pairs."""
    from pyggtrain.kernels.grouped_lora import project

    factors = [pair[0] for pair in pairs if pair is not None]
    if not factors:
        return y.new_empty(0)
    return project(y, factors, routing, scales=scales[:2], slots_per_row=routing.num_chosen)


def _backward_by_slices(
    run: _Run,
    y: torch.Tensor,
    da: torch.Tensor,
    routing: Any,
    probs: torch.Tensor,
    pairs: Sequence[Pair],
    low_rank: torch.Tensor,
    decoded: Decoded,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Backward of gate, up and their unit, a slice of experts after the other, so that what is decoded to make gate and
    up again serves for dy too.

    Args:
        da: overwritten with w a.

    Returns:
        d_gate and d_up side by side [S, 2 F], dy of each slot [S, D] in the slots' order, s Bᵀ d (None without pairs)
        and dw.
    """
    from pyggtrain.kernels.expert_swiglu import Glu, expert_swiglu_backward
    from pyggtrain.kernels.grouped_lora import project
    from pyggtrain.kernels.grouped_matmul import grouped_matmul_backward, grouped_matmul_forward

    block, width = run.block, run.block.width
    gate_up = y.new_empty(routing.num_slots, 2 * width)
    gate, up = gate_up[:, :width], gate_up[:, width:]
    dy_S = y.new_empty(routing.num_slots, y.shape[1])
    d_probs = torch.empty(probs.shape, dtype=torch.float32, device=probs.device)
    glu = Glu(block.alpha, block.offset, block.limit)
    d_low_rank = None if pairs[0] is None else torch.empty_like(low_rank)
    factors = _turned(pairs[:2], y.dtype)
    biases = expert_product.biases_of([block.gate, block.up])
    for first, values in decoded.slices():
        experts = (first, first + values.shape[1])
        grouped_matmul_forward(
            y,
            values,
            routing,
            out=gate_up,
            first_expert=first,
            slots_per_row=routing.num_chosen,
            low_rank=_low_rank(low_rank, pairs[:2], is_backward=False),
            biases=biases,
        )
        expert_swiglu_backward(
            *(da, gate, up, routing, probs),
            glu=glu,
            d_gate=gate,
            d_up=up,
            weighted=da,
            d_probs=d_probs,
            experts=experts,
        )
        term = None
        if d_low_rank is not None:
            project(gate_up, factors, routing, scales=block.scales[:2], out=d_low_rank, experts=experts)
            term = _low_rank(d_low_rank, pairs[:2], is_backward=True)
        grouped_matmul_backward(gate_up, values, routing, out=dy_S, first_expert=first, to_slots=True, low_rank=term)
    return gate_up, dy_S, d_low_rank, d_probs


def _turned(pairs: Sequence[Pair], dtype: torch.dtype) -> list[torch.Tensor]:
    """B of each pair, turned."""
    from pyggtrain.kernels.grouped_lora import turned

    return [turned(pair[1], dtype) for pair in pairs if pair is not None]


def _input_gradients(
    y: torch.Tensor,
    d_gate_up: torch.Tensor,
    pairs: Sequence[Pair],
    routing: Any,
    low_rank: torch.Tensor,
    d_low_rank: torch.Tensor,
) -> list[torch.Tensor | None]:
    """The gradients of both pairs."""
    from pyggtrain.kernels.grouped_lora import outer

    padded = low_rank.shape[1] // 2
    gradients: list[torch.Tensor | None] = []
    for index, pair in enumerate(pairs):
        assert pair is not None
        num_out, rank = pair[1].shape[1:]
        d = d_gate_up[:, index * num_out : (index + 1) * num_out]
        h, dh = (both[:, index * padded : (index + 1) * padded] for both in (low_rank, d_low_rank))
        gradients += [
            outer(dh, y, routing, rank=rank, is_lora_b=False, slots_per_row=routing.num_chosen),
            outer(h, d, routing, rank=rank, is_lora_b=True),
        ]
    return gradients


def _decoded_together(block: ExpertFeedForward, routing: Any, dtype: torch.dtype) -> Decoded | None:
    """Gate and up, both of some experts in a slice, for one launch of their products; None where they are multiplied
    packed.
    """
    stacks = [block.gate, block.up]
    if expert_product.is_packed(stacks, routing):
        return None
    return Decoded(stacks, dtype)


def expert_feed_forward(
    y_TD: torch.Tensor,
    ids_TJ: torch.Tensor,
    probs_TJ: torch.Tensor,
    block: ExpertFeedForward,
    pairs: Sequence[Pair],
    *,
    kept: Kept,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + Σ_j w[t, j] W_down (silu(W_gate y) ∘ W_up y) with the matrices of expert ids[t, j].

    Args:
        y_TD: [T, D], contiguous, on a GPU.
        ids_TJ: int32 or int64, each an expert: not checked, as the host does not know them.
        probs_TJ: w, float32 as a router makes them.
        block: the frozen part.
        pairs: of gate, up and down; those of gate and up both or neither, with one rank.
        kept: what backward need not compute again; `gate_up` is heeded.
        residual_TD: None: 0.

    Returns:
        [T, D] in y's dtype.
    """
    gate_pair, up_pair = pairs[0], pairs[1]
    if (gate_pair is None) != (up_pair is None) or (
        gate_pair is not None and up_pair is not None and gate_pair[0].shape != up_pair[0].shape
    ):
        raise ValueError("pairs of gate and up differ in rank, or one is missing; needed: both of one rank, or none.")
    lora = [item for pair in pairs for item in (pair or (None, None))]
    num_tokens, num_chosen = ids_TJ.shape
    num_parts = max(1, -(-num_tokens * num_chosen // MAX_SLOTS))
    length = max(1, -(-num_tokens // num_parts))
    rows = torch.split(y_TD, length)
    residuals = [None] * len(rows) if residual_TD is None else torch.split(residual_TD, length)
    choices = (torch.split(part.contiguous(), length) for part in (ids_TJ, probs_TJ))
    outputs: list[torch.Tensor] = [
        _ExpertFunction.apply(*part, _Run(block, kept), *lora)  # type: ignore[no-untyped-call]
        for part in zip(rows, *choices, residuals, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
