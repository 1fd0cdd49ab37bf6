"""Rotary position embedding.

    (a, b) -> (a cos - b sin, a sin + b cos)                                             (Su et al. 2021, eq. 34)

for each pair of a head's first `num_rotary` elements; the rest passes. Which elements pair up is the file's business:
ggml's NORM pairs (2 i, 2 i + 1), its NEOX pairs (i, i + num_rotary / 2). The tables carry everything else (base,
scaling, YaRN's magnitude): cos, sin float32 [T, num_rotary / 2], one row per token, so packed documents need nothing
special.

The map is linear; backward turns by -sin. Nothing is saved but the tables. Arithmetic in float32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    p_x,
    p_y,
    p_cos,
    p_sin,
    x_stride_t,
    x_stride_h,
    y_stride_t,
    y_stride_h,
    H,
    sin_sign,
    HALF: tl.constexpr,
    BP: tl.constexpr,
    PASSED: tl.constexpr,
    BK: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BH: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    o_pair = tl.arange(0, BP)
    m_pair = o_pair < HALF
    m = (o_h < H)[:, None] & m_pair[None, :]
    b_cos = tl.load(p_cos + o_t * HALF + o_pair, mask=m_pair, other=0.0)[None, :]
    b_sin = tl.load(p_sin + o_t * HALF + o_pair, mask=m_pair, other=0.0)[None, :] * sin_sign
    p_x = p_x + o_t * x_stride_t + (o_h * x_stride_h)[:, None]
    p_y = p_y + o_t * y_stride_t + (o_h * y_stride_h)[:, None]
    if IS_NEOX:
        b_a = tl.load(p_x + o_pair[None, :], mask=m).to(tl.float32)
        b_b = tl.load(p_x + HALF + o_pair[None, :], mask=m).to(tl.float32)
        tl.store(p_y + o_pair[None, :], (b_a * b_cos - b_b * b_sin).to(p_y.dtype.element_ty), mask=m)
        tl.store(p_y + HALF + o_pair[None, :], (b_a * b_sin + b_b * b_cos).to(p_y.dtype.element_ty), mask=m)
    else:
        # both members of a pair in one load: neighbours in memory, neighbours in one thread
        o_k = tl.arange(0, 2 * BP)
        m_k = (o_h < H)[:, None] & (o_k < 2 * HALF)[None, :]
        b_x = tl.load(p_x + o_k[None, :], mask=m_k).to(tl.float32)
        b_a, b_b = tl.split(tl.reshape(b_x, (BH, BP, 2)))
        b_y = tl.join(b_a * b_cos - b_b * b_sin, b_a * b_sin + b_b * b_cos)
        tl.store(p_y + o_k[None, :], tl.reshape(b_y, (BH, 2 * BP)).to(p_y.dtype.element_ty), mask=m_k)
    if PASSED > 0:
        o_k = tl.arange(0, BK)
        m_k = (o_h < H)[:, None] & (o_k < PASSED)[None, :]
        tl.store(
            p_y + 2 * HALF + o_k[None, :],
            tl.load(p_x + 2 * HALF + o_k[None, :], mask=m_k).to(p_y.dtype.element_ty),
            mask=m_k,
        )


def launch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool, out: torch.Tensor | None, sin_sign: float
) -> torch.Tensor:
    num_tokens, num_heads, head_size = x.shape
    half = cos.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if (
        cos.shape != (num_tokens, half)
        or sin.shape != cos.shape
        or cos.dtype != torch.float32
        or sin.dtype != torch.float32
    ):
        raise ValueError(
            f"cos is {cos.dtype} {list(cos.shape)} and sin {sin.dtype} {list(sin.shape)}; "
            f"needed: float32 [{num_tokens}, num_rotary / 2] each."
        )
    if 2 * half > head_size or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            f"tables rotate {2 * half} elements of a head of {head_size}; "
            "needed: at most the head, and contiguous tables."
        )
    for name, tensor in (("x", x), ("out", out)):
        if tensor.shape != x.shape or tensor.stride(2) != 1:
            raise ValueError(
                f"{name} is {list(tensor.shape)} with strides {tensor.stride()}; "
                f"needed: {list(x.shape)} with heads stored whole."
            )
    passed = head_size - 2 * half
    rope_kernel[(num_tokens, triton.cdiv(num_heads, HEADS))](
        x,
        out,
        cos,
        sin,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        num_heads,
        sin_sign,
        HALF=half,
        BP=triton.next_power_of_2(half),
        # in place there is nothing to pass on
        PASSED=0 if out.data_ptr() == x.data_ptr() else passed,
        BK=triton.next_power_of_2(max(passed, 1)),
        IS_NEOX=is_neox,
        BH=HEADS,
        num_warps=NUM_WARPS,
    )
    return out


def rope_forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_neox: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Turn every head of every token by its position.

    Args:
        x: [T, H, K], any float dtype, heads stored whole, tokens and heads any distance apart.
        cos, sin: float32 [T, num_rotary / 2], num_rotary <= K.
        is_neox: pairs (i, i + num_rotary / 2) instead of (2 i, 2 i + 1).
        out: [T, H, K]; made if None. May be x.

    Returns:
        [T, H, K].
    """
    return launch(x, cos, sin, is_neox, out, 1.0)


def rope_backward(
    dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_neox: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of x: dy turned back. Arguments as in `rope_forward`."""
    return launch(dy, cos, sin, is_neox, out, -1.0)


# the fastest of five on an H200 (T = 8192, 40 heads of 128)
HEADS = 8
NUM_WARPS = 4
