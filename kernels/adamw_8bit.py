"""AdamW whose moments are 8-bit codes: one pass over parameter, gradient and moments.

Loshchilov and Hutter 2019 (1711.05101) with the moments of Dettmers et al. 2022 (2110.02861):

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g²
    p = (1 - lr decay) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

A moment is a code of 8 bits for an entry of a sorted table of 256 numbers in [-1, 1], times its block's scale, the
largest magnitude among the block's 256 numbers. The entry nearest to a number stands for it, the lower one of two that
are as near. Moments may be float32 too, as those of small tensors are.

Gradients may have to be divided by a number that only the device knows yet, and the step to be left out if something
was not finite: so a step is launched before the host has heard of the gradients' norm.

The layout is bitsandbytes', which makes tables and first states. Its own GPU kernel runs on the default stream alone,
and an update that runs beside the next step needs another.
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.checks import check_contiguous

BLOCK = 256
_BLOCKS_OF_PROGRAM = 4


@triton.jit
def nearest_codes(b_x, p_table):
    """The code of the table's entry that is nearest to each of b_x, all in [-1, 1]."""
    b_low = tl.zeros(b_x.shape, dtype=tl.int32)
    b_high = tl.full(b_x.shape, 255, dtype=tl.int32)
    for _ in tl.static_range(8):
        b_middle = (b_low + b_high) // 2
        m_above = b_x > tl.load(p_table + b_middle)
        b_low = tl.where(m_above, b_middle, b_low)
        b_high = tl.where(m_above, b_high, b_middle)
    m_low = tl.abs(b_x - tl.load(p_table + b_low)) <= tl.abs(b_x - tl.load(p_table + b_high))
    return tl.where(m_low, b_low, b_high)


@triton.jit
def load_moment(p_moment, p_table, p_scale, o, o_block, m, m_block, IS_CODED: tl.constexpr):
    if not IS_CODED:
        return tl.load(p_moment + o, mask=m, other=0.0)
    b_code = tl.load(p_moment + o, mask=m, other=0).to(tl.int32)
    return tl.load(p_table + b_code) * tl.load(p_scale + o_block, mask=m_block, other=0.0)


@triton.jit
def store_moment(p_moment, p_table, p_scale, o, o_block, m, m_block, b_moment, IS_CODED: tl.constexpr):
    if IS_CODED:
        b_scale = tl.max(tl.where(m, tl.abs(b_moment), 0.0), 1)[:, None]
        # A block of zeros has the table's zero for all.
        b_code = nearest_codes(tl.div_rn(b_moment, tl.where(b_scale > 0.0, b_scale, 1.0)), p_table)
        tl.store(p_scale + o_block, b_scale, mask=m_block)
        tl.store(p_moment + o, b_code.to(tl.uint8), mask=m)
    else:
        tl.store(p_moment + o, b_moment, mask=m)


@triton.jit
def adamw_8bit_kernel(
    p_parameter,
    p_gradient,
    p_m,
    p_v,
    p_table_m,
    p_table_v,
    p_scale_m,
    p_scale_v,
    p_divisor,
    p_left_out,
    size,
    step_size,
    shrink,
    beta1,
    beta2,
    root_correction2,
    eps,
    IS_CODED: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    MAY_BE_LEFT_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # The outer one is decided when compiling.
    if MAY_BE_LEFT_OUT:  # noqa: SIM102
        if tl.load(p_left_out) != 0.0:
            return
    o_block = (tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    o = o_block * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_block, m = o_block * BLOCK < size, o < size
    b_gradient = tl.load(p_gradient + o, mask=m, other=0.0)
    if HAS_DIVISOR:
        b_gradient = b_gradient / tl.load(p_divisor)
    b_m = load_moment(p_m, p_table_m, p_scale_m, o, o_block, m, m_block, IS_CODED)
    b_v = load_moment(p_v, p_table_v, p_scale_v, o, o_block, m, m_block, IS_CODED)
    b_m = beta1 * b_m + (1.0 - beta1) * b_gradient
    b_v = beta2 * b_v + (1.0 - beta2) * b_gradient * b_gradient
    b_change = tl.div_rn(b_m, tl.div_rn(tl.sqrt_rn(b_v), root_correction2) + eps)
    b_parameter = tl.load(p_parameter + o, mask=m, other=0.0) * shrink - step_size * b_change
    tl.store(p_parameter + o, b_parameter, mask=m)
    store_moment(p_m, p_table_m, p_scale_m, o, o_block, m, m_block, b_m, IS_CODED)
    store_moment(p_v, p_table_v, p_scale_v, o, o_block, m, m_block, b_v, IS_CODED)


def adamw_8bit(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    divisor: torch.Tensor | None = None,
    left_out: torch.Tensor | None = None,
) -> None:
    """Take one step, in place, on the current stream.

    Args:
        parameter, gradient: float32, contiguous, of one shape.
        m, v: of that shape: uint8 codes, or float32 where `tables` and `scales` are None.
        tables: of m and of v, float32 [256], sorted.
        scales: of m and of v, float32 [ceil(numbers / 256)].
        step: t, from 1 on.
        lr, betas, eps, weight_decay: see above.
        divisor: of gradients, float32 scalar; None: 1.
        left_out: float32 scalar; the step is taken only if it is 0. None: it is taken.
    """
    is_coded = tables is not None and scales is not None
    dtype = torch.uint8 if is_coded else torch.float32
    size = parameter.numel()
    for name, tensor, wanted in (
        ("parameter", parameter, torch.float32),
        ("gradient", gradient, torch.float32),
        ("m", m, dtype),
        ("v", v, dtype),
    ):
        check_contiguous(name, tensor)
        if tensor.numel() != size or tensor.dtype != wanted:
            raise ValueError(f"{name} holds {tensor.numel()} {tensor.dtype}; needed: {size} {wanted}.")
    num_blocks = triton.cdiv(size, BLOCK)
    for table, scale in zip(tables or (), scales or (), strict=True):
        if table.numel() != 256 or scale.numel() != num_blocks:
            raise ValueError(
                f"a table of {table.numel()} numbers and {scale.numel()} scales; needed: 256 and {num_blocks}."
            )
    table_m, table_v = tables or (parameter, parameter)
    scale_m, scale_v = scales or (parameter, parameter)
    beta1, beta2 = betas
    adamw_8bit_kernel[(triton.cdiv(num_blocks, _BLOCKS_OF_PROGRAM),)](
        parameter,
        gradient,
        m,
        v,
        table_m,
        table_v,
        scale_m,
        scale_v,
        p_divisor=parameter if divisor is None else divisor,
        p_left_out=parameter if left_out is None else left_out,
        size=size,
        step_size=lr / (1 - beta1**step),
        shrink=1 - lr * weight_decay,
        beta1=beta1,
        beta2=beta2,
        root_correction2=(1 - beta2**step) ** 0.5,
        eps=eps,
        IS_CODED=is_coded,
        HAS_DIVISOR=divisor is not None,
        MAY_BE_LEFT_OUT=left_out is not None,
        BLOCK=BLOCK,
        BLOCKS=_BLOCKS_OF_PROGRAM,
        num_warps=4,
    )
