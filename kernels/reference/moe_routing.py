"""Routing in plain torch. Same names and results as `pyggtrain.kernels.moe_routing`."""

import torch


def sort_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """slot and bounds of ids [T, J]."""
    slot = torch.sort(ids.flatten(), stable=True).indices
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    return slot, torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def combine(
    y: torch.Tensor,
    num_chosen: int,
    *,
    probs: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + Σ_j probs y, float64 [T, D]."""
    rows = y.double().unflatten(0, (-1, num_chosen))
    if probs is not None:
        rows = rows * probs.double()[..., None]
    total: torch.Tensor = rows.sum(1)
    return total if residual is None else total + residual.double()
