"""Rotary position embedding (Su et al. 2021, eq. 34) with the angles given as a table.

Each pair (a, b) of a head's first 2P numbers is rotated by the angle θ of its position and its place:

    a' = a cos θ - b sin θ
    b' = b cos θ + a sin θ

Pairing: "NORM" rotates (x[2i], x[2i + 1]), "NEOX" (x[i], x[i + P]); ggml's GGML_ROPE_TYPE_NORMAL and _NEOX. Numbers
past 2P pass through. cos and sin carry the magnitude of YaRN, so the table need not be a pure rotation.

Gradient. The map is linear, and its transpose is the same map with sin negated. Nothing is saved but the table, which
all layers share.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from pyggtrain.ops.operation import operation

Pairing = Literal["NORM", "NEOX"]


@dataclass(frozen=True, eq=False)
class RopeTables:
    """cos θ and sin θ, float32 [T, P]: one row per token (not per position), one column per pair."""

    cos_TP: torch.Tensor
    sin_TP: torch.Tensor
    pairing: Pairing


def _pairwise(x: torch.Tensor) -> torch.Tensor:
    """x itself if every pair lies where a complex number may lie, else a copy."""
    is_aligned = x.stride(-1) == 1 and not any(stride % 2 for stride in (*x.stride()[:-1], x.storage_offset()))
    return x if is_aligned else x.contiguous()


def cpu_rope(
    x_THK: torch.Tensor, tables: RopeTables, *, is_inverse: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Every head rotated, without autograd.

    Args:
        x_THK: any strides with the last one 1.
        tables: for these T tokens.
        is_inverse: turn back: the map's transpose.
        out: [T, H, K] to write to, may be x itself; None allocates.

    Returns:
        `out`.
    """
    num_pairs = tables.cos_TP.shape[1]
    y_THK = torch.empty_like(x_THK, memory_format=torch.contiguous_format) if out is None else out
    x, y = x_THK[..., : 2 * num_pairs], y_THK[..., : 2 * num_pairs]
    if tables.pairing == "NEOX":
        cos, sin = tables.cos_TP.unsqueeze(1), tables.sin_TP.unsqueeze(1)
        sign = -1 if is_inverse else 1
        a, b = x.chunk(2, dim=-1)
        y_a, y_b = y.chunk(2, dim=-1)
        turned_a = (a * cos).addcmul_(b, sin, value=-sign)
        torch.mul(b, cos, out=y_b).addcmul_(a, sin, value=sign)
        y_a.copy_(turned_a)
    else:
        # a + ib times cos + i sin: one pass instead of four.
        rotation = torch.complex(tables.cos_TP, -tables.sin_TP if is_inverse else tables.sin_TP).unsqueeze(1)
        pairs = torch.view_as_complex(_pairwise(x).view(*x.shape[:-1], num_pairs, 2))
        torch.mul(pairs, rotation, out=torch.view_as_complex(y.view(*y.shape[:-1], num_pairs, 2)))
    if y_THK is not x_THK:
        y_THK[..., 2 * num_pairs :] = x_THK[..., 2 * num_pairs :]
    return y_THK


@operation("rope")
def _rope(
    x_THK: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, is_neox: bool, is_inverse: bool
) -> torch.Tensor:
    if x_THK.is_cuda:
        from pyggtrain.kernels.rope import rope_backward, rope_forward

        turn = rope_backward if is_inverse else rope_forward
        x_THK = x_THK if x_THK.stride(-1) == 1 else x_THK.contiguous()
        return turn(x_THK, cos_TP, sin_TP, is_neox=is_neox)
    tables = RopeTables(cos_TP, sin_TP, "NEOX" if is_neox else "NORM")
    return cpu_rope(x_THK, tables, is_inverse=is_inverse)


@_rope.register_fake
def _(x_THK: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, is_neox: bool, is_inverse: bool) -> torch.Tensor:
    return torch.empty_like(x_THK, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos_TP, sin_TP, ctx.is_neox, ctx.is_inverse = inputs
    ctx.save_for_backward(cos_TP, sin_TP)


def _backward(ctx: Any, dy_THK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cos_TP, sin_TP = ctx.saved_tensors
    return _rope(dy_THK, cos_TP, sin_TP, ctx.is_neox, not ctx.is_inverse), None, None, None, None


_rope.register_autograd(_backward, setup_context=_save)


def rope(x_THK: torch.Tensor, tables: RopeTables) -> torch.Tensor:
    """Rotate every head of every token.

    Args:
        x_THK: float32 [T, H, K] (on a GPU also bfloat16 or float16), any strides with the last one 1.
        tables: for these T tokens; 2P <= K.

    Returns:
        [T, H, K], contiguous.

    Raises:
        ValueError: the table is for another number of tokens, or wider than a head.
    """
    num_tokens, num_pairs = tables.cos_TP.shape
    if num_tokens != x_THK.shape[0] or 2 * num_pairs > x_THK.shape[2]:
        raise ValueError(
            f"rope table [{num_tokens}, {num_pairs}] does not fit x {tuple(x_THK.shape)}: needed [T, P] with 2P <= K"
        )
    y_THK: torch.Tensor = _rope(x_THK, tables.cos_TP, tables.sin_TP, tables.pairing == "NEOX", False)
    return y_THK
