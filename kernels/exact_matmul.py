"""Products of rows with a matrix of float32 on matrix units that multiply bfloat16: a router's.

A float32 has 24 bits, a bfloat16 8, so W = W1 + W2 + W3 exactly, each the rest rounded to bfloat16 (as long as the
smallest is no denormal). Rows in bfloat16 are multiplied by all three, in one float32 sum, smallest first:

    y = x W3ᵀ + x W2ᵀ + x W1ᵀ

Nothing but the sum rounds, as in a product of float32, at a few times the speed of units without such products. What
comes back is rounded to bfloat16 anyway, so there two parts of each are enough (16 bits):

    dx = dy2 W1 + dy1 W2 + dy1 W1
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.checks import check_contiguous


@triton.jit
def exact_matmul_kernel(
    p_a,
    p_w,
    p_y,
    M,
    N,
    K,
    a_stride,
    w_n_stride,
    w_k_stride,
    y_stride,
    IS_BACKWARD: tl.constexpr,
    DOT: tl.constexpr,  # what parts are multiplied in; the interpreter has no products of bfloat16
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    num_n = tl.cdiv(N, BN)
    o_m = (tl.program_id(0) // num_n).to(tl.int64) * BM + tl.arange(0, BM)
    o_n = tl.program_id(0) % num_n * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for first in range(0, K, BK):
        o_k = first + tl.arange(0, BK)
        b_a = tl.load(
            p_a + o_m[:, None] * a_stride + o_k[None, :], mask=(o_m < M)[:, None] & (o_k < K)[None, :], other=0.0
        )
        p_tile = p_w + o_n[None, :].to(tl.int64) * w_n_stride + o_k[:, None].to(tl.int64) * w_k_stride
        b_w = tl.load(p_tile, mask=(o_k < K)[:, None] & (o_n < N)[None, :], other=0.0)
        b_w1 = b_w.to(tl.bfloat16)
        b_rest = b_w - b_w1.to(tl.float32)
        b_w2 = b_rest.to(tl.bfloat16)
        if IS_BACKWARD:
            b_a1 = b_a.to(tl.bfloat16)
            b_a2 = (b_a - b_a1.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(b_a2.to(DOT), b_w1.to(DOT), acc, input_precision="ieee")
            acc = tl.dot(b_a1.to(DOT), b_w2.to(DOT), acc, input_precision="ieee")
            acc = tl.dot(b_a1.to(DOT), b_w1.to(DOT), acc, input_precision="ieee")
        else:
            b_w3 = (b_rest - b_w2.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(b_a.to(DOT), b_w3.to(DOT), acc, input_precision="ieee")
            acc = tl.dot(b_a.to(DOT), b_w2.to(DOT), acc, input_precision="ieee")
            acc = tl.dot(b_a.to(DOT), b_w1.to(DOT), acc, input_precision="ieee")
    m_y = (o_m < M)[:, None] & (o_n < N)[None, :]
    tl.store(p_y + o_m[:, None] * y_stride + o_n[None, :], acc.to(p_y.dtype.element_ty), mask=m_y)


def exact_matmul_forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = x Wᵀ.

    Args:
        x: [T, K] in bfloat16, unit column stride.
        weight: [N, K] in float32, contiguous.

    Returns:
        float32 [T, N].
    """
    _check("x", x, weight, weight.shape[1], torch.bfloat16)
    y = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, y, is_backward=False)
    return y


def exact_matmul_backward(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dx = dy W.

    Args:
        dy: [T, N] in float32, unit column stride.
        weight: [N, K] in float32, contiguous.

    Returns:
        bfloat16 [T, K].
    """
    _check("dy", dy, weight, weight.shape[0], torch.float32)
    dx = torch.empty(dy.shape[0], weight.shape[1], dtype=torch.bfloat16, device=dy.device)
    _launch(dy, weight, dx, is_backward=True)
    return dx


def _check(name: str, rows: torch.Tensor, weight: torch.Tensor, width: int, dtype: torch.dtype) -> None:
    check_contiguous("weight", weight)
    if rows.dim() != 2 or rows.shape[1] != width or rows.stride(1) != 1 or rows.dtype != dtype:
        raise ValueError(
            f"{name} is {rows.dtype} {list(rows.shape)} with strides {rows.stride()}; "
            f"needed: {dtype} [T, {width}] with unit column stride."
        )
    if weight.dtype != torch.float32:
        raise ValueError(f"weight is {weight.dtype}; needed: torch.float32.")


def _launch(a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, is_backward: bool) -> None:
    num_rows, num_columns = out.shape
    if out.numel() == 0:
        return
    width = weight.shape[1]
    exact_matmul_kernel[(triton.cdiv(num_rows, ROWS) * triton.cdiv(num_columns, COLUMNS),)](
        a,
        weight,
        out,
        num_rows,
        num_columns,
        a.shape[1],
        a.stride(0),
        1 if is_backward else width,
        width if is_backward else 1,
        out.stride(0),
        IS_BACKWARD=is_backward,
        DOT=tl.bfloat16 if a.is_cuda else tl.float32,
        BM=ROWS,
        BN=COLUMNS,
        BK=TERMS,
        num_warps=4,
        num_stages=3,
    )


# Routers have few columns: small tiles, so that there are enough programs.
ROWS, COLUMNS, TERMS = 64, 64, 64
