"""Root-mean-square norm with the file's weight."""

import torch
from torch import nn

from pyggtrain import ops
from pyggtrain.gguf.quant_tensor import QuantTensor


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension. Frozen: an adapter cannot carry a norm's change.

    Args:
        weight: [D], any type; held as float32.
        eps: the value of `attention.layer_norm_rms_epsilon`.
    """

    weight: torch.Tensor

    def __init__(self, weight: QuantTensor, *, eps: float) -> None:
        super().__init__()
        self.gguf_name = weight.name
        self.eps = eps
        self.register_buffer("weight", ops.dequantize(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., D] -> [..., D]."""
        return ops.rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.gguf_name}, eps={self.eps}"
