"""y = x Wᵀ in float32 for x in bfloat16 and a frozen W in float32, on a GPU: the logits that a choice hangs on.

Gradient: dx = dy W, in bfloat16. Nothing is saved.
"""

from typing import Any

import torch


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        from pyggtrain.kernels.exact_matmul import exact_matmul_forward

        # Frozen, so there is no need to guard it.
        ctx.weight_NK = weight_NK
        return exact_matmul_forward(x_TK.contiguous(), weight_NK)

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[torch.Tensor, None]:
        from pyggtrain.kernels.exact_matmul import exact_matmul_backward

        return exact_matmul_backward(dy_TN.contiguous(), ctx.weight_NK), None


def exact_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """float32 [T, N] for x bfloat16 [T, K] and W float32 [N, K]."""
    result: torch.Tensor = _ExactLinear.apply(x_TK, weight_NK)  # type: ignore[no-untyped-call]
    return result
