"""y[t, j] = c[e] x[t, j] W[e]ᵀ + s (x[t, j] A[e]ᵀ) B[e]ᵀ with e = ids[t, j]: products with the experts of a router.

x [T, J or 1, K], W [E, N, K] in blocks, A = lora_a [E, R, K], B = lora_b [E, N, R], ids [T, J] -> y [T, J, N]; c [E] is
a file's own factor of each expert, usually absent. The pair is optional.

J experts read each token; with x [T, 1, K] all of them read the same row. A slot is one pair (t, j), S = T J of them.
Slots are sorted by expert, and each expert's slots are one product with its own slice of the stack, so nothing larger
than a chunk of one expert is ever dequantised (`quant_matmul`), and experts that nobody chose are not touched. That is
a CPU's way; a GPU takes all experts at once (`expert_linear_gpu`).

    dx_n = c dy W + m ∘ (dh A), added up over the slots that read one row
    dA   = dhᵀ (m ∘ x_n)
    dB   = s dyᵀ h

Experts without a slot have zero gradient. Nothing is differentiated by ids: a choice has no slope. Saved: x as it was
given (gate and up share it, and no row is stored J times), h [S, R] and the order.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.ops import expert_linear_gpu, quant_matmul
from pyggtrain.ops.expert_product import ExpertStack
from pyggtrain.ops.lora_linear import product_of_gradient
from pyggtrain.ops.operation import operation


def _runs_at_once(x: torch.Tensor) -> bool:
    """Whether kernels take all experts at once: in any dtype that they have."""
    return x.is_cuda and x.dtype != torch.float64


def _groups(order_S: torch.Tensor, bounds_E: torch.Tensor) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """(expert, its places in the order, its slots) of each expert that was chosen."""
    bounds = bounds_E.tolist()
    if bounds[0] != 0 or bounds[-1] != order_S.shape[0]:
        raise IndexError(f"ids name experts outside of 0 to {len(bounds) - 2}")
    for expert, (first, end) in enumerate(pairwise(bounds)):
        if first < end:
            yield expert, slice(first, end), order_S[first:end]


def _order(ids_TJ: torch.Tensor, num_experts: int, *, at_once: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots sorted by expert [S], and where each expert's begin [E + 1]."""
    if at_once:
        from pyggtrain.kernels.moe_routing import sort_by_expert

        # Looked at by the GPU when it comes to it: asking here would make the host wait.
        torch._assert_async(((ids_TJ >= 0) & (ids_TJ < num_experts)).all(), "ids name experts that there are not")
        routing = sort_by_expert(ids_TJ.contiguous(), num_experts)
        return routing.slot, routing.bounds
    sorted_ids_S, order_S = torch.sort(ids_TJ.reshape(-1), stable=True)
    experts = torch.arange(num_experts + 1, device=ids_TJ.device, dtype=sorted_ids_S.dtype)
    return order_S, torch.searchsorted(sorted_ids_S, experts)


