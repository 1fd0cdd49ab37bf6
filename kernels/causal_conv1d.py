"""Depthwise causal convolution inside documents, with SiLU and, for the first heads of a row, unit length after it.

    c_t = Σ_d w_(W-1-d) x_(t-d) over d < W with t - d in t's document,    a = c sigmoid(c),    y = a / sqrt(|a|² + eps)

The last tap meets the token itself, the history of a document is empty, and each channel is alone. |a| is that of a
head. A gated delta net takes q and k of unit length and v as it is, all from one convolution (Yang et al. 2024, figure
1), so it is one pass over memory here. Backward, with everything made again from x:

    da = dy / n - a (dy·a) / n³,  n = sqrt(|a|² + eps)        dc = da s (1 + c (1 - s)),  s = sigmoid(c)
    dx_t = Σ_d w_(W-1-d) dc_(t+d) over t + d in t's document

Backward is two passes, of which the first writes dc and the second convolves it the other way. (One pass, which makes c
again for each of the W tokens that its own reach, took twice as long on an H200.) Sums in float32; y, dc and dx are
rounded to their dtype. The weight is frozen and gets no gradient.
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.checks import check_rows

MAX_HEAD_SIZE = 256


@triton.jit
def convolved(p_x, x_stride, b_weight, o_t, b_first, o_c, m, WIDTH: tl.constexpr):
    """c [BT, BC] of tokens o_t [BT, 1], each of a document that begins at b_first."""
    b_c = tl.zeros(m.shape, tl.float32)
    for distance in tl.static_range(WIDTH):
        m_x = m & (o_t - distance >= b_first)
        b_x = tl.load(p_x + (o_t - distance).to(tl.int64) * x_stride + o_c, mask=m_x, other=0.0).to(tl.float32)
        b_c += b_x * tap(b_weight, WIDTH - 1 - distance)
    return b_c


@triton.jit
def load_taps(p_weight, first_channel, NUM_CHANNELS, WIDTH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr):
    """Weights of a block of channels, float32 [BC, BW]."""
    o_w = tl.arange(0, BW)[None, :]
    o_row = first_channel + tl.arange(0, BC)[:, None]
    m = (o_w < WIDTH) & (o_row < NUM_CHANNELS)
    return tl.load(p_weight + o_row * WIDTH + o_w, mask=m, other=0.0).to(tl.float32)


@triton.jit
def tap(b_weight, index: tl.constexpr):
    """Column `index` of the weights [BC, BW], as [1, BC]."""
    o_w = tl.arange(0, b_weight.shape[1])[None, :]
    return tl.sum(tl.where(o_w == index, b_weight, 0.0), 1)[None, :]


@triton.jit
def causal_conv1d_fwd_kernel(
    p_x,
    p_weight,
    p_first_token,
    p_y,
    x_stride,
    y_stride,
    eps,
    T,
    NUM_CHANNELS,
    NUM_NORMED,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    head = tl.program_id(1)
    o_c = head * BC + tl.arange(0, BC)[None, :]
    m = (o_t < T) & (o_c < NUM_CHANNELS)
    b_first = tl.load(p_first_token + o_t, mask=o_t < T, other=0)
    b_weight = load_taps(p_weight, head * BC, NUM_CHANNELS, WIDTH, BW, BC)
    b_y = convolved(p_x, x_stride, b_weight, o_t, b_first, o_c, m, WIDTH)
    if HAS_SILU:
        b_y = b_y * tl.sigmoid(b_y)
    if head < NUM_NORMED:
        b_y = b_y / tl.sqrt(tl.sum(b_y * b_y, 1) + eps)[:, None]
    tl.store(p_y + o_t.to(tl.int64) * y_stride + o_c, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def causal_conv1d_bwd_activation_kernel(
    p_dy,
    p_x,
    p_weight,
    p_first_token,
    p_dc,
    dy_stride,
    x_stride,
    dc_stride,
    eps,
    T,
    NUM_CHANNELS,
    NUM_NORMED,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    head = tl.program_id(1)
    o_c = head * BC + tl.arange(0, BC)[None, :]
    m = (o_t < T) & (o_c < NUM_CHANNELS)
    b_first = tl.load(p_first_token + o_t, mask=o_t < T, other=0)
    b_weight = load_taps(p_weight, head * BC, NUM_CHANNELS, WIDTH, BW, BC)
    b_c = convolved(p_x, x_stride, b_weight, o_t, b_first, o_c, m, WIDTH)
    b_d = tl.load(p_dy + o_t.to(tl.int64) * dy_stride + o_c, mask=m, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_c)
    if head < NUM_NORMED:
        b_a = b_c * b_sigmoid
        b_inverse = 1.0 / tl.sqrt(tl.sum(b_a * b_a, 1) + eps)[:, None]
        b_along = tl.sum(b_d * b_a, 1)[:, None]
        b_d = b_inverse * (b_d - b_a * (b_along * b_inverse * b_inverse))
    b_d = b_d * b_sigmoid * (1 + b_c * (1 - b_sigmoid))
    tl.store(p_dc + o_t.to(tl.int64) * dc_stride + o_c, b_d.to(p_dc.dtype.element_ty), mask=m)


@triton.jit
def causal_conv1d_bwd_kernel(
    p_dc,
    p_weight,
    p_first_token,
    p_dx,
    dc_stride,
    dx_stride,
    T,
    NUM_CHANNELS,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    first_channel = tl.program_id(1) * BC
    o_c = first_channel + tl.arange(0, BC)[None, :]
    m = (o_t < T) & (o_c < NUM_CHANNELS)
    b_weight = load_taps(p_weight, first_channel, NUM_CHANNELS, WIDTH, BW, BC)
    b_dx = tl.zeros([BT, BC], tl.float32)
    for distance in tl.static_range(WIDTH):
        o_later = o_t + distance
        b_first = tl.load(p_first_token + o_later, mask=o_later < T, other=T)
        m_later = m & (b_first <= o_t)
        b_dc = tl.load(p_dc + o_later.to(tl.int64) * dc_stride + o_c, mask=m_later, other=0.0).to(tl.float32)
        b_dx += b_dc * tap(b_weight, WIDTH - 1 - distance)
    tl.store(p_dx + o_t.to(tl.int64) * dx_stride + o_c, b_dx.to(p_dx.dtype.element_ty), mask=m)


def _check(
    x: torch.Tensor, weight: torch.Tensor, first_token: torch.Tensor, num_normed: int, head_size: int, has_silu: bool
) -> None:
    num_tokens, num_channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != num_channels or not weight.is_contiguous():
        raise ValueError(
            f"weight is {list(weight.shape)}; needed: contiguous, a row for each of {num_channels} channels."
        )
    if first_token.shape != (num_tokens,) or first_token.dtype != torch.int32:
        raise ValueError(f"first_token is {first_token.dtype} {list(first_token.shape)}; needed: int32 [{num_tokens}].")
    is_power = head_size == triton.next_power_of_2(head_size)
    if num_normed and not (
        has_silu and is_power and head_size <= MAX_HEAD_SIZE and num_normed * head_size <= num_channels
    ):
        raise ValueError(
            f"{num_normed} heads of {head_size} channels of {num_channels} to unit length, SiLU {has_silu}; "
            f"needed: SiLU, and heads of a power of two, at most {MAX_HEAD_SIZE}."
        )


def causal_conv1d_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    first_token: torch.Tensor,
    *,
    has_silu: bool,
    num_normed: int = 0,
    head_size: int = 128,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y of the equation above.

    Args:
        x: [T, C], any float dtype, columns side by side, rows any distance apart (so is out).
        weight: [C, W], contiguous.
        first_token: int32 [T], where each token's document begins.
        has_silu: whether SiLU follows.
        num_normed: so many of the first heads get unit length.
        head_size: channels of a head; matters for these only.
        eps: added to |a|².
        out: [T, C], where y goes; made if None. Not x.

    Returns:
        y [T, C].
    """
    _check(x, weight, first_token, num_normed, head_size, has_silu)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    check_rows("x", x, x)
    check_rows("out", out, x)
    causal_conv1d_fwd_kernel[_grid(x, num_normed, head_size)](
        x,
        weight,
        first_token,
        out,
        x.stride(0),
        out.stride(0),
        eps,
        *x.shape,
        num_normed,
        **_constants(weight, num_normed, head_size),
        HAS_SILU=has_silu,
    )
    return out


