"""Causal convolution in float64. Same names as in `pyggtrain.kernels.causal_conv1d`."""

from collections.abc import Sequence
from itertools import pairwise

import torch


def causal_conv1d_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bounds: Sequence[int],
    *,
    has_silu: bool,
    num_normed: int = 0,
    head_size: int = 128,
    eps: float = 0.0,
) -> torch.Tensor:
    """y [T, C]. `bounds`: where documents begin, and T at the end."""
    x, weight = x.double(), weight.double()
    num_taps = weight.shape[1]
    rows = []
    for start, end in pairwise(bounds):
        padded = torch.cat([x.new_zeros(num_taps - 1, x.shape[1]), x[start:end]])
        rows += [(padded[t : t + num_taps] * weight.t()).sum(0) for t in range(end - start)]
    y = torch.stack(rows)
    if has_silu:
        y = y * torch.sigmoid(y)
    if num_normed:
        heads = y[:, : num_normed * head_size].unflatten(1, (num_normed, head_size))
        heads = heads * (heads.square().sum(-1, keepdim=True) + eps).rsqrt()
        y = torch.cat([heads.flatten(1), y[:, num_normed * head_size :]], 1)
    return y
