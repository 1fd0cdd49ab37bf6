"""Token embedding in the file's blocks."""

import torch
from torch import nn

from pyggtrain import ops
from pyggtrain.gguf.quant_tensor import QuantTensor


class Embedding(nn.Module):
    """x[t] = W[tokens[t]], W [V, D] in blocks; only the rows asked for are decoded. Frozen.

    Args:
        weight: the quantised tensor; its blocks become the buffer `weight`.
    """

    weight: torch.Tensor

    def __init__(self, weight: QuantTensor) -> None:
        super().__init__()
        self.gguf_name = weight.name
        self.quant_type = weight.type
        self.shape = weight.shape
        self.register_buffer("weight", weight.blocks)

    @property
    def quant(self) -> QuantTensor:
        """The weight as the file describes it."""
        return QuantTensor(name=self.gguf_name, type=self.quant_type, shape=self.shape, blocks=self.weight)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [T] -> float32 [T, D]."""
        return ops.embedding(tokens_T, self.quant)

    def extra_repr(self) -> str:
        return f"{self.gguf_name}, {self.quant_type}, {tuple(self.shape)}"
