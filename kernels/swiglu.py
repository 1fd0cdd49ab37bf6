"""SwiGLU: y = silu(gate) * up, silu(g) = g sigmoid(g)                                    (Shazeer 2020, eq. 6)

Backward, with p = sigmoid(gate) and silu'(g) = p (1 + g (1 - p)):

    d_gate = dy * up * p (1 + gate (1 - p))
    d_up   = dy * gate p

y is not saved: backward computes it again while it has gate and up in registers, because the LoRA gradient of the next
linear needs it. Arithmetic in float32. Rows may lie any distance apart, so gate and up can be halves of one matrix
product's output.
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.checks import check_rows


@triton.jit
def swiglu_fwd_kernel(p_gate, p_up, p_y, gate_stride, up_stride, y_stride, F, BF: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BF + tl.arange(0, BF)
    m_f = o_f < F
    b_gate = tl.load(p_gate + o_t * gate_stride + o_f, mask=m_f).to(tl.float32)
    b_up = tl.load(p_up + o_t * up_stride + o_f, mask=m_f).to(tl.float32)
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_y + o_t * y_stride + o_f, b_y.to(p_y.dtype.element_ty), mask=m_f)


@triton.jit
def swiglu_bwd_kernel(
    p_dy,
    p_gate,
    p_up,
    p_d_gate,
    p_d_up,
    p_y,
    dy_stride,
    gate_stride,
    up_stride,
    d_gate_stride,
    d_up_stride,
    y_stride,
    F,
    BF: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BF + tl.arange(0, BF)
    m_f = o_f < F
    b_gate = tl.load(p_gate + o_t * gate_stride + o_f, mask=m_f).to(tl.float32)
    b_up = tl.load(p_up + o_t * up_stride + o_f, mask=m_f).to(tl.float32)
    b_dy = tl.load(p_dy + o_t * dy_stride + o_f, mask=m_f).to(tl.float32)
    b_p = tl.sigmoid(b_gate)
    b_silu = b_gate * b_p
    tl.store(
        p_d_gate + o_t * d_gate_stride + o_f,
        (b_dy * b_up * b_p * (1.0 + b_gate * (1.0 - b_p))).to(p_d_gate.dtype.element_ty),
        mask=m_f,
    )
    tl.store(p_d_up + o_t * d_up_stride + o_f, (b_dy * b_silu).to(p_d_up.dtype.element_ty), mask=m_f)
    tl.store(p_y + o_t * y_stride + o_f, (b_silu * b_up).to(p_y.dtype.element_ty), mask=m_f)


def swiglu_forward(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """y = silu(gate) * up.

    Args:
        gate, up: [T, F], any float dtype. Rows of all tensors may lie any distance apart.
        out: [T, F], where y goes; made if None.

    Returns:
        y [T, F].
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if out is None else out
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        check_rows(name, tensor, gate)
    num_tokens, width = gate.shape
    swiglu_fwd_kernel[(num_tokens, triton.cdiv(width, BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), out.stride(0), width, BF=BLOCK, num_warps=NUM_WARPS
    )
    return out


def swiglu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    d_gate: torch.Tensor | None = None,
    d_up: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, and y once more.

    Args:
        dy, gate, up: [T, F].
        d_gate, d_up, y: [T, F], where the results go; made if None. They may be gate, up and dy: every element is read
            before
            it is written.

    Returns:
        d_gate, d_up, y, each [T, F].
    """
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if d_gate is None else d_gate
    d_up = torch.empty(up.shape, dtype=up.dtype, device=up.device) if d_up is None else d_up
    y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if y is None else y
    for name, tensor in (("dy", dy), ("gate", gate), ("up", up), ("d_gate", d_gate), ("d_up", d_up), ("y", y)):
        check_rows(name, tensor, gate)
    num_tokens, width = gate.shape
    swiglu_bwd_kernel[(num_tokens, triton.cdiv(width, BLOCK))](
        dy,
        gate,
        up,
        d_gate,
        d_up,
        y,
        dy.stride(0),
        gate.stride(0),
        up.stride(0),
        d_gate.stride(0),
        d_up.stride(0),
        y.stride(0),
        width,
        BF=BLOCK,
        num_warps=NUM_WARPS,
    )
    return d_gate, d_up, y


# the fastest of five on an H200 (T = 8192, F = 14336)
BLOCK = 2048
NUM_WARPS = 8
