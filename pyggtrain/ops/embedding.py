"""x[t] = W[tokens[t]]: the rows of a quantised embedding, decoded one token at a time.

The embedding is frozen, and tokens have no gradient, so there is nothing to save. Only the rows asked for are decoded.
"""

import torch

from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.ops.dequantize import dequantize_rows, num_columns
from pyggtrain.ops.operation import operation


@operation("embedding")
def _embedding(tokens_T: torch.Tensor, blocks: torch.Tensor, type: str, dtype: torch.dtype) -> torch.Tensor:
    x_TD = torch.empty(tokens_T.shape[0], num_columns(blocks, type), dtype=dtype, device=blocks.device)
    dequantize_rows(blocks.index_select(0, tokens_T), type, x_TD)
    return x_TD


@_embedding.register_fake
def _(tokens_T: torch.Tensor, blocks: torch.Tensor, type: str, dtype: torch.dtype) -> torch.Tensor:
    return blocks.new_empty(tokens_T.shape[0], num_columns(blocks, type), dtype=dtype)


def embedding(tokens_T: torch.Tensor, weight: QuantTensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The embedding of each token.

    Args:
        tokens_T: int64 [T], each in [0, V).
        weight: [V, D].
        dtype: of the result; on the CPU float32.

    Returns:
        [T, D].

    Raises:
        IndexError: a token is outside the vocabulary.
    """
    x_TD: torch.Tensor = _embedding(tokens_T, weight.blocks, weight.type, dtype)
    return x_TD
