"""A linear layer whose weight stays in the file's blocks, and the low-rank pair that may be trained on top of it."""

import torch
from torch import nn

from pyggtrain import ops
from pyggtrain.gguf.quant_tensor import QuantTensor


class LoraPair(nn.Module):
    """The trained part of one linear: W becomes W + scale · B A, without ever forming B A.

    Args:
        lora_a: float32 [R, K]; of experts [E, R, K].
        lora_b: float32 [N, R]; of experts [E, N, R].
        scale: alpha / r, as llama.cpp will compute it.
        dropout: probability that an element of the input is hidden from this pair while training.
    """

    def __init__(self, lora_a: torch.Tensor, lora_b: torch.Tensor, *, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(lora_a)
        self.lora_b = nn.Parameter(lora_b)
        self.scale = scale
        self.dropout = dropout

    @property
    def rank(self) -> int:
        return self.lora_b.shape[-1]

    @property
    def has_dropout(self) -> bool:
        """Whether it hides anything now."""
        return self.training and self.dropout > 0.0

    def draw_dropout(self, x: torch.Tensor) -> tuple[torch.Tensor | None, float]:
        """A mask for x (bool, True keeps; None outside training or without dropout) and the scale that goes with it."""
        if not self.has_dropout:
            return None, self.scale
        keep = 1.0 - self.dropout
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(keep), self.scale / keep


class QuantLinear(nn.Module):
    """y = x Wᵀ (+ bias), W [N, K] in blocks.

    Args:
        weight: the quantised tensor; its blocks become the buffer `weight`.
        bias: float32 [N] or None. Frozen.
        compute: how the product is computed, see `ops.quant_linear`; "fp8" for linears of fused layers too.

    Attributes:
        gguf_name: the tensor's name in the file, e.g. "blk.0.attn_q.weight".
        lora: the trained pair, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: LoraPair | None

    def __init__(self, weight: QuantTensor, bias: torch.Tensor | None = None, *, compute: str = "auto") -> None:
        super().__init__()
        self.gguf_name = weight.name
        self.quant_type = weight.type
        self.shape = weight.shape
        self.compute = compute
        self.register_buffer("weight", weight.blocks)
        self.register_buffer("bias", bias)
        self.register_module("lora", None)

    @property
    def quant(self) -> QuantTensor:
        """The weight as the file describes it."""
        return QuantTensor(name=self.gguf_name, type=self.quant_type, shape=self.shape, blocks=self.weight)

    def forward(self, x_TK: torch.Tensor, residual_TN: torch.Tensor | None = None) -> torch.Tensor:
        """x Wᵀ (+ low-rank update) (+ bias) (+ residual); `residual_TN` only where the result is a layer's output."""
        if self.lora is None:
            return ops.quant_linear(x_TK, self.quant, bias_N=self.bias, residual_TN=residual_TN, compute=self.compute)
        dropout_mask_TK, scale = self.lora.draw_dropout(x_TK)
        return ops.lora_linear(
            x_TK,
            self.quant,
            self.lora.lora_a,
            self.lora.lora_b,
            scale=scale,
            dropout_mask_TK=dropout_mask_TK,
            bias_N=self.bias,
            residual_TN=residual_TN,
            compute=self.compute,
        )

    def cross_entropy(
        self, x_TD: torch.Tensor, targets_T: torch.Tensor, *, chunk: int | None
    ) -> tuple[torch.Tensor, int]:
        """Loss of this linear as an output head, see `ops.linear_cross_entropy`."""
        if self.lora is None:
            return ops.linear_cross_entropy(x_TD, self.quant, targets_T, chunk=chunk, compute=self.compute)
        dropout_mask_TD, scale = self.lora.draw_dropout(x_TD)
        return ops.linear_cross_entropy(
            x_TD,
            self.quant,
            targets_T,
            chunk=chunk,
            lora_a_RD=self.lora.lora_a,
            lora_b_VR=self.lora.lora_b,
            scale=scale,
            dropout_mask_TD=dropout_mask_TD,
            compute=self.compute,
        )

    def extra_repr(self) -> str:
        return f"{self.gguf_name}, {self.quant_type}, {tuple(self.shape)}"
