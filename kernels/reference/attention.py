"""Attention over packed documents in float64, with all scores at once. Same names and results as the kernels'."""

import torch
from pyggtrain.kernels.attention.mask import AttentionMask


def scores(
    q: torch.Tensor, k: torch.Tensor, mask: AttentionMask, softmax_scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Capped scores z [H, T, T] before the mask, and where a token sees a key, [T, T]."""
    token = torch.arange(len(q), device=q.device)
    seen = (token[None, :] <= token[:, None]) & (token[None, :] >= mask.first_key[:, None])
    z = softmax_scale * torch.einsum("thk,shk->hts", q.double(), repeat_heads(k, q.shape[1]).double())
    return z if softcap is None else softcap * (z / softcap).tanh(), seen


def repeat_heads(kv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[T, N, K] as [T, H, K]: each head for a whole group of query heads."""
    return kv.repeat_interleave(num_heads // kv.shape[1], 1)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, H, K] and lse [H, T]."""
    z, seen = scores(q, k, mask, softmax_scale, softcap)
    z = z.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        z = torch.cat((z, sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
    lse = z.logsumexp(2)
    p = (z - lse[..., None]).exp()[..., : len(q)]
    return torch.einsum("hts,shk->thk", p, repeat_heads(v, q.shape[1]).double()), lse


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, term by term as in the kernel's docstring."""
    num_heads, groups = q.shape[1], (k.shape[1], -1)
    z, seen = scores(q, k, mask, softmax_scale, softcap)
    p = (z - lse.double()[..., None]).exp().masked_fill(~seen, 0.0)
    dp = torch.einsum("thk,shk->hts", do.double(), repeat_heads(v, num_heads).double())
    rows = (o.double() * do.double()).sum(2).t()
    dz = p * (dp - rows[..., None])
    if softcap is not None:
        dz = dz * (1 - (z / softcap) ** 2)
    dq = softmax_scale * torch.einsum("hts,shk->thk", dz, repeat_heads(k, num_heads).double())
    dk = softmax_scale * torch.einsum("hts,thk->shk", dz, q.double()).unflatten(1, groups).sum(2)
    dv = torch.einsum("hts,thk->shk", p, do.double()).unflatten(1, groups).sum(2)
    return dq, dk, dv
