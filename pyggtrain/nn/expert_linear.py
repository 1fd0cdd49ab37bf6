"""A stack of experts whose weights stay in the file's blocks, and the low-rank pairs that may be trained on top."""

import torch
from torch import nn

from pyggtrain import ops
from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.nn.quant_linear import LoraPair


class ExpertLinear(nn.Module):
    """y[t, j] = x[t, j] W[ids[t, j]]ᵀ, W [E, N, K] in blocks.

    Args:
        weight: the quantised stack; its blocks become the buffer `weight`.
        compute: how products are computed, see `ops.quant_linear`.

    Attributes:
        gguf_name: the tensor's name in the file, e.g. "blk.0.ffn_up_exps.weight".
        lora: the trained pair, lora_a [E, R, K] and lora_b [E, N, R], or None.
    """

    weight: torch.Tensor
    lora: LoraPair | None

    def __init__(self, weight: QuantTensor, *, compute: str = "auto") -> None:
        super().__init__()
        self.gguf_name = weight.name
        self.quant_type = weight.type
        self.shape = weight.shape
        self.compute = compute
        self.register_buffer("weight", weight.blocks)
        self.register_module("lora", None)

    @property
    def quant(self) -> QuantTensor:
        """The stack as the file describes it."""
        return QuantTensor(name=self.gguf_name, type=self.quant_type, shape=self.shape, blocks=self.weight)

    def forward(
        self, x_TJK: torch.Tensor, ids_TJ: torch.Tensor, base_scale_E: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each token's rows through the experts it chose, see `ops.expert_linear`: [T, J, N]."""
        pair = self.lora
        dropout_mask_TJK, scale = (None, 1.0) if pair is None else pair.draw_dropout(x_TJK)
        return ops.expert_linear(
            x_TJK,
            ids_TJ,
            self.quant,
            lora_a_ERK=None if pair is None else pair.lora_a,
            lora_b_ENR=None if pair is None else pair.lora_b,
            base_scale_E=base_scale_E,
            scale=scale,
            dropout_mask_TJK=dropout_mask_TJK,
            compute=self.compute,
        )

    def extra_repr(self) -> str:
        return f"{self.gguf_name}, {self.quant_type}, {tuple(self.shape)}"
