"""Products with the experts that a router chose.

MUL_MAT_ID(W [E, N, K], x [T, k or 1, K], ids [T, k]) is y[t, j] = x[t, j] W[ids[t, j]]ᵀ. Rows are sorted by expert,
and each expert's
rows are one product with its own slice of the stack: nothing larger than one expert is ever dequantised.
"""

import torch

from pyggtrain import ops
from pyggtrain.gguf import QuantTensor


def experts_product(x_TJK: torch.Tensor, ids_TJ: torch.Tensor, weight: QuantTensor, *, compute: str) -> torch.Tensor:
    """y[t, j] = x[t, j] W[ids[t, j]]ᵀ.

    Args:
        x_TJK: float32 [T, J, K], or [T, 1, K] if all chosen experts read the same row.
        ids_TJ: int64 [T, J], each in [0, E).
        weight: [E, N, K].
        compute: see `ops.quant_linear`.

    Returns:
        [T, J, N].
    """
    num_tokens, num_chosen = ids_TJ.shape
    x = x_TJK.expand(num_tokens, num_chosen, x_TJK.shape[2]).reshape(num_tokens * num_chosen, -1)
    order = torch.argsort(ids_TJ.reshape(-1), stable=True)
    counts = torch.bincount(ids_TJ.reshape(-1), minlength=weight.shape[0]).tolist()
    parts = []
    for expert, rows in enumerate(torch.split(x[order], counts)):
        if rows.shape[0]:
            slice_NK = QuantTensor(
                name=weight.name, type=weight.type, shape=weight.shape[1:], blocks=weight.blocks[expert]
            )
            parts.append(ops.quant_linear(rows, slice_NK, compute=compute))
    y = torch.cat(parts)
    return y[torch.argsort(order)].reshape(num_tokens, num_chosen, -1)
