"""Cross-entropy in float64. Names and results of `pyggtrain.kernels.cross_entropy`, without its scratch arguments."""

import torch
from pyggtrain.kernels.reference.dequant import dequantize


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, *, gradient_scale: float = 1.0) -> torch.Tensor:
    """Losses, float64 [C]; `logits` (float64) become the gradient."""
    learnt = targets >= 0
    columns = targets.clamp(min=0)[:, None]
    log_probabilities = logits.log_softmax(1)
    losses = torch.where(learnt, -log_probabilities.gather(1, columns)[:, 0], 0.0)
    gradient = log_probabilities.exp().scatter_add(1, columns, -torch.ones_like(columns, dtype=torch.float64))
    logits.copy_(torch.where(learnt[:, None], gradient * gradient_scale, 0.0))
    return losses


def linear_cross_entropy(
    x: torch.Tensor, blocks: torch.Tensor, type: str, targets: torch.Tensor, *, gradient_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [T] and dx [T, D] from all logits at once."""
    weight = dequantize(blocks, type, dtype=x.dtype).double()
    logits = x.double() @ weight.t()
    losses = cross_entropy_(logits, targets, gradient_scale=gradient_scale)
    return losses, logits @ weight
