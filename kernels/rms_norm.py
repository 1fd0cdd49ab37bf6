"""RMSNorm, with the residual addition that precedes it and the residual gradient that follows it.

    s = x + residual                              [T, D], rounded to x's dtype: the stream that later layers see
    y = weight * s * inverse_rms,   inverse_rms = 1 / sqrt(mean(s^2) + eps)         (Zhang & Sennrich 2019, eq. 4)

Backward, with u = weight * dy and per row (the weight is frozen and gets no gradient):

    y_i = weight_i s_i r,  r = (mean(s^2) + eps)^(-1/2),  dr/ds_j = -r^3 s_j / D
    ds_j = r u_j - s_j r^3 / D * sum_i(u_i s_i)  + d_residual_j

Saved: s and inverse_rms (float32, [T]); y is cheaper to compute again than to keep. All sums and products in float32,
one rounding at the end, as ggml does. One program holds one row in registers, so D is at most 16384.
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.checks import check_rows

MAX_WIDTH = 16384


@triton.jit
def rms_norm_fwd_kernel(
    p_x,
    p_residual,
    p_weight,
    p_sum,
    p_y,
    p_inverse_rms,
    x_stride,
    residual_stride,
    sum_stride,
    y_stride,
    eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_s = tl.load(p_x + o_t * x_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_s += tl.load(p_residual + o_t * residual_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_rounded = b_s.to(p_sum.dtype.element_ty)
        tl.store(p_sum + o_t * sum_stride + o_d, b_rounded, mask=m_d)
        b_s = b_rounded.to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt(tl.sum(b_s * b_s, 0) / D + eps)
    tl.store(p_inverse_rms + o_t, inverse_rms)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_y + o_t * y_stride + o_d, (b_s * inverse_rms * b_weight).to(p_y.dtype.element_ty), mask=m_d)


@triton.jit
def rms_norm_bwd_kernel(
    p_dy,
    p_s,
    p_weight,
    p_inverse_rms,
    p_d_residual,
    p_ds,
    dy_stride,
    s_stride,
    d_residual_stride,
    ds_stride,
    D: tl.constexpr,
    BD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_s = tl.load(p_s + o_t * s_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_u = tl.load(p_dy + o_t * dy_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_u *= tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    r = tl.load(p_inverse_rms + o_t)
    b_ds = r * b_u - b_s * (r * r * r / D * tl.sum(b_u * b_s, 0))
    if HAS_RESIDUAL:
        b_ds += tl.load(p_d_residual + o_t * d_residual_stride + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_ds + o_t * ds_stride + o_d, b_ds.to(p_ds.dtype.element_ty), mask=m_d)


def num_warps_for(width: int) -> int:
    """16 to 32 elements a thread; more spill, fewer leave the memory idle (H200, D = 4096). A power of two."""
    return 1 << max(0, min(4, (width // 512).bit_length() - 1))


def rms_norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = weight * s / sqrt(mean(s^2) + eps) with s = x + residual.

    Args:
        x: [T, D], any float dtype, columns side by side, rows any distance apart (so are all others).
        weight: [D].
        residual: [T, D], added first if given.
        total: [T, D], where s goes; made if None. May be x or residual.
        out: [T, D], where y goes; made if None.

    Returns:
        y [T, D], s [T, D] (x itself without a residual), inverse_rms float32 [T].
    """
    num_tokens, width = x.shape
    if width > MAX_WIDTH or weight.shape != (width,):
        raise ValueError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}; "
            f"needed: one weight per column, at most {MAX_WIDTH} columns."
        )
    check_rows("x", x, x)
    if residual is None:
        total = x
    else:
        check_rows("residual", residual, x)
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if total is None else total
        check_rows("total", total, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    check_rows("out", out, x)
    inverse_rms = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    source = x if residual is None else residual
    rms_norm_fwd_kernel[(num_tokens,)](
        x,
        source,
        weight,
        total,
        out,
        inverse_rms,
        x.stride(0),
        source.stride(0),
        total.stride(0),
        out.stride(0),
        eps,
        D=width,
        BD=triton.next_power_of_2(width),
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps_for(width),
    )
    return out, total, inverse_rms


def rms_norm_backward(
    dy: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
    *,
    d_residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of s, which is that of x and of the residual alike.

    Args:
        dy: [T, D]. s, inverse_rms: what the forward returned.
        d_residual: [T, D], the gradient that reaches s by other ways, added if given. May be `out`.

    Returns:
        ds [T, D], `out` if given.
    """
    num_tokens, width = s.shape
    out = torch.empty(s.shape, dtype=s.dtype, device=s.device) if out is None else out
    source = dy if d_residual is None else d_residual
    for name, tensor in (("dy", dy), ("s", s), ("d_residual", source), ("out", out)):
        check_rows(name, tensor, s)
    rms_norm_bwd_kernel[(num_tokens,)](
        dy,
        s,
        weight,
        inverse_rms,
        source,
        out,
        dy.stride(0),
        s.stride(0),
        source.stride(0),
        out.stride(0),
        D=width,
        BD=triton.next_power_of_2(width),
        HAS_RESIDUAL=d_residual is not None,
        num_warps=num_warps_for(width),
    )
    return out
