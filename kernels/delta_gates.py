"""The two gates of a gated delta net, from what their projections give (Yang et al. 2024, section 3.1).

    g = a softplus(alpha + dt), the log decay, with a = -exp(A_log) as the file holds it          beta = sigmoid(b)

Backward:  d_alpha = a sigmoid(alpha + dt) dg          db = beta (1 - beta) d_beta

All in float32. softplus(x) is x above 20, as in ggml.
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.checks import check_rows


@triton.jit
def delta_gates_fwd_kernel(
    p_alpha,
    p_b,
    p_a,
    p_dt,
    p_decay,
    p_beta,
    alpha_stride,
    b_stride,
    T,
    G: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    o_g = tl.arange(0, BG)[None, :]
    m = (o_t < T) & (o_g < G)
    b_x = tl.load(p_alpha + o_t * alpha_stride + o_g, mask=m, other=0.0).to(tl.float32)
    b_x += tl.load(p_dt + o_g, mask=o_g < G, other=0.0)
    b_softplus = tl.where(b_x > 20.0, b_x, tl.log(1.0 + tl.exp(tl.minimum(b_x, 20.0))))
    b_a = tl.load(p_a + o_g, mask=o_g < G, other=0.0)
    tl.store(p_decay + o_t * G + o_g, b_a * b_softplus, mask=m)
    b_b = tl.load(p_b + o_t * b_stride + o_g, mask=m, other=0.0).to(tl.float32)
    tl.store(p_beta + o_t * G + o_g, tl.sigmoid(b_b), mask=m)


@triton.jit
def delta_gates_bwd_kernel(
    p_d_decay,
    p_d_beta,
    p_alpha,
    p_beta,
    p_a,
    p_dt,
    p_d_alpha,
    p_d_b,
    alpha_stride,
    d_alpha_stride,
    d_b_stride,
    T,
    G: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    o_g = tl.arange(0, BG)[None, :]
    m = (o_t < T) & (o_g < G)
    b_x = tl.load(p_alpha + o_t * alpha_stride + o_g, mask=m, other=0.0).to(tl.float32)
    b_x += tl.load(p_dt + o_g, mask=o_g < G, other=0.0)
    b_a = tl.load(p_a + o_g, mask=o_g < G, other=0.0)
    b_d_alpha = tl.load(p_d_decay + o_t * G + o_g, mask=m, other=0.0) * b_a * tl.sigmoid(b_x)
    tl.store(p_d_alpha + o_t * d_alpha_stride + o_g, b_d_alpha.to(p_d_alpha.dtype.element_ty), mask=m)
    b_beta = tl.load(p_beta + o_t * G + o_g, mask=m, other=0.0)
    b_d_b = tl.load(p_d_beta + o_t * G + o_g, mask=m, other=0.0) * b_beta * (1 - b_beta)
    tl.store(p_d_b + o_t * d_b_stride + o_g, b_d_b.to(p_d_b.dtype.element_ty), mask=m)


def delta_gates_forward(
    alpha: torch.Tensor, b: torch.Tensor, a: torch.Tensor, dt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta, float32 [T, G].

    Args:
        alpha, b: [T, G], any float dtype, columns side by side, rows any distance apart.
        a, dt: float32 [G].
    """
    num_tokens, num_heads = alpha.shape
    check_rows("alpha", alpha, alpha)
    check_rows("b", b, alpha)
    log_decay, beta = (torch.empty(alpha.shape, dtype=torch.float32, device=alpha.device) for _ in range(2))
    delta_gates_fwd_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        alpha,
        b,
        a,
        dt,
        log_decay,
        beta,
        alpha.stride(0),
        b.stride(0),
        num_tokens,
        G=num_heads,
        BG=triton.next_power_of_2(num_heads),
        BT=TOKENS,
    )
    return log_decay, beta


def delta_gates_backward(
    d_log_decay: torch.Tensor,
    d_beta: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt: torch.Tensor,
    *,
    d_alpha: torch.Tensor,
    d_b: torch.Tensor,
) -> None:
    """Write the gradients of alpha and b.

    Args:
        d_log_decay, d_beta: float32 [T, G], contiguous.
        alpha, a, dt: as in forward. beta: what it returned.
        d_alpha, d_b: [T, G], any float dtype, columns side by side, rows any distance apart.
    """
    num_tokens, num_heads = alpha.shape
    for name, tensor in (("alpha", alpha), ("d_alpha", d_alpha), ("d_b", d_b)):
        check_rows(name, tensor, alpha)
    delta_gates_bwd_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        d_log_decay,
        d_beta,
        alpha,
        beta,
        a,
        dt,
        d_alpha,
        d_b,
        alpha.stride(0),
        d_alpha.stride(0),
        d_b.stride(0),
        num_tokens,
        G=num_heads,
        BG=triton.next_power_of_2(num_heads),
        BT=TOKENS,
    )


TOKENS = 32
