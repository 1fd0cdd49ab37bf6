"""Low-rank adapters in float64. Same names and results as `pyggtrain.kernels.lora`."""

import torch


def lora_extend_(
    extended: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, *, row_counts: tuple[int, ...], scale: float
) -> None:
    """A below and s B* to the right of the weights."""
    num_rows, rank = lora_b.shape
    width = lora_a.shape[1]
    extended[:num_rows, width:] = 0
    extended[num_rows:, :width] = 0
    extended[num_rows : num_rows + lora_a.shape[0], :width] = lora_a
    first = 0
    for i, count in enumerate(row_counts):
        extended[first : first + count, width + i * rank : width + (i + 1) * rank] = (
            lora_b[first : first + count] * scale
        )
        first += count


def lora_backward(
    dy: torch.Tensor, x: torch.Tensor, xa: torch.Tensor, lora_b: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dyb = s dy B, dA = dybᵀ x, dB = s dyᵀ xa."""
    dyb = scale * dy.double() @ lora_b.double()
    return dyb, dyb.t() @ x.double(), scale * dy.double().t() @ xa.double()
