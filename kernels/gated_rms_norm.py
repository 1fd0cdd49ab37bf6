"""RMSNorm of each head, times the SiLU of a gate: a gated delta net's outputs (Yang et al. 2024, figure 1).

    y = weight o r ∘ z sigmoid(z),   r = 1 / sqrt(mean(o²) + eps) of a head

Backward, with s = sigmoid(z), a = z s and u = weight a dy (the weight is frozen):

    do = r u - o r³ mean(u o)          dz = weight o r dy s (1 + z (1 - s))

Sums and products in float32, one rounding at the end. The activation can be made again beside the gradients.
"""

import torch
import triton
import triton.language as tl

MAX_HEAD_SIZE = 1024


@triton.jit
def gated_rms_norm_fwd_kernel(
    p_o,
    p_z,
    p_weight,
    p_y,
    o_stride,
    z_stride,
    y_stride,
    eps,
    NUM_ROWS,
    G,
    V: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    o_v = tl.arange(0, BV)[None, :]
    m = (o_row < NUM_ROWS) & (o_v < V)
    o_t = (o_row // G).to(tl.int64)
    o_place = o_row % G * V + o_v
    b_o = tl.load(p_o + o_t * o_stride + o_place, mask=m, other=0.0).to(tl.float32)
    b_z = tl.load(p_z + o_t * z_stride + o_place, mask=m, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_r = 1.0 / tl.sqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
    b_y = b_o * b_r * b_weight * (b_z * tl.sigmoid(b_z))
    tl.store(p_y + o_t * y_stride + o_place, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def gated_rms_norm_bwd_kernel(
    p_dy,
    p_o,
    p_z,
    p_weight,
    p_do,
    p_dz,
    dy_stride,
    o_stride,
    z_stride,
    do_stride,
    dz_stride,
    eps,
    NUM_ROWS,
    G,
    V: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    o_v = tl.arange(0, BV)[None, :]
    m = (o_row < NUM_ROWS) & (o_v < V)
    o_t = (o_row // G).to(tl.int64)
    o_place = o_row % G * V + o_v
    b_dy = tl.load(p_dy + o_t * dy_stride + o_place, mask=m, other=0.0).to(tl.float32)
    b_o = tl.load(p_o + o_t * o_stride + o_place, mask=m, other=0.0).to(tl.float32)
    b_z = tl.load(p_z + o_t * z_stride + o_place, mask=m, other=0.0).to(tl.float32)
    b_dy *= tl.load(p_weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_r = 1.0 / tl.sqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
    b_sigmoid = tl.sigmoid(b_z)
    b_dz = b_dy * b_o * b_r * b_sigmoid * (1 + b_z * (1 - b_sigmoid))
    b_u = b_dy * b_z * b_sigmoid
    b_do = b_r * (b_u - b_o * (b_r * b_r / V * tl.sum(b_u * b_o, 1)[:, None]))
    tl.store(p_do + o_t * do_stride + o_place, b_do.to(p_do.dtype.element_ty), mask=m)
    tl.store(p_dz + o_t * dz_stride + o_place, b_dz.to(p_dz.dtype.element_ty), mask=m)


def _check(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    num_tokens, num_heads, head_size = like.shape
    shape = (num_tokens, num_heads, head_size)
    if tensor.shape != shape or tensor.stride()[1:] != (head_size, 1) or tensor.device != like.device:
        raise ValueError(
            f"{name} is {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"needed: {list(shape)} with heads side by side on {like.device}."
        )


def gated_rms_norm_forward(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y of the equation above.

    Args:
        o, z: [T, G, V], any float dtype, heads side by side, tokens any distance apart (so is out).
        weight: [V].
        eps: added to the mean square.
        out: [T, G, V], where y goes; made if None.

    Returns:
        y [T, G, V].
    """
    num_tokens, num_heads, head_size = o.shape
    if weight.shape != (head_size,) or head_size > MAX_HEAD_SIZE:
        raise ValueError(f"weight is {list(weight.shape)}; needed: [{head_size}], at most {MAX_HEAD_SIZE}.")
    out = torch.empty(o.shape, dtype=o.dtype, device=o.device) if out is None else out
    for name, tensor in (("o", o), ("z", z), ("out", out)):
        _check(name, tensor, o)
    num_rows = num_tokens * num_heads
    gated_rms_norm_fwd_kernel[(triton.cdiv(num_rows, ROWS),)](
        o,
        z,
        weight,
        out,
        o.stride(0),
        z.stride(0),
        out.stride(0),
        eps,
        num_rows,
        num_heads,
        V=head_size,
        BV=triton.next_power_of_2(head_size),
        BR=ROWS,
    )
    return out


def gated_rms_norm_backward(
    dy: torch.Tensor,
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    do: torch.Tensor | None = None,
    dz: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of o and z, [T, G, V].

    Args:
        dy: [T, G, V]. o, z, weight, eps: as in forward.
        do, dz: where they go; made if None. May be dy, o or z.
    """
    num_tokens, num_heads, head_size = o.shape
    do, dz = (torch.empty(o.shape, dtype=o.dtype, device=o.device) if out is None else out for out in (do, dz))
    for name, tensor in (("dy", dy), ("o", o), ("z", z), ("do", do), ("dz", dz)):
        _check(name, tensor, o)
    num_rows = num_tokens * num_heads
    gated_rms_norm_bwd_kernel[(triton.cdiv(num_rows, ROWS),)](
        dy,
        o,
        z,
        weight,
        do,
        dz,
        dy.stride(0),
        o.stride(0),
        z.stride(0),
        do.stride(0),
        dz.stride(0),
        eps,
        num_rows,
        num_heads,
        V=head_size,
        BV=triton.next_power_of_2(head_size),
        BR=ROWS,
    )
    return do, dz


ROWS = 16
