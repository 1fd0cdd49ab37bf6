"""Products with experts in float64, one slot after the other. Same names and results as `pyggtrain.kernels`'
`grouped_matmul`, `grouped_dequant_matmul` (with decoded weights), `grouped_lora` and `expert_swiglu`; rows of inputs
and results lie in the order of the places.
"""

from collections.abc import Sequence

import torch


def experts_of(bounds: torch.Tensor) -> torch.Tensor:
    """The expert of each place."""
    return torch.repeat_interleave(torch.arange(len(bounds) - 1, device=bounds.device), bounds.diff().long())


def grouped_matmul_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bounds: torch.Tensor,
    *,
    h: torch.Tensor,
    lora_b: torch.Tensor,
    expert_scale: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """c W[e] x + b[e] + B[e] h; h [S, R]."""
    e = experts_of(bounds)
    base = torch.einsum("snk,sk->sn", weight.double()[e], x.double()) * expert_scale.double()[e][:, None]
    return base + bias.double()[e] + torch.einsum("snr,sr->sn", lora_b.double()[e], h.double())


def grouped_matmul_backward(
    dy: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bounds: torch.Tensor,
    *,
    dh: Sequence[torch.Tensor],
    lora_a: Sequence[torch.Tensor],
    expert_scale: torch.Tensor,
) -> torch.Tensor:
    """c Σ_p W_p[e]ᵀ dy_p + Σ_p A_p[e]ᵀ dh_p."""
    e = experts_of(bounds)
    scale = expert_scale.double()[e][:, None]
    total = dy[0].new_zeros((), dtype=torch.float64)
    for dy_p, weight, dh_p, a in zip(dy, weights, dh, lora_a, strict=True):
        total = total + scale * torch.einsum("snk,sn->sk", weight.double()[e], dy_p.double())
        total = total + torch.einsum("srk,sr->sk", a.double()[e], dh_p.double())
    return total


def project(x: torch.Tensor, lora_a: torch.Tensor, bounds: torch.Tensor, *, scale: float) -> torch.Tensor:
    """s A[e] x, [S, R]."""
    return scale * torch.einsum("srk,sk->sr", lora_a.double()[experts_of(bounds)], x.double())


def outer(h: torch.Tensor, x: torch.Tensor, bounds: torch.Tensor, *, scale: float) -> torch.Tensor:
    """s Σ over an expert's rows of h xᵀ, [E, R, K]."""
    products = scale * h.double()[:, :, None] * x.double()[:, None, :]
    sums = products.new_zeros(len(bounds) - 1, h.shape[1], x.shape[1])
    return sums.index_add_(0, experts_of(bounds), products)


def expert_swiglu_forward(
    gate: torch.Tensor, up: torch.Tensor, *, alpha: float, offset: float, limit: float | None
) -> torch.Tensor:
    """x p (y + offset), p = sigmoid(alpha x)."""
    x, y = gate.double(), up.double()
    if limit is not None:
        x, y = x.clamp(max=limit), y.clamp(-limit, limit)
    return x * (alpha * x).sigmoid() * (y + offset)


def expert_swiglu_backward(
    da: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    *,
    alpha: float,
    offset: float,
    limit: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """d_gate, d_up, w a, dw; w and dw [S] in the order of the places."""
    da, gate, up, weight = (tensor.double() for tensor in (da, gate, up, weight))
    bound = torch.inf if limit is None else limit
    x, y = gate.clamp(max=bound), up.clamp(-bound, bound) + offset
    p = (alpha * x).sigmoid()
    a = x * p * y
    d = da * weight[:, None]
    d_gate = d * y * p * (1 + alpha * x * (1 - p)) * (gate <= bound)
    d_up = d * x * p * (up.abs() <= bound)
    return d_gate, d_up, a * weight[:, None], (a * da).sum(1)