def causal_conv1d_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    first_token: torch.Tensor,
    *,
    has_silu: bool,
    num_normed: int = 0,
    head_size: int = 128,
    eps: float = 0.0,
    dc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of x.

    Args:
        dy: [T, C], the gradient of y. x, weight, first_token and what follows: as in forward.
        dc: [T, C], where dc goes; made if None. May be dy.
        out: [T, C], where dx goes; made if None. None of the others, except x.

    Returns:
        dx [T, C].
    """
    _check(x, weight, first_token, num_normed, head_size, has_silu)
    out, dc = (torch.empty(x.shape, dtype=x.dtype, device=x.device) if one is None else one for one in (out, dc))
    for name, tensor in (("x", x), ("dy", dy), ("dc", dc), ("out", out)):
        check_rows(name, tensor, x)
    if has_silu:
        causal_conv1d_bwd_activation_kernel[_grid(x, num_normed, head_size)](
            dy,
            x,
            weight,
            first_token,
            dc,
            dy.stride(0),
            x.stride(0),
            dc.stride(0),
            eps,
            *x.shape,
            num_normed,
            **_constants(weight, num_normed, head_size),
        )
    else:
        dc = dy
    causal_conv1d_bwd_kernel[_grid(x, 0, head_size)](
        dc,
        weight,
        first_token,
        out,
        dc.stride(0),
        out.stride(0),
        *x.shape,
        **_constants(weight, 0, head_size),
    )
    return out


def _block(num_normed: int, head_size: int) -> int:
    return head_size if num_normed else CHANNELS


def _grid(x: torch.Tensor, num_normed: int, head_size: int) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], TOKENS), triton.cdiv(x.shape[1], _block(num_normed, head_size))


def _constants(weight: torch.Tensor, num_normed: int, head_size: int) -> dict[str, int]:
    width = weight.shape[1]
    return {
        "WIDTH": width,
        "BW": triton.next_power_of_2(width),
        "BT": TOKENS,
        "BC": _block(num_normed, head_size),
    }


TOKENS = 16
CHANNELS = 128
