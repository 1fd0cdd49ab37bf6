"""8-bit floats in float64. Same names and results as `pyggtrain.kernels.fp8`, values unrounded: what q stands for must
lie within half a step of them.
"""

import torch

LARGEST = 448.0


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / s before it is rounded, and s [T, 1]."""
    scale = x.double().abs().amax(1, keepdim=True) / LARGEST
    return x.double() / scale.where(scale > 0, 1.0), scale


def quantize_columns(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of wᵀ."""
    return quantize_rows(w.t())
