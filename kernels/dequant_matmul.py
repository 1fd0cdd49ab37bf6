"""Products with a quantised weight for few rows, decoded on the way into the matrix units: W is never written out.

    y  = x Wᵀ      x  [T, K], W [N, K] as ggml blocks  ->  y  [T, N]
    dx = dy W      dy [T, N]                           ->  dx [T, K]

With few rows the product reads W and little else, and blocks are a third to a fourteenth of bfloat16. Decoding costs
the same for any number of rows up to a tile of them, so above some 100 rows decoding once into memory and the library's
product win (`pyggtrain.ops.product_choice` measures where). Nothing is saved for backward: dx needs only W.

Any decoder of `dequant` fits: what its lanes return is put into the order of columns without leaving registers. Weights
are rounded to x's dtype and products summed in float32, as `dequantize` and a product of the library would. Where a
weight has few tiles, the sum is split among programs (`num_parts`), and a second kernel adds the parts in a fixed
order, so that results do not depend on who finishes first.
"""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.dequant import DECODERS, check_blocks
from pyggtrain.kernels.dequant.grids import grid_on
from pyggtrain.kernels.dequant.kernel import decoder_of

DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def weight_tile(
    p_blocks,
    p_grid,
    o_n,
    first_lane,
    lanes_per_row,
    row_bytes,
    decode: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LANES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
):
    """Weights [BN, 8 RUNS LANES] of rows o_n [BN], float32. Lanes behind a row's end repeat its last one."""
    o_lane = tl.minimum(first_lane + tl.arange(0, LANES), lanes_per_row - 1)[None, :]
    p_block = p_blocks + o_n.to(tl.int64)[:, None] * row_bytes + o_lane // LANES_PER_BLOCK * BLOCK_BYTES
    o_in_block = tl.broadcast_to(o_lane % LANES_PER_BLOCK, [BN, LANES])
    runs = decode(tl.reshape(p_block, [BN * LANES]), tl.reshape(o_in_block, [BN * LANES]), p_grid)
    if RUNS == 1:
        joined = runs[0]
    elif RUNS == 2:
        joined = tl.join(runs[0], runs[1])
    else:
        joined = tl.join(tl.join(runs[0], runs[2]), tl.join(runs[1], runs[3]))
    # PARALLEL lanes lie side by side, then come their next runs (dequant/kernel.py)
    PARALLEL: tl.constexpr = RUN_STRIDE // 8
    joined = tl.reshape(joined, [BN * LANES // PARALLEL, PARALLEL, 8, RUNS])
    return tl.reshape(tl.permute(joined, 0, 3, 1, 2), [BN, LANES * 8 * RUNS])


@triton.jit(do_not_specialize=["T", "part_stride", "steps_per_part"])
def dequant_matmul_fwd_kernel(
    p_x,
    p_blocks,
    p_y,
    p_grid,
    T,
    N,
    K,
    x_stride,
    y_stride,
    part_stride,
    steps_per_part,
    decode: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LANES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
):
    BK: tl.constexpr = LANES * 8 * RUNS
    lanes_per_row = K // (8 * RUNS)
    row_bytes = lanes_per_row // LANES_PER_BLOCK * BLOCK_BYTES
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_t = tl.program_id(1) * BT + tl.arange(0, BT)
    m_t = o_t < T
    p_x_rows = p_x + o_t.to(tl.int64)[None, :] * x_stride

    b_y = tl.zeros([BN, BT], tl.float32)
    first_step = tl.program_id(2) * steps_per_part
    last_step = tl.minimum(first_step + steps_per_part, tl.cdiv(K, BK))
    for step in range(first_step, last_step):
        o_k = step * BK + tl.arange(0, BK)
        b_x = tl.load(p_x_rows + o_k[:, None], mask=(o_k < K)[:, None] & m_t[None, :], other=0.0)
        # rows behind the last repeat it; their results are not stored
        b_w = weight_tile(
            p_blocks,
            p_grid,
            tl.minimum(o_n, N - 1),
            step * LANES,
            lanes_per_row,
            row_bytes,
            decode,
            BLOCK_BYTES,
            LANES_PER_BLOCK,
            RUNS,
            RUN_STRIDE,
            BN,
            LANES,
        )
        b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y)

    p_tile = p_y + tl.program_id(2) * part_stride + o_t.to(tl.int64)[None, :] * y_stride + o_n[:, None]
    m_tile = (o_n < N)[:, None] & m_t[None, :]
    if ACCUMULATE:
        b_y += tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    tl.store(p_tile, b_y.to(p_y.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["T", "part_stride", "steps_per_part"])
def dequant_matmul_bwd_kernel(
    p_dy,
    p_blocks,
    p_dx,
    p_grid,
    T,
    N,
    K,
    dy_stride,
    dx_stride,
    part_stride,
    steps_per_part,
    decode: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LANES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    RUN_STRIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
):
    BK: tl.constexpr = LANES * 8 * RUNS
    lanes_per_row = K // (8 * RUNS)
    row_bytes = lanes_per_row // LANES_PER_BLOCK * BLOCK_BYTES
    o_t = tl.program_id(1) * BT + tl.arange(0, BT)
    m_t = o_t < T
    p_dy_rows = p_dy + o_t.to(tl.int64)[:, None] * dy_stride

    b_dx = tl.zeros([BT, BK], tl.float32)
    first_step = tl.program_id(2) * steps_per_part
    last_step = tl.minimum(first_step + steps_per_part, tl.cdiv(N, BN))
    for step in range(first_step, last_step):
        o_n = step * BN + tl.arange(0, BN)
        b_dy = tl.load(p_dy_rows + o_n[None, :], mask=m_t[:, None] & (o_n < N)[None, :], other=0.0)
        # rows behind the last repeat it; dy is 0 there
        b_w = weight_tile(
            p_blocks,
            p_grid,
            tl.minimum(o_n, N - 1),
            tl.program_id(0) * LANES,
            lanes_per_row,
            row_bytes,
            decode,
            BLOCK_BYTES,
            LANES_PER_BLOCK,
            RUNS,
            RUN_STRIDE,
            BN,
            LANES,
        )
        b_dx = tl.dot(b_dy, b_w.to(b_dy.dtype), b_dx)

    o_k = tl.program_id(0) * BK + tl.arange(0, BK)
    p_tile = p_dx + tl.program_id(2) * part_stride + o_t.to(tl.int64)[:, None] * dx_stride + o_k[None, :]
    m_tile = m_t[:, None] & (o_k < K)[None, :]
    if ACCUMULATE:
        b_dx += tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    tl.store(p_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["num_parts", "T"])
def sum_parts_kernel(p_parts, p_out, out_stride, num_parts, T, C, ACCUMULATE: tl.constexpr, BC: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_tile = p_out + o_t * out_stride + o_c
    b_sum = tl.zeros([BC], tl.float32)
    if ACCUMULATE:
        b_sum += tl.load(p_tile, mask=m_c, other=0.0).to(tl.float32)
    for part in range(num_parts):
        b_sum += tl.load(p_parts + (part * T + o_t) * C + o_c, mask=m_c, other=0.0)
    tl.store(p_tile, b_sum.to(p_out.dtype.element_ty), mask=m_c)


def dequant_matmul_forward(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    num_parts: int | None = None,
) -> torch.Tensor:
    """y = x Wᵀ, or y += x Wᵀ.

    Args:
        x: [T, K] bfloat16 or float16, columns side by side.
        blocks: uint8 [N, row_bytes] of `type`, contiguous.
        out: [T, N] of any float dtype, columns side by side; made in x's dtype if None.
        accumulate: add to what `out` holds.
        num_parts: programs that share the sum over K; None: as many as keep the card busy.

    Returns:
        `out`.

    Raises:
        UnsupportedError: no decoder for `type`.
        ValueError: a shape, dtype, stride or alignment does not fit.
    """
    num_rows, num_columns = check_blocks(blocks, type)
    _check("x", x, num_columns, blocks)
    out = x.new_empty(x.shape[0], num_rows) if out is None else out
    _check_out(out, x.shape[0], num_rows, x)
    width = FORWARD_COLUMNS
    tiles, steps = triton.cdiv(num_rows, FORWARD_ROWS), triton.cdiv(num_columns, width)
    return _launch(
        dequant_matmul_fwd_kernel, x, blocks, type, out, accumulate, num_parts, tiles, steps, FORWARD_ROWS, width
    )


def dequant_matmul_backward(
    dy: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    num_parts: int | None = None,
) -> torch.Tensor:
    """dx = dy W, or dx += dy W: the exact Jacobian of the dequantised weight.

    Args:
        dy: [T, N] bfloat16 or float16, columns side by side.
        blocks: uint8 [N, row_bytes] of `type`, contiguous.
        out: [T, K] of any float dtype, columns side by side; made in dy's dtype if None.
        accumulate: add to what `out` holds.
        num_parts: programs that share the sum over N; None: as many as keep the card busy.

    Returns:
        `out`.

    Raises:
        UnsupportedError: no decoder for `type`.
        ValueError: a shape, dtype, stride or alignment does not fit.
    """
    num_rows, num_columns = check_blocks(blocks, type)
    _check("dy", dy, num_rows, blocks)
    out = dy.new_empty(dy.shape[0], num_columns) if out is None else out
    _check_out(out, dy.shape[0], num_columns, dy)
    width = BACKWARD_COLUMNS
    tiles, steps = triton.cdiv(num_columns, width), triton.cdiv(num_rows, BACKWARD_ROWS)
    return _launch(
        dequant_matmul_bwd_kernel, dy, blocks, type, out, accumulate, num_parts, tiles, steps, BACKWARD_ROWS, width
    )


def _launch(
    kernel: "triton.runtime.jit.JITFunction",
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    out: torch.Tensor,
    accumulate: bool,
    num_parts: int | None,
    tiles: int,
    steps: int,
    tile_rows: int,
    tile_columns: int,
) -> torch.Tensor:
    """`tiles` of the weight for each tile of x, and `steps` in the sum."""
    decoder = DECODERS[type]
    if blocks.data_ptr() % decoder.alignment:
        raise ValueError(
            f"blocks of {type} start at address {blocks.data_ptr():#x}; needed: a multiple of {decoder.alignment}. "
            "Copy them to a fresh tensor."
        )
    num_tokens = x.shape[0]
    if num_tokens == 0 or tiles == 0:
        return out
    tile_tokens = min(max(triton.next_power_of_2(num_tokens), MIN_TOKENS), MAX_TOKENS)
    token_tiles = triton.cdiv(num_tokens, tile_tokens)
    if num_parts is None:
        wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * _num_processors(x.device), tiles * token_tiles)
        num_parts = max(1, min(wanted, steps // MIN_STEPS))
    steps_per_part = triton.cdiv(steps, num_parts)
    num_parts = triton.cdiv(steps, steps_per_part)
    is_split = num_parts > 1
    target = out.new_empty(num_parts, *out.shape, dtype=torch.float32) if is_split else out[None]
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] // decoder.block_bytes * decoder.block_size
    kernel[(tiles, token_tiles, num_parts)](
        x,
        blocks,
        target,
        grid_on(decoder.grid, blocks.device) if decoder.grid else blocks,
        num_tokens,
        num_rows,
        num_columns,
        x.stride(0),
        target.stride(1),
        target.stride(0) if is_split else 0,
        steps_per_part,
        decode=decoder_of(type),
        BLOCK_BYTES=decoder.block_bytes,
        LANES_PER_BLOCK=decoder.block_size // (8 * decoder.runs),
        RUNS=decoder.runs,
        RUN_STRIDE=decoder.run_stride,
        ACCUMULATE=accumulate and not is_split,
        BT=tile_tokens,
        BN=tile_rows,
        LANES=tile_columns // (8 * decoder.runs),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    if is_split:
        sum_parts_kernel[(num_tokens, triton.cdiv(out.shape[1], SUM_COLUMNS))](
            target, out, out.stride(0), num_parts, num_tokens, out.shape[1], ACCUMULATE=accumulate, BC=SUM_COLUMNS
        )
    return out


def _num_processors(device: torch.device) -> int:
    """Multiprocessors of the card; in the interpreter, as if there were one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check(name: str, x: torch.Tensor, width: int, blocks: torch.Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1 or x.dtype not in DTYPES or x.device != blocks.device:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}; needed: bfloat16 or float16 "
            f"[T, {width}] with unit column stride on {blocks.device}."
        )


def _check_out(out: torch.Tensor, num_tokens: int, width: int, x: torch.Tensor) -> None:
    if out.shape != (num_tokens, width) or out.stride(1) != 1 or out.device != x.device or not out.is_floating_point():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()} on {out.device}; "
            f"needed: floats [{num_tokens}, {width}] with unit column stride on {x.device}."
        )


# a product of the matrix units has at least 16 rows
MIN_TOKENS = 16
MAX_TOKENS = 128
FORWARD_ROWS = 64
FORWARD_COLUMNS = 128
BACKWARD_ROWS = 64
BACKWARD_COLUMNS = 128
NUM_WARPS = 4
NUM_STAGES = 2
PROGRAMS_PER_PROCESSOR = 4
MIN_STEPS = 4
SUM_COLUMNS = 1024
