"""The gated unit of experts, and its backward with the router's weight w of a slot as a factor of all that follows.

    a = x p (y + offset)     p = sigmoid(alpha x)
    x = gate and y = up, or with a limit L  x = min(gate, L), y = clamp(up, -L, L)

With alpha 1 and offset 0 it is SwiGLU; gpt-oss has alpha 1.702, offset 1 and a limit, deepseek4 a limit.

The chosen experts of a token add up with weights, out[t] = Σ_j w[t, j] (W_down a[s] + b). What comes back through
W_down is the same for any weight, so it is multiplied here, where it costs nothing:

    da       = W_downᵀ dout[t]
    dw       = a · da  (+ b · dout[t])                   (so W_down a itself is never needed again)
    d_gate   = w da (y + offset) p (1 + alpha x (1 - p))       0 beyond the limit
    d_up     = w da x p                                        0 beyond the limit
    w a      read by the gradient of down's pair

Rows lie in the order of the places; w and dw in the order of the router. Arithmetic in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.checks import check_rows
from pyggtrain.kernels.moe_routing import Routing


@dataclass(frozen=True)
class Glu:
    """Which unit: see above.

    Attributes:
        alpha, offset: numbers of the equation.
        limit: L; None: there is none.
    """

    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None


SWIGLU = Glu()


@triton.jit
def gated(b_gate, b_up, alpha, limit, HAS_LIMIT: tl.constexpr):
    """x, y and p."""
    if HAS_LIMIT:
        b_gate = tl.minimum(b_gate, limit)
        b_up = tl.minimum(tl.maximum(b_up, -limit), limit)
    return b_gate, b_up, tl.sigmoid(alpha * b_gate)


@triton.jit
def expert_swiglu_fwd_kernel(
    p_gate,
    p_up,
    p_a,
    gate_stride,
    up_stride,
    a_stride,
    F,
    alpha,
    offset,
    limit,
    HAS_LIMIT: tl.constexpr,
    BF: tl.constexpr,
):
    o_s = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BF + tl.arange(0, BF)
    m_f = o_f < F
    b_gate = tl.load(p_gate + o_s * gate_stride + o_f, mask=m_f).to(tl.float32)
    b_up = tl.load(p_up + o_s * up_stride + o_f, mask=m_f).to(tl.float32)
    b_x, b_y, b_p = gated(b_gate, b_up, alpha, limit, HAS_LIMIT)
    tl.store(p_a + o_s * a_stride + o_f, (b_x * b_p * (b_y + offset)).to(p_a.dtype.element_ty), mask=m_f)


@triton.jit
def expert_swiglu_bwd_kernel(
    p_da,
    p_gate,
    p_up,
    p_slot,
    p_probs,
    p_d_gate,
    p_d_up,
    p_weighted,
    p_d_probs,
    p_bounds,
    first_expert,
    end_expert,
    da_stride,
    gate_stride,
    up_stride,
    d_gate_stride,
    d_up_stride,
    weighted_stride,
    F,
    alpha,
    offset,
    limit,
    HAS_LIMIT: tl.constexpr,
    BF: tl.constexpr,
):
    o_s = tl.program_id(0).to(tl.int64)
    if (o_s < tl.load(p_bounds + first_expert)) | (o_s >= tl.load(p_bounds + end_expert)):
        return
    slot = tl.load(p_slot + o_s)
    weight = tl.load(p_probs + slot).to(tl.float32)
    d_weight = 0.0
    for first in range(0, F, BF):
        o_f = first + tl.arange(0, BF)
        m_f = o_f < F
        b_da = tl.load(p_da + o_s * da_stride + o_f, mask=m_f, other=0.0).to(tl.float32)
        b_gate = tl.load(p_gate + o_s * gate_stride + o_f, mask=m_f, other=0.0).to(tl.float32)
        b_up = tl.load(p_up + o_s * up_stride + o_f, mask=m_f, other=0.0).to(tl.float32)
        b_x, b_y, b_p = gated(b_gate, b_up, alpha, limit, HAS_LIMIT)
        b_y += offset
        b_a = b_x * b_p * b_y
        d_weight += tl.sum(b_a * b_da, 0)
        b_da *= weight
        b_d_gate = b_da * b_y * b_p * (1.0 + alpha * b_x * (1.0 - b_p))
        b_d_up = b_da * b_x * b_p
        if HAS_LIMIT:
            b_d_gate = tl.where(b_gate <= limit, b_d_gate, 0.0)
            b_d_up = tl.where((b_up <= limit) & (b_up >= -limit), b_d_up, 0.0)
        tl.store(p_d_gate + o_s * d_gate_stride + o_f, b_d_gate.to(p_d_gate.dtype.element_ty), mask=m_f)
        tl.store(p_d_up + o_s * d_up_stride + o_f, b_d_up.to(p_d_up.dtype.element_ty), mask=m_f)
        tl.store(p_weighted + o_s * weighted_stride + o_f, (weight * b_a).to(p_weighted.dtype.element_ty), mask=m_f)
    tl.store(p_d_probs + slot, d_weight)


def _sizes(glu: Glu, width: int) -> dict[str, float | bool]:
    return {
        "F": width,
        "alpha": glu.alpha,
        "offset": glu.offset,
        "limit": glu.limit or 0.0,
        "HAS_LIMIT": glu.limit is not None,
        "BF": min(BLOCK, triton.next_power_of_2(width)),
        "num_warps": NUM_WARPS,
    }


def expert_swiglu_forward(
    gate: torch.Tensor, up: torch.Tensor, *, glu: Glu = SWIGLU, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a = x p (y + offset).

    Args:
        gate, up: [S, F], any float dtype, rows any distance apart.
        out: [S, F], where a goes; made if None.

    Returns:
        a [S, F].
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if out is None else out
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        check_rows(name, tensor, gate)
    if gate.numel() == 0:
        return out
    sizes = _sizes(glu, gate.shape[1])
    expert_swiglu_fwd_kernel[(gate.shape[0], triton.cdiv(gate.shape[1], int(sizes["BF"])))](
        gate, up, out, gate.stride(0), up.stride(0), out.stride(0), **sizes
    )
    return out


def expert_swiglu_backward(
    da: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    routing: Routing,
    probs: torch.Tensor,
    *,
    glu: Glu = SWIGLU,
    d_gate: torch.Tensor,
    d_up: torch.Tensor,
    weighted: torch.Tensor,
    d_probs: torch.Tensor | None = None,
    experts: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Write d_gate, d_up and w a; return dw without the bias's share.

    Args:
        da, gate, up: [S, F] in the order of the places.
        probs: w, [T, J], contiguous, any float dtype.
        d_gate, d_up, weighted: [S, F], where the results go. They may be gate, up and da: every element is read before
            it is written.
        d_probs: float32 [T, J], where dw goes; made if None.
        experts: only the rows of experts from the first number up to the second, and their dw; None: all.

    Returns:
        dw, float32 [T, J].
    """
    for name, tensor in (("gate", gate), ("up", up), ("d_gate", d_gate), ("d_up", d_up), ("weighted", weighted)):
        check_rows(name, tensor, da)
    if da.shape[0] != routing.num_slots or probs.numel() != routing.num_slots or not probs.is_contiguous():
        raise ValueError(
            f"da is {list(da.shape)} and probs {list(probs.shape)}; needed: a row and a contiguous weight for each of "
            f"{routing.num_slots} slots."
        )
    d_probs = torch.empty(probs.shape, dtype=torch.float32, device=probs.device) if d_probs is None else d_probs
    if routing.num_slots == 0:
        return d_probs
    expert_swiglu_bwd_kernel[(routing.num_slots,)](
        da,
        gate,
        up,
        routing.slot,
        probs,
        d_gate,
        d_up,
        weighted,
        d_probs,
        routing.bounds,
        *(experts or (0, routing.num_experts)),
        da.stride(0),
        gate.stride(0),
        up.stride(0),
        d_gate.stride(0),
        d_up.stride(0),
        weighted.stride(0),
        **_sizes(glu, da.shape[1]),
    )
    return d_probs


BLOCK = 1024
NUM_WARPS = 4
