"""The gates of a gated delta net in float64. Same names and arguments as `pyggtrain.kernels.delta_gates`."""

import torch


def delta_gates_forward(
    alpha: torch.Tensor, b: torch.Tensor, a: torch.Tensor, dt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta [T, G]."""
    softplus = torch.nn.functional.softplus(alpha.double() + dt.double(), threshold=20)
    return a.double() * softplus, torch.sigmoid(b.double())
