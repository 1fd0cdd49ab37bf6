"""y = x Wᵀ (+ bias) (+ residual), W a frozen quantised weight.

x [T, K], W [N, K] in blocks along K, bias [N], residual [T, N] -> y [T, N]

Gradient. W and bias are frozen, so with dy [T, N]:

    dx        = dy W
    d_residual = dy

Nothing of the size of an activation is saved: dx needs only W. Forward may round x to 8 bits (`compute`); backward does
not know of it (straight-through), so dx is the exact Jacobian of the dequantised weight.
"""

from typing import Any

import torch

from pyggtrain.gguf.quant_tensor import QuantTensor
from pyggtrain.ops import quant_matmul
from pyggtrain.ops.operation import operation


@operation("quant_linear")
def _quant_linear(
    x_TK: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    compute: str,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
) -> torch.Tensor:
    start_TN = quant_matmul.start_of(bias_N, residual_TN, x_TK.shape[0])
    return quant_matmul.forward(x_TK, blocks, type, compute=compute, out=start_TN, accumulate=start_TN is not None)


@_quant_linear.register_fake
def _(
    x_TK: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    compute: str,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
) -> torch.Tensor:
    return x_TK.new_empty(x_TK.shape[0], blocks.shape[0])


@operation("quant_linear_backward")
def _quant_linear_backward(
    dy_TN: torch.Tensor, blocks: torch.Tensor, type: str, compute: str, num_columns: int
) -> torch.Tensor:
    dx_TK = dy_TN.new_empty(dy_TN.shape[0], num_columns)
    return quant_matmul.backward(dy_TN, blocks, type, compute=compute, out=dx_TK)


@_quant_linear_backward.register_fake
def _(dy_TN: torch.Tensor, blocks: torch.Tensor, type: str, compute: str, num_columns: int) -> torch.Tensor:
    return dy_TN.new_empty(dy_TN.shape[0], num_columns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_TK, blocks, ctx.type, ctx.compute, _, _ = inputs
    ctx.num_columns = x_TK.shape[1]
    ctx.save_for_backward(blocks)


def _backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (blocks,) = ctx.saved_tensors
    needs_x, needs_residual = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
    dx_TK = _quant_linear_backward(dy_TN, blocks, ctx.type, ctx.compute, ctx.num_columns) if needs_x else None
    return dx_TK, None, None, None, None, dy_TN if needs_residual else None


_quant_linear.register_autograd(_backward, setup_context=_save)


def quant_linear(
    x_TK: torch.Tensor,
    weight: QuantTensor,
    *,
    bias_N: torch.Tensor | None = None,
    residual_TN: torch.Tensor | None = None,
    compute: str = "auto",
) -> torch.Tensor:
    """y = x Wᵀ (+ bias) (+ residual).

    Args:
        x_TK: float32 [T, K]; on a GPU also bfloat16 or float16. float64 is taken for references and gives float64.
        weight: [N, K].
        bias_N: float32 [N], frozen.
        residual_TN: [T, N], added inside the product. A model passes it to the linear that ends a layer, and only
            there: the result is then the layer's output, which `nn.checkpointing` keeps anyway instead of computing it
            twice.
        compute: "exact" (dequantised rows, in x's dtype), "ggml" (CPU: llama.cpp's kernel, activations in 8 bits),
            "bf16", "fused" or "mmq" (GPU, see `quant_matmul`), or "auto" (the fastest; on a GPU products of float32 are
            computed in bfloat16).

    Returns:
        [T, N] in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    quant_matmul.check(x_TK, weight.shape[1], compute)
    y_TN: torch.Tensor = _quant_linear(x_TK, weight.blocks, weight.type, compute, bias_N, residual_TN)
    return y_TN
