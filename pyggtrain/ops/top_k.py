"""The columns of the k largest numbers of each row, the largest first, of equal ones the leftmost first.

A choice has no slope: there is no gradient. These are the first k columns of a stable descending sort, which is what a
CPU computes; on a GPU a sort of all columns is most of a router's time, and a kernel finds these k alone.
"""

import torch

from pyggtrain.ops.operation import operation


@operation("top_k")
def _top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    if x.is_cuda:
        from pyggtrain.kernels.top_k import MAX_CHOSEN, MAX_COLUMNS, top_k

        if x.shape[-1] <= MAX_COLUMNS and k <= MAX_CHOSEN:
            return top_k(x.reshape(-1, x.shape[-1]), k).view(*x.shape[:-1], k)
    return torch.argsort(x, dim=-1, descending=True, stable=True)[..., :k].int().contiguous()


@_top_k.register_fake
def _(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], k, dtype=torch.int32)


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [.., k], columns of x [.., E] in any float dtype (on a GPU at most 32 bits)."""
    ids: torch.Tensor = _top_k(x.detach(), k)
    return ids