@operation("expert_linear", dispatch_keys=("CompositeExplicitAutograd",))
def _expert_linear(
    x_XK: torch.Tensor,
    order_S: torch.Tensor,
    bounds_E: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_ERK: torch.Tensor | None,
    lora_b_ENR: torch.Tensor | None,
    base_scale_E: torch.Tensor | None,
    scale: float,
    compute: str,
    dropout_mask_XK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _runs_at_once(x_XK):
        stack = ExpertStack(blocks, type, base_scale_E)
        pair = None if lora_a_ERK is None or lora_b_ENR is None else (lora_a_ERK, lora_b_ENR)
        return expert_linear_gpu.forward(x_XK, order_S, bounds_E, stack, pair, scale, compute, dropout_mask_XK)
    num_slots = order_S.shape[0]
    slots_per_row = num_slots // max(1, x_XK.shape[0])
    y_SN = x_XK.new_empty(num_slots, blocks.shape[1])
    h_SR = x_XK.new_empty(num_slots, 0 if lora_a_ERK is None else lora_a_ERK.shape[1])
    for expert, places, slots in _groups(order_S, bounds_E):
        rows = slots // slots_per_row
        x_nK = x_XK[rows]
        delta_nN = None
        if lora_a_ERK is not None and lora_b_ENR is not None:
            seen_nK = x_nK if dropout_mask_XK is None else x_nK * dropout_mask_XK[rows]
            h_Rn = lora_a_ERK[expert].to(x_nK.dtype) @ seen_nK.t()
            h_SR[places] = h_Rn.t()
            delta_nN = h_Rn.t() @ (lora_b_ENR[expert].t() * scale).to(x_nK.dtype)
        if base_scale_E is not None:
            x_nK = x_nK * base_scale_E[expert]
        y_SN[slots] = quant_matmul.forward(
            x_nK, blocks[expert], type, compute=compute, out=delta_nN, accumulate=delta_nN is not None
        )
    return y_SN, h_SR


@_expert_linear.register_fake
def _(
    x_XK: torch.Tensor,
    order_S: torch.Tensor,
    bounds_E: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_ERK: torch.Tensor | None,
    lora_b_ENR: torch.Tensor | None,
    base_scale_E: torch.Tensor | None,
    scale: float,
    compute: str,
    dropout_mask_XK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_slots = order_S.shape[0]
    rank = 0 if lora_a_ERK is None else lora_a_ERK.shape[1]
    if _runs_at_once(x_XK):
        from pyggtrain.kernels.grouped_matmul import padded_rank

        h = x_XK.new_empty(num_slots, padded_rank(rank), dtype=quant_matmul.product_dtype(x_XK, compute))
        return x_XK.new_empty(num_slots, blocks.shape[1]), h
    return x_XK.new_empty(num_slots, blocks.shape[1]), x_XK.new_empty(num_slots, rank)


@operation("expert_linear_backward", dispatch_keys=("CompositeExplicitAutograd",))
def _expert_linear_backward(
    dy_SN: torch.Tensor,
    x_XK: torch.Tensor,
    h_SR: torch.Tensor,
    order_S: torch.Tensor,
    bounds_E: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_ERK: torch.Tensor | None,
    lora_b_ENR: torch.Tensor | None,
    base_scale_E: torch.Tensor | None,
    scale: float,
    compute: str,
    dropout_mask_XK: torch.Tensor | None,
    needs_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if _runs_at_once(x_XK):
        stack = ExpertStack(blocks, type, base_scale_E)
        pair = None if lora_a_ERK is None or lora_b_ENR is None else (lora_a_ERK, lora_b_ENR)
        return expert_linear_gpu.backward(
            dy_SN, x_XK, h_SR, order_S, bounds_E, stack, pair, scale, compute, dropout_mask_XK, needs_dx
        )
    slots_per_row = order_S.shape[0] // max(1, x_XK.shape[0])
    dx_XK = x_XK.new_zeros(x_XK.shape if needs_dx else 0)
    d_lora_a_ERK = dy_SN.new_zeros(0) if lora_a_ERK is None else torch.zeros_like(lora_a_ERK)
    d_lora_b_ENR = dy_SN.new_zeros(0) if lora_b_ENR is None else torch.zeros_like(lora_b_ENR)
    for expert, places, slots in _groups(order_S, bounds_E):
        rows = slots // slots_per_row
        dy_nN = dy_SN[slots]
        dx_nK = None
        if lora_a_ERK is not None and lora_b_ENR is not None:
            mask_nK = None if dropout_mask_XK is None else dropout_mask_XK[rows]
            seen_nK = x_XK[rows] if mask_nK is None else x_XK[rows] * mask_nK
            dh_Rn = (lora_b_ENR[expert].t() * scale).to(dy_nN.dtype) @ dy_nN.t()
            d_lora_a_ERK[expert] = product_of_gradient(dh_Rn, seen_nK)
            d_lora_b_ENR[expert] = product_of_gradient(h_SR[places].t(), dy_nN).t() * scale
            if needs_dx:
                dx_nK = dh_Rn.t() @ lora_a_ERK[expert].to(dy_nN.dtype)
                if mask_nK is not None:
                    dx_nK.mul_(mask_nK)
        if needs_dx:
            if base_scale_E is not None:
                dy_nN = dy_nN * base_scale_E[expert]
            out_nK = x_XK.new_empty(dy_nN.shape[0], x_XK.shape[1]) if dx_nK is None else dx_nK
            has_start = dx_nK is not None
            quant_matmul.backward(dy_nN, blocks[expert], type, compute=compute, out=out_nK, accumulate=has_start)
            dx_XK.index_add_(0, rows, out_nK)
    return dx_XK, d_lora_a_ERK, d_lora_b_ENR


@_expert_linear_backward.register_fake
def _(
    dy_SN: torch.Tensor,
    x_XK: torch.Tensor,
    h_SR: torch.Tensor,
    order_S: torch.Tensor,
    bounds_E: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_ERK: torch.Tensor | None,
    lora_b_ENR: torch.Tensor | None,
    base_scale_E: torch.Tensor | None,
    scale: float,
    compute: str,
    dropout_mask_XK: torch.Tensor | None,
    needs_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x_XK.new_empty(x_XK.shape if needs_dx else 0),
        dy_SN.new_empty(0) if lora_a_ERK is None else torch.empty_like(lora_a_ERK),
        dy_SN.new_empty(0) if lora_b_ENR is None else torch.empty_like(lora_b_ENR),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_XK, order_S, bounds_E, blocks, ctx.type, lora_a_ERK, lora_b_ENR, base_scale_E, ctx.scale, ctx.compute, mask_XK = (
        inputs
    )
    h_SR = output[1]
    ctx.mark_non_differentiable(h_SR)
    ctx.set_materialize_grads(False)
    # Without a pair dx needs no x.
    kept_XK = x_XK if lora_a_ERK is not None else x_XK.new_empty(1).expand(x_XK.shape)
    ctx.save_for_backward(kept_XK, h_SR, order_S, bounds_E, blocks, lora_a_ERK, lora_b_ENR, base_scale_E, mask_XK)


def _backward(ctx: Any, dy_SN: torch.Tensor | None, dh_unused: None) -> tuple[torch.Tensor | None, ...]:
    if dy_SN is None:
        return (None,) * 11
    x_XK, h_SR, order_S, bounds_E, blocks, lora_a_ERK, lora_b_ENR, base_scale_E, mask_XK = ctx.saved_tensors
    needs_dx = ctx.needs_input_grad[0]
    dx_XK, d_lora_a_ERK, d_lora_b_ENR = _expert_linear_backward(
        dy_SN,
        x_XK,
        h_SR,
        order_S,
        bounds_E,
        blocks,
        ctx.type,
        lora_a_ERK,
        lora_b_ENR,
        base_scale_E,
        ctx.scale,
        ctx.compute,
        mask_XK,
        needs_dx,
    )
    has_pair = lora_a_ERK is not None
    return (
        dx_XK if needs_dx else None,
        *(None,) * 4,
        d_lora_a_ERK if has_pair else None,
        d_lora_b_ENR if has_pair else None,
        *(None,) * 4,
    )


_expert_linear.register_autograd(_backward, setup_context=_save)


def expert_linear(
    x_TJK: torch.Tensor,
    ids_TJ: torch.Tensor,
    weight: QuantTensor,
    *,
    lora_a_ERK: torch.Tensor | None = None,
    lora_b_ENR: torch.Tensor | None = None,
    base_scale_E: torch.Tensor | None = None,
    scale: float = 1.0,
    dropout_mask_TJK: torch.Tensor | None = None,
    compute: str = "auto",
) -> torch.Tensor:
    """y[t, j] = c x[t, j] Wᵀ + s (x[t, j] Aᵀ) Bᵀ with the c, W, A and B of expert ids[t, j].

    Args:
        x_TJK: float32 [T, J, K], or [T, 1, K] if all chosen experts read the same row; half precision on a GPU.
        ids_TJ: integers [T, J], each in [0, E).
        weight: [E, N, K].
        lora_a_ERK, lora_b_ENR: [E, R, K] and [E, N, R] float32 (float64 with such an x); both or none.
        base_scale_E: c, frozen, [E] in x's dtype; None: 1.
        scale: s = alpha / r; with dropout, divided by (1 - p) already.
        dropout_mask_TJK: bool in x's shape, True keeps. Acts on the low-rank path only.
        compute: see `quant_linear`.

    Returns:
        [T, J, N] in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: an id is no expert. On a GPU that ends the process's use of it, as torch's own checks of indices do.
    """
    num_experts, num_out, num_in = weight.shape
    num_tokens, num_chosen = ids_TJ.shape
    if x_TJK.dim() != 3 or x_TJK.shape[0] != num_tokens or x_TJK.shape[1] not in (1, num_chosen):
        raise ValueError(
            f"{weight.name}: x has shape {tuple(x_TJK.shape)} and ids {tuple(ids_TJ.shape)}: "
            f"needed [{num_tokens}, {num_chosen} or 1, {num_in}]"
        )
    x_XK = x_TJK.reshape(-1, x_TJK.shape[2])
    quant_matmul.check(x_XK, num_in, compute)
    if (lora_a_ERK is None) != (lora_b_ENR is None):
        raise ValueError(f"{weight.name}: one half of a pair without the other")
    if lora_a_ERK is not None and lora_b_ENR is not None:
        rank = lora_a_ERK.shape[1]
        if lora_a_ERK.shape != (num_experts, rank, num_in) or lora_b_ENR.shape != (num_experts, num_out, rank):
            raise ValueError(
                f"{weight.name}: lora_a is {tuple(lora_a_ERK.shape)} and lora_b {tuple(lora_b_ENR.shape)}: "
                f"needed [{num_experts}, r, {num_in}] and [{num_experts}, {num_out}, r]"
            )
    order_S, bounds_E = _order(ids_TJ, num_experts, at_once=_runs_at_once(x_XK))
    mask_XK = None if dropout_mask_TJK is None else dropout_mask_TJK.reshape(x_XK.shape)
    y_SN: torch.Tensor
    y_SN, _ = _expert_linear(
        x_XK,
        order_S,
        bounds_E,
        weight.blocks,
        weight.type,
        lora_a_ERK,
        lora_b_ENR,
        base_scale_E,
        scale,
        compute,
        mask_XK,
    )
    return y_SN.reshape(num_tokens, num_chosen, num_out)
