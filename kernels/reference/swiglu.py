"""SwiGLU in float64. Same names, arguments and results as `pyggtrain.kernels.swiglu`."""

import torch


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return gate.double() * gate.double().sigmoid() * up.double()


def swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d_gate, d_up, y."""
    g, p = gate.double(), gate.double().sigmoid()
    return dy.double() * up.double() * p * (1 + g * (1 - p)), dy.double() * g * p, g * p * up.double()
