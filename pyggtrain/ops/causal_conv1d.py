"""Depthwise causal convolution over time, inside documents that lie one after another.

    y_t = Σ_d w_(W-1-d) x_(t-d) over d < W with t - d in t's document

The last tap meets the token itself; the history of a document is empty. The weight is frozen, as llama.cpp drops it
from an adapter. Gradient: dx_t = Σ_d w_(W-1-d) dy_(t+d) over t + d in t's document. Saved: nothing but the weight.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from pyggtrain.ops.attention import Documents
from pyggtrain.ops.operation import operation


@operation("causal_conv1d")
def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bounds: Sequence[int], first_token: torch.Tensor
) -> torch.Tensor:
    if x.is_cuda:
        from pyggtrain.kernels.causal_conv1d import causal_conv1d_forward

        return causal_conv1d_forward(x.contiguous(), weight, first_token, has_silu=False)
    y = x * weight[:, -1]
    for distance, start, end in _overlaps(weight, bounds):
        y[start + distance : end].addcmul_(x[start : end - distance], weight[:, -1 - distance])
    return y


@_causal_conv1d.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bounds: Sequence[int], first_token: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@operation("causal_conv1d_backward")
def _causal_conv1d_backward(
    dy: torch.Tensor, weight: torch.Tensor, bounds: Sequence[int], first_token: torch.Tensor
) -> torch.Tensor:
    if dy.is_cuda:
        from pyggtrain.kernels.causal_conv1d import causal_conv1d_backward

        dy = dy.contiguous()
        return causal_conv1d_backward(dy, dy, weight, first_token, has_silu=False)
    dx = dy * weight[:, -1]
    for distance, start, end in _overlaps(weight, bounds):
        dx[start : end - distance].addcmul_(dy[start + distance : end], weight[:, -1 - distance])
    return dx


@_causal_conv1d_backward.register_fake
def _(dy: torch.Tensor, weight: torch.Tensor, bounds: Sequence[int], first_token: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(dy)


def _overlaps(weight: torch.Tensor, bounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """(distance, start, end) of each tap but the last in each document that is long enough for it."""
    return [
        (distance, start, end)
        for distance in range(1, weight.shape[1])
        for start, end in pairwise(bounds)
        if start + distance < end
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, weight, bounds, first_token = inputs
    ctx.bounds = bounds
    ctx.save_for_backward(weight, first_token)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight, first_token = ctx.saved_tensors
    return _causal_conv1d_backward(dy, weight, ctx.bounds, first_token), None, None, None


_causal_conv1d.register_autograd(_backward, setup_context=_save)


def causal_conv1d(x_TC: torch.Tensor, weight_CW: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Each channel convolved with its own W taps, inside documents.

    Args:
        x_TC: [T, C], float32; on a GPU also bfloat16 or float16.
        weight_CW: float32 [C, W], frozen.
        documents: their bounds.

    Returns:
        [T, C].

    Raises:
        ValueError: the documents do not cover the tokens.
    """
    bounds = documents.bounds
    if bounds[0] != 0 or bounds[-1] != x_TC.shape[0]:
        raise ValueError(f"documents cover tokens {bounds[0]} to {bounds[-1]}: needed 0 to {x_TC.shape[0]}")
    # Kernels find a token's document in a table, torch by its bounds.
    first_token = documents.mask(x_TC.device).first_key if x_TC.is_cuda else documents.cu_seqlens
    y_TC: torch.Tensor = _causal_conv1d(x_TC, weight_CW, bounds, first_token)
    return y_TC
