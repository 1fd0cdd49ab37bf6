"""Rotary position embedding in float64. Same names, arguments and results as `pyggtrain.kernels.rope`."""

import torch


def rope_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_neox: bool) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos) on the first elements of every head."""
    half = cos.shape[1]
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned, passed = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    if is_neox:
        a, b = turned[..., :half], turned[..., half:]
        return torch.cat((a * c - b * s, a * s + b * c, passed), -1)
    a, b = turned[..., 0::2], turned[..., 1::2]
    return torch.cat((torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2), passed), -1)


def rope_backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_neox: bool) -> torch.Tensor:
    """The inverse turn."""
    return rope_forward(dy, cos, -sin, is_neox=is_neox)
