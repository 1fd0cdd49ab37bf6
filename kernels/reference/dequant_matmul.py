"""Products with a quantised weight in float64. Same names and results as `pyggtrain.kernels.dequant_matmul`."""

import torch
from pyggtrain.kernels.reference.dequant import dequantize


def dequant_matmul_forward(x: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """y = x Wᵀ."""
    return x.double() @ dequantize(blocks, type, dtype=torch.float64).t()


def dequant_matmul_backward(dy: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """dx = dy W."""
    return dy.double() @ dequantize(blocks, type, dtype=torch.float64)
