"""The gated delta rule in float64, one token at a time. Same names as in `pyggtrain.kernels.gated_delta_rule`."""

from collections.abc import Sequence
from itertools import pairwise

import torch


def gated_delta_rule_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    bounds: Sequence[int],
    *,
    scale: float,
) -> torch.Tensor:
    """o [T, G, V]. `bounds`: where documents begin, and T at the end."""
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    num_tiles = v.shape[1] // q.shape[1]
    q, k = (x.repeat(1, num_tiles, 1) for x in (q, k))
    outputs = []
    for start, end in pairwise(bounds):
        state = v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for t in range(start, end):
            state = state * log_decay[t].exp()[:, None, None]
            seen = torch.einsum("gkv,gk->gv", state, k[t])
            state = state + torch.einsum("gk,gv->gkv", k[t], beta[t][:, None] * (v[t] - seen))
            outputs.append(scale * torch.einsum("gkv,gk->gv", state, q[t]))
    return torch.stack(outputs)


def gated_delta_rule_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    bounds: Sequence[int],
    *,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, d_log_decay, d_beta: torch's own derivative of the recurrence."""
    q, k, v, log_decay, beta = (x.detach().double().requires_grad_() for x in (q, k, v, log_decay, beta))
    o = gated_delta_rule_forward(q, k, v, log_decay, beta, bounds, scale=scale)
    return torch.autograd.grad(o, (q, k, v, log_decay, beta), do.double())
