"""Token embedding in the file's blocks."""

import torch
from torch import nn

from pyggtrain import ops
from pyggtrain.gguf.quant_tensor import QuantTensor


class Embedding(nn.Module):
    """x[t] = W[tokens[t]], W [V, D] in blocks; only the rows asked for are decoded. Frozen.

    Args:
        weight: the quantised tensor; its blocks become the buffer `weight`.
        dtype: of the result, and so of everything computed from it.
    """

    weight: torch.Tensor

    def __init__(self, weight: QuantTensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.gguf_name = weight.name
        self.quant_type = weight.type
        self.shape = weight.shape
        self.register_buffer("weight", weight.blocks)

    @property
    def quant(self) -> QuantTensor:
        """The weight as the file describes it."""
        return QuantTensor(name=self.gguf_name, type=self.quant_type, shape=self.shape, blocks=self.weight)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [T] -> [T, D]."""
        return ops.embedding(tokens_T, self.quant, dtype=self.dtype)

    def extra_repr(self) -> str:
        return f"{self.gguf_name}, {self.quant_type}, {tuple(self.shape)}"
