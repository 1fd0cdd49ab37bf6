"""Low-rank adapters in float64. Same names and results as `pyggtrain.kernels.lora`."""

from collections.abc import Sequence

import torch


def lora_extend_(
    extended: torch.Tensor,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None],
    *,
    row_counts: Sequence[int],
) -> None:
    """s A below and B* to the right of the weights."""
    num_rows = sum(row_counts)
    width = extended.shape[1] - (extended.shape[0] - num_rows)
    extended[:num_rows, width:] = 0
    extended[num_rows:, :width] = 0
    row = column = 0
    for pair, count in zip(pairs, row_counts, strict=True):
        if pair is not None:
            lora_a, lora_b, scale = pair
            rank = lora_a.shape[0]
            extended[num_rows + column : num_rows + column + rank, :width] = lora_a * scale
            extended[row : row + count, width + column : width + column + rank] = lora_b
            column += rank
        row += count


def lora_backward(
    dy: torch.Tensor, x: torch.Tensor, xa: torch.Tensor, lora_b: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dyb = s dy B, dA = dybᵀ x, dB = s dyᵀ xa."""
    dyb = scale * dy.double() @ lora_b.double()
    return dyb, dyb.t() @ x.double(), scale * dy.double().t() @ xa.double()
