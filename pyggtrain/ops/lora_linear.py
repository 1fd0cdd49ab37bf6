"""y = x Wᵀ + s (x Aᵀ) Bᵀ (+ bias) (+ residual): a frozen quantised weight with a low-rank update.

Hu et al. 2021 (LoRA), eq. 3.

x [T, K], W [N, K] in blocks, A = lora_a [R, K], B = lora_b [N, R], s = alpha / r -> y [T, N]

B A [N, K] is never formed. The low-rank path reads x itself, in float32, also where the base product rounds x to 8
bits: so does llama.cpp with a float32 adapter. Dropout (mask m in {0, 1}, 1 / (1 - p) folded into s by the caller) acts
on that path only.

Gradient. With h = (m ∘ x) Aᵀ [T, R] and dh = s dy B [T, R]:

    dx = dy W + m ∘ (dh A)
    dA = dhᵀ (m ∘ x)
    dB = s dyᵀ h
    d_residual = dy

Saved: x and h. On a CPU the thin products differ by a factor of four depending on which operand is transposed: those
that give [R, T] or [R, N] run at the speed of memory, those that give [T, R] or [N, R] at a quarter of it (measured,
MKL). So everything thin is computed with R as the leading dimension, and what is added to the big product comes first
(`quant_matmul.forward`).
"""

from typing import Any

import torch

from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.ops import quant_matmul
from pyggtrain.ops.operation import operation


def low_rank_forward(x_TK: torch.Tensor, lora_a_RK: torch.Tensor, dropout_mask_TK: torch.Tensor | None) -> torch.Tensor:
    """hᵀ = A (m ∘ x)ᵀ, [R, T], in x's dtype."""
    if dropout_mask_TK is not None:
        x_TK = x_TK * dropout_mask_TK
    return lora_a_RK.to(x_TK.dtype) @ x_TK.t()


def product_of_gradient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in float32 where the factors are half precision: what it feeds are float32 gradients."""
    if a.dtype in quant_matmul.HALF_DTYPES:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


@operation("lora_linear")
def _lora_linear(
    x_TK: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_RK: torch.Tensor,
    lora_b_NR: torch.Tensor,
    scale: float,
    compute: str,
    dropout_mask_TK: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    h_RT = low_rank_forward(x_TK, lora_a_RK, dropout_mask_TK)
    lora_b_NR = lora_b_NR.to(x_TK.dtype)
    start_TN = quant_matmul.start_of(bias_N, residual_TN, x_TK.shape[0])
    if start_TN is None:
        delta_TN = h_RT.t() @ (lora_b_NR.t() * scale)
    else:
        delta_TN = start_TN.to(x_TK.dtype).addmm_(h_RT.t(), lora_b_NR.t(), alpha=scale)
    return quant_matmul.forward(x_TK, blocks, type, compute=compute, out=delta_TN, accumulate=True), h_RT


@_lora_linear.register_fake
def _(
    x_TK: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_RK: torch.Tensor,
    lora_b_NR: torch.Tensor,
    scale: float,
    compute: str,
    dropout_mask_TK: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = x_TK.shape[0]
    return x_TK.new_empty(num_tokens, blocks.shape[0]), x_TK.new_empty(lora_a_RK.shape[0], num_tokens)


@operation("lora_linear_backward")
def _lora_linear_backward(
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    h_RT: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_RK: torch.Tensor,
    lora_b_NR: torch.Tensor,
    scale: float,
    compute: str,
    dropout_mask_TK: torch.Tensor | None,
    needs_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dh_RT = (lora_b_NR.t() * scale).to(dy_TN.dtype) @ dy_TN.t()
    d_lora_b_NR = product_of_gradient(h_RT, dy_TN).t().mul(scale).contiguous()
    d_lora_a_RK = product_of_gradient(dh_RT, x_TK if dropout_mask_TK is None else x_TK * dropout_mask_TK)
    if not needs_dx:
        return dy_TN.new_empty(0), d_lora_a_RK, d_lora_b_NR
    dx_TK = dh_RT.t() @ lora_a_RK.to(dy_TN.dtype)
    if dropout_mask_TK is not None:
        dx_TK.mul_(dropout_mask_TK)
    quant_matmul.backward(dy_TN, blocks, type, compute=compute, out=dx_TK, accumulate=True)
    return dx_TK, d_lora_a_RK, d_lora_b_NR


@_lora_linear_backward.register_fake
def _(
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    h_RT: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    lora_a_RK: torch.Tensor,
    lora_b_NR: torch.Tensor,
    scale: float,
    compute: str,
    dropout_mask_TK: torch.Tensor | None,
    needs_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format) if needs_dx else dy_TN.new_empty(0)
    return dx_TK, torch.empty_like(lora_a_RK), torch.empty_like(lora_b_NR)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_TK, blocks, ctx.type, lora_a_RK, lora_b_NR, ctx.scale, ctx.compute, dropout_mask_TK, _, _ = inputs
    h_RT = output[1]
    ctx.mark_non_differentiable(h_RT)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_TK, h_RT, blocks, lora_a_RK, lora_b_NR, dropout_mask_TK)


def _backward(ctx: Any, dy_TN: torch.Tensor | None, dh_unused: None) -> tuple[torch.Tensor | None, ...]:
    if dy_TN is None:
        return (None,) * 10
    x_TK, h_RT, blocks, lora_a_RK, lora_b_NR, dropout_mask_TK = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx_TK, d_lora_a_RK, d_lora_b_NR = _lora_linear_backward(
        dy_TN, x_TK, h_RT, blocks, ctx.type, lora_a_RK, lora_b_NR, ctx.scale, ctx.compute, dropout_mask_TK, needs[0]
    )
    d_residual_TN = dy_TN if needs[9] else None
    return dx_TK if needs[0] else None, None, None, d_lora_a_RK, d_lora_b_NR, None, None, None, None, d_residual_TN


_lora_linear.register_autograd(_backward, setup_context=_save)


def lora_linear(
    x_TK: torch.Tensor,
    weight: QuantTensor,
    lora_a_RK: torch.Tensor,
    lora_b_NR: torch.Tensor,
    *,
    scale: float,
    dropout_mask_TK: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    residual_TN: torch.Tensor | None = None,
    compute: str = "auto",
) -> torch.Tensor:
    """y = x Wᵀ + scale · (x Aᵀ) Bᵀ (+ bias) (+ residual).

    Args:
        x_TK: float32 [T, K]; on a GPU also bfloat16 or float16.
        weight: [N, K].
        lora_a_RK: [R, K]. lora_b_NR: [N, R]. In x's dtype, or float32 masters beside x of half precision; so are their
            gradients.
        scale: alpha / r; with dropout, divided by (1 - p) already.
        dropout_mask_TK: bool [T, K], True keeps. Acts on the low-rank path only.
        bias_N, residual_TN, compute: as in `quant_linear`.

    Returns:
        [T, N] in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    num_rows, num_columns = weight.shape
    quant_matmul.check(x_TK, num_columns, compute)
    rank = lora_a_RK.shape[0]
    if lora_a_RK.shape != (rank, num_columns) or lora_b_NR.shape != (num_rows, rank):
        raise ValueError(
            f"{weight.name}: lora_a is {tuple(lora_a_RK.shape)} and lora_b {tuple(lora_b_NR.shape)}: "
            f"needed [r, {num_columns}] and [{num_rows}, r]"
        )
    y_TN: torch.Tensor
    y_TN, _ = _lora_linear(
        x_TK, weight.blocks, weight.type, lora_a_RK, lora_b_NR, scale, compute, dropout_mask_TK, bias_N, residual_TN
    )
    return y_TN
