"""Differentiable operations on quantised weights: one file each, with the equation and the derivation of the gradient.

Every operation is a `torch.library` custom op (attention is torch's own on a CPU, log_probs is made of others), so
torch.compile, selective checkpointing and other devices find it through torch's dispatcher; `fused` holds coarser ones
for GPUs. Shape letters, here and in every file: T tokens, D model width, F feed-forward width, H query heads, N kv
heads (or output rows of a weight), K head width (or input columns of a weight), V vocabulary, R rank, E
experts, J chosen experts of a token, C chunk, P rotated pairs.
"""

from pyggtrain.ops.attention import Documents, attention
from pyggtrain.ops.causal_conv1d import causal_conv1d
from pyggtrain.ops.dequantize import dequantize
from pyggtrain.ops.embedding import embedding
from pyggtrain.ops.expert_linear import expert_linear
from pyggtrain.ops.gated_delta_rule import gated_delta_rule
from pyggtrain.ops.linear_cross_entropy import linear_cross_entropy
from pyggtrain.ops.log_probs import log_probs
from pyggtrain.ops.lora_linear import lora_linear
from pyggtrain.ops.quant_linear import quant_linear
from pyggtrain.ops.rms_norm import rms_norm
from pyggtrain.ops.rope import RopeTables, rope
from pyggtrain.ops.swiglu import swiglu
from pyggtrain.ops.top_k import top_k

__all__ = [
    "Documents",
    "RopeTables",
    "attention",
    "causal_conv1d",
    "dequantize",
    "embedding",
    "expert_linear",
    "gated_delta_rule",
    "linear_cross_entropy",
    "log_probs",
    "lora_linear",
    "quant_linear",
    "rms_norm",
    "rope",
    "swiglu",
    "top_k",
]
