"""`ops.expert_linear` on a GPU: one launch over all experts for each product, and nothing that waits for the host.

The same equations; slots stay where they are, and only their order goes to the kernels. Products run in x's dtype, or
in bfloat16 where x is float32 and not to be exact, with sums in float32. Here h is s x Aᵀ, in the order of the places
and padded (`kernels/grouped_lora.py`).
"""

import torch

from pyggtrain.ops import expert_product
from pyggtrain.ops.expert_product import ExpertStack
from pyggtrain.ops.quant_matmul import product_dtype

Pair = tuple[torch.Tensor, torch.Tensor] | None


def forward(
    x_XK: torch.Tensor,
    order_S: torch.Tensor,
    bounds_E: torch.Tensor,
    stack: ExpertStack,
    pair: Pair,
    scale: float,
    compute: str,
    dropout_mask_XK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [S, N] in x's dtype and the order of the slots, and h."""
    from pyggtrain.kernels.grouped_lora import project
    from pyggtrain.kernels.grouped_matmul import LowRank
    from pyggtrain.kernels.moe_routing import Routing

    num_slots = order_S.shape[0]
    slots_per_row = max(1, num_slots // max(1, x_XK.shape[0]))
    routing = Routing(order_S, bounds_E, slots_per_row)
    x = x_XK.to(product_dtype(x_XK, compute))
    y = x.new_empty(num_slots, stack.num_rows)
    h = x.new_empty(num_slots, 0)
    low_rank = None
    if pair is not None:
        seen = x if dropout_mask_XK is None else x * dropout_mask_XK
        h = project(seen, [pair[0]], routing, scales=[scale], slots_per_row=slots_per_row)
        low_rank = LowRank(h, (pair[1],))
    expert_product.forward(x, [stack], routing, out=y, slots_per_row=slots_per_row, to_slots=True, low_rank=low_rank)
    return y.to(x_XK.dtype), h


def backward(
    dy_SN: torch.Tensor,
    x_XK: torch.Tensor,
    h: torch.Tensor,
    order_S: torch.Tensor,
    bounds_E: torch.Tensor,
    stack: ExpertStack,
    pair: Pair,
    scale: float,
    compute: str,
    dropout_mask_XK: torch.Tensor | None,
    needs_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx in x's dtype (empty if not needed), d_lora_a and d_lora_b in float32 (empty without a pair)."""
    from pyggtrain.kernels import moe_routing
    from pyggtrain.kernels.grouped_lora import outer, project, turned
    from pyggtrain.kernels.grouped_matmul import LowRank, grouped_matmul_backward

    num_slots = order_S.shape[0]
    slots_per_row = max(1, num_slots // max(1, x_XK.shape[0]))
    routing = moe_routing.Routing(order_S, bounds_E, slots_per_row)
    dtype = product_dtype(x_XK, compute)
    dy = dy_SN.to(dtype).contiguous()
    dh, d_lora_a, d_lora_b = None, dy_SN.new_empty(0), dy_SN.new_empty(0)
    if pair is not None:
        rank = pair[0].shape[1]
        seen = x_XK.to(dtype)
        seen = seen if dropout_mask_XK is None else seen * dropout_mask_XK
        dh = project(dy, [turned(pair[1], dtype)], routing, scales=[scale], slots_per_row=1)
        d_lora_a = outer(dh, seen, routing, rank=rank, is_lora_b=False, slots_per_row=slots_per_row)
        d_lora_b = outer(h, dy, routing, rank=rank, is_lora_b=True, slots_per_row=1)
    if not needs_dx:
        return x_XK.new_empty(0), d_lora_a, d_lora_b
    dx = dy.new_empty(num_slots, x_XK.shape[1])
    is_plain = dropout_mask_XK is None
    expert_product.backward(
        dy,
        [stack],
        routing,
        out=dx,
        slots_per_row=1,
        to_slots=True,
        low_rank=LowRank(dh, (pair[0],)) if is_plain and pair is not None and dh is not None else None,
    )
    if dropout_mask_XK is not None and pair is not None and dh is not None:
        # The mask stands between the pair and x, so the pair's share is a product of its own.
        share = grouped_matmul_backward(
            dh[:, : pair[0].shape[1]], pair[0].to(dtype)[None], routing, out=torch.empty_like(dx), to_slots=True
        )
        mask_S = dropout_mask_XK.unsqueeze(1).expand(-1, slots_per_row, -1).reshape(share.shape)
        dx += share * mask_S
    if slots_per_row > 1:
        dx = moe_routing.combine(dx, slots_per_row)
    return dx.to(x_XK.dtype), d_lora_a, d_lora_b
