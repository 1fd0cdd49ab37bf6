"""Gated RMSNorm in float64. Same names and arguments as `pyggtrain.kernels.gated_rms_norm`."""

import torch


def gated_rms_norm_forward(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """y [T, G, V]."""
    o, z = o.double(), z.double()
    return o * (o.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double() * (z * torch.sigmoid(z))
