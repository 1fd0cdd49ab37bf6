"""Attention, backward. The mathematics is in the package's docstring."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.attention.mask import AttentionMask, check_attention, check_heads
from pyggtrain.kernels.attention.scores import (
    FLOAT32_TILE,
    LOG2_E,
    Tile,
    block_and_head,
    key_bounds,
    last_rows_first,
    load_tile,
    num_rounds,
    precision,
    scores,
    tile_for,
)


@triton.jit
def attention_bwd_rows_kernel(
    p_o,
    p_do,
    p_rows,
    o_stride_t,
    o_stride_h,
    do_stride_t,
    do_stride_h,
    T,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """D_t = o_t . do_t"""
    h = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_tk = (o_t < T)[:, None] & (o_k < K)[None, :]
    o_t_long = o_t[:, None].to(tl.int64)
    b_o = tl.load(p_o + h * o_stride_h + o_t_long * o_stride_t + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    b_do = tl.load(p_do + h * do_stride_h + o_t_long * do_stride_t + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    tl.store(p_rows + h * T + o_t, tl.sum(b_o * b_do, 1), mask=o_t < T)


@triton.jit
def probabilities(b_z, b_lse, m_seen, IS_MASKED: tl.constexpr):
    """p from scores in units of log 2; the caller lays b_lse along the axis of queries."""
    b_p = tl.exp2(b_z - b_lse * LOG2_E)
    if IS_MASKED:
        b_p = tl.where(m_seen, b_p, 0.0)
    return b_p


@triton.jit
def score_gradient(b_z, b_dp, b_lse, b_rows, m_seen, softcap, IS_MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """p and dz; the caller lays b_rows as b_lse."""
    b_p = probabilities(b_z, b_lse, m_seen, IS_MASKED)
    b_dz = b_p * (b_dp - b_rows)
    if HAS_SOFTCAP:
        b_ratio = b_z / (softcap * LOG2_E)
        b_dz = b_dz * (1 - b_ratio * b_ratio)
    return b_p, b_dz


@triton.jit
def bwd_dq_keys(
    b_dq,
    b_q,
    b_do,
    b_lse,
    b_rows,
    p_k,
    p_v,
    k_stride_t,
    v_stride_t,
    first,
    last,
    o_t,
    b_first_key,
    T,
    softmax_scale,
    softcap,
    K: tl.constexpr,
    BK: tl.constexpr,
    BS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    o_k = tl.arange(0, BK)
    IS_CHECKED: tl.constexpr = IS_MASKED or K < BK
    for start in range(first, last, BS):
        o_s = start + tl.arange(0, BS)
        o_s_block = tl.arange(0, BS)[None, :]
        p_k_tile = p_k + tl.cast(start, tl.int64) * k_stride_t + (o_s_block * k_stride_t + o_k[:, None])
        p_v_tile = p_v + tl.cast(start, tl.int64) * v_stride_t + (o_s_block * v_stride_t + o_k[:, None])
        b_k = load_tile(p_k_tile, (o_k < K)[:, None], (o_s < T)[None, :], IS_CHECKED)
        b_v = load_tile(p_v_tile, (o_k < K)[:, None], (o_s < T)[None, :], IS_CHECKED)
        b_z = scores(b_q, b_k, softmax_scale, softcap, HAS_SOFTCAP, PRECISION)
        b_dp = tl.dot(b_do, b_v, input_precision=PRECISION)
        m_seen = (o_s[None, :] <= o_t[:, None]) & (o_s[None, :] >= b_first_key[:, None])
        _, b_dz = score_gradient(b_z, b_dp, b_lse[:, None], b_rows[:, None], m_seen, softcap, IS_MASKED, HAS_SOFTCAP)
        b_dq = tl.dot(b_dz.to(b_k.dtype), tl.trans(b_k), b_dq, input_precision=PRECISION)
    return b_dq


@triton.jit
def attention_bwd_dq_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_rows,
    p_dq,
    p_first_key,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    do_stride_t,
    do_stride_h,
    dq_stride_t,
    dq_stride_h,
    T,
    softmax_scale,
    softcap,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    IS_WRAPPED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, h = last_rows_first(BT, HEADS_FIRST)
    o_t = row + tl.arange(0, BT)
    m_t = o_t < T
    o_k = tl.arange(0, BK)
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    end = tl.minimum(row + BT, T)
    o_t_long = o_t[:, None].to(tl.int64)
    b_first_key = tl.load(p_first_key + o_t, mask=m_t, other=0)
    b_q = tl.load(p_q + h * q_stride_h + o_t_long * q_stride_t + o_k[None, :], mask=m_tk, other=0.0)
    b_do = tl.load(p_do + h * do_stride_h + o_t_long * do_stride_t + o_k[None, :], mask=m_tk, other=0.0)
    b_lse = tl.load(p_lse + h * T + o_t, mask=m_t, other=0.0)
    b_rows = tl.load(p_rows + h * T + o_t, mask=m_t, other=0.0)
    p_k += h // GROUP * k_stride_h
    p_v += h // GROUP * v_stride_h
    first, whole, diagonal = key_bounds(p_first_key, row, end, BS)
    b_dq = tl.zeros([BT, BK], tl.float32)
    for _ in range(num_rounds(end, T, IS_WRAPPED)):
        for part in tl.static_range(3):
            b_dq = bwd_dq_keys(
                b_dq,
                b_q,
                b_do,
                b_lse,
                b_rows,
                p_k,
                p_v,
                k_stride_t,
                v_stride_t,
                first if part == 0 else whole if part == 1 else diagonal,
                whole if part == 0 else diagonal if part == 1 else end,
                o_t,
                b_first_key,
                T,
                softmax_scale,
                softcap,
                K,
                BK,
                BS,
                part != 1,
                HAS_SOFTCAP,
                PRECISION,
            )
    p_dq = p_dq + h * dq_stride_h + o_t_long * dq_stride_t + o_k[None, :]
    tl.store(p_dq, (b_dq * softmax_scale).to(p_dq.dtype.element_ty), mask=m_tk)


@triton.jit
def bwd_dkv_queries(
    b_dk,
    b_dv,
    b_k,
    b_v,
    p_q,
    p_do,
    p_lse,
    p_rows,
    q_stride_t,
    do_stride_t,
    first,
    last,
    o_s,
    b_last_query,
    T,
    softmax_scale,
    softcap,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what queries first..last - 1 give to dk and dv, or to one of them; scores are kept transposed, [BS, BT]."""
    o_k = tl.arange(0, BK)
    IS_CHECKED: tl.constexpr = IS_MASKED or K < BK
    for start in range(first, last, BT):
        o_t = start + tl.arange(0, BT)
        m_t = o_t < T
        o_t_block = tl.arange(0, BT)
        p_q_tile = p_q + tl.cast(start, tl.int64) * q_stride_t + (o_t_block[None, :] * q_stride_t + o_k[:, None])
        b_q = load_tile(p_q_tile, (o_k < K)[:, None], m_t[None, :], IS_CHECKED)
        b_z = scores(b_k, b_q, softmax_scale, softcap, HAS_SOFTCAP, PRECISION)
        p_do_tile = p_do + tl.cast(start, tl.int64) * do_stride_t + (o_t_block[:, None] * do_stride_t + o_k[None, :])
        b_do = load_tile(p_do_tile, m_t[:, None], (o_k < K)[None, :], IS_CHECKED)
        if HAS_DK:
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_lse = tl.load(p_lse + o_t, mask=m_t, other=0.0)
        b_rows = tl.load(p_rows + o_t, mask=m_t, other=0.0)
        m_seen = (o_t[None, :] >= o_s[:, None]) & (o_t[None, :] <= b_last_query[:, None])
        if HAS_DK:
            b_p, b_dz = score_gradient(
                b_z, b_dp, b_lse[None, :], b_rows[None, :], m_seen, softcap, IS_MASKED, HAS_SOFTCAP
            )
        else:
            b_p = probabilities(b_z, b_lse[None, :], m_seen, IS_MASKED)
        if HAS_DV:
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        if HAS_DK:
            b_dk = tl.dot(b_dz.to(b_q.dtype), tl.trans(b_q), b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit
def attention_bwd_dkv_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_rows,
    p_dk,
    p_dv,
    p_last_query,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    do_stride_t,
    do_stride_h,
    dk_stride_t,
    dk_stride_h,
    dv_stride_t,
    dv_stride_h,
    num_parts,
    part_stride,
    T,
    softmax_scale,
    softcap,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    IS_WRAPPED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the first blocks are seen by most queries
    block, head = block_and_head(HEADS_FIRST)
    key = block * BS
    n, part_of_group = head // num_parts, head % num_parts
    o_s = key + tl.arange(0, BS)
    m_s = o_s < T
    o_k = tl.arange(0, BK)
    m_sk = m_s[:, None] & (o_k < K)[None, :]
    o_s_long = o_s[:, None].to(tl.int64)
    b_k = tl.load(p_k + n * k_stride_h + o_s_long * k_stride_t + o_k[None, :], mask=m_sk, other=0.0)
    b_v = b_k
    if HAS_DK:
        b_v = tl.load(p_v + n * v_stride_h + o_s_long * v_stride_t + o_k[None, :], mask=m_sk, other=0.0)
    b_last_query = tl.load(p_last_query + o_s, mask=m_s, other=-1)
    b_dk = tl.zeros([BS, BK], tl.float32)
    b_dv = tl.zeros([BS, BK], tl.float32)

    # every key is seen by the queries from the last key to the last query of the first key
    first = key // BT * BT
    end = tl.load(p_last_query + tl.minimum(key + BS, T) - 1) + 1
    diagonal = tl.minimum(tl.cdiv(tl.minimum(key + BS, T) - 1, BT) * BT, tl.cdiv(end, BT) * BT)
    whole = tl.maximum((tl.load(p_last_query + key) + 1) // BT * BT, diagonal)
    num_heads = GROUP // num_parts
    for g in range(num_heads * num_rounds(end, T, IS_WRAPPED)):
        h = head * num_heads + g
        for part in tl.static_range(3):
            b_dk, b_dv = bwd_dkv_queries(
                b_dk,
                b_dv,
                b_k,
                b_v,
                p_q + h * q_stride_h,
                p_do + h * do_stride_h,
                p_lse + h * T,
                p_rows + h * T,
                q_stride_t,
                do_stride_t,
                first if part == 0 else diagonal if part == 1 else whole,
                diagonal if part == 0 else whole if part == 1 else end,
                o_s,
                b_last_query,
                T,
                softmax_scale,
                softcap,
                K,
                BK,
                BT,
                HAS_DK,
                HAS_DV,
                part != 1,
                HAS_SOFTCAP,
                PRECISION,
            )

    if HAS_DK:
        p_dk = p_dk + part_of_group * part_stride + n * dk_stride_h + o_s_long * dk_stride_t + o_k[None, :]
        tl.store(p_dk, (b_dk * softmax_scale).to(p_dk.dtype.element_ty), mask=m_sk)
    if HAS_DV:
        p_dv = p_dv + part_of_group * part_stride + n * dv_stride_h + o_s_long * dv_stride_t + o_k[None, :]
        tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), mask=m_sk)


@triton.jit
def attention_bwd_sum_kernel(
    p_parts,
    p_out,
    out_stride_t,
    out_stride_h,
    T,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """A gradient from its parts [PARTS, N, T, K], in their order."""
    n = tl.program_id(1).to(tl.int64)
    o_t = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None].to(tl.int64)
    o_k = tl.arange(0, BK)[None, :]
    m_tk = (o_t < T) & (o_k < K)
    b_sum = tl.zeros([BT, BK], tl.float32)
    for part in tl.static_range(PARTS):
        b_sum += tl.load(p_parts + ((part * tl.num_programs(1) + n) * T + o_t) * K + o_k, mask=m_tk, other=0.0)
    tl.store(p_out + n * out_stride_h + o_t * out_stride_t + o_k, b_sum.to(p_out.dtype.element_ty), mask=m_tk)


@dataclass(frozen=True)
class BackwardTiles:
    """How the gradients are computed.

    Attributes:
        q: of dq.
        k: of dk, and of dv with it unless `v` is given.
        v: of dv, in a pass of its own: one more product, and only one sum in the registers.
        num_parts: in which a group of query heads is summed, before the parts are; None: as many as the card wants.
    """

    q: Tile
    k: Tile
    v: Tile | None = None
    num_parts: int | None = None

    def passes(self, dk: torch.Tensor, dv: torch.Tensor) -> list[tuple[Tile, dict[str, torch.Tensor]]]:
        """The passes over keys: each one's tile and gradients."""
        if self.v is None:
            return [(self.k, {"dk": dk, "dv": dv})]
        return [(self.k, {"dk": dk}), (self.v, {"dv": dv})]


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    tiles: BackwardTiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v.

    Args:
        do: [T, H, K]. q, k, v, o, lse, mask, softmax_scale, softcap: of the forward.
        dq, dk, dv: where the gradients go, such as parts of one matrix; made if None.
        tiles: None: of `BACKWARD_TILES`.

    Returns:
        dq [T, H, K], dk [T, N, K], dv [T, N, K].
    """
    check_attention(q, k, v, mask)
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    dq, dk, dv = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device) if given is None else given
        for given, like in ((dq, q), (dk, k), (dv, v))
    )
    for name, tensor, heads in (
        ("do", do, num_heads),
        ("o", o, num_heads),
        ("dq", dq, num_heads),
        ("dk", dk, num_kv_heads),
        ("dv", dv, num_kv_heads),
    ):
        check_heads(name, tensor, heads, q)
    if lse.shape != (num_heads, num_tokens) or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(
            f"lse is {lse.dtype} {list(lse.shape)}; needed: contiguous float32 [{num_heads}, {num_tokens}]."
        )
    tiles = tile_for(BACKWARD_TILES, q, FLOAT32_TILES) if tiles is None else tiles
    settings: dict[str, Any] = {
        "GROUP": num_heads // num_kv_heads,
        "K": head_size,
        "BK": max(16, triton.next_power_of_2(head_size)),
        "HAS_SOFTCAP": softcap is not None,
        "PRECISION": precision(q.dtype),
    }
    cap = 0.0 if softcap is None else softcap
    rows = torch.empty_like(lse)
    attention_bwd_rows_kernel[(triton.cdiv(num_tokens, 64), num_heads)](
        o, do, rows, *o.stride()[:2], *do.stride()[:2], num_tokens, K=head_size, BK=settings["BK"], BT=64
    )
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2])
    for tile, gradients in tiles.passes(dk, dv):
        num_blocks = triton.cdiv(num_tokens, tile.keys)
        num_parts = tiles.num_parts or _num_parts(tile, num_blocks * num_kv_heads, settings["GROUP"], q.device)
        # [PARTS, T, N, K] of what lies as [PARTS, N, T, K]
        parts = {
            name: gradient[None]
            if num_parts == 1
            else lse.new_empty(num_parts, num_kv_heads, num_tokens, head_size).transpose(1, 2)
            for name, gradient in gradients.items()
        }
        like = next(iter(parts.values()))
        to_dk, to_dv = parts.get("dk", like), parts.get("dv", like)
        attention_bwd_dkv_kernel[tile.grid(num_blocks, num_kv_heads * num_parts)](
            q,
            k,
            v,
            do,
            lse,
            rows,
            to_dk,
            to_dv,
            mask.last_query,
            *strides,
            *to_dk.stride()[1:3],
            *to_dv.stride()[1:3],
            num_parts,
            like.stride(0),
            num_tokens,
            softmax_scale,
            cap,
            HAS_DK="dk" in gradients,
            HAS_DV="dv" in gradients,
            **tile.settings,
            **settings,
        )
        if num_parts > 1:
            for name, gradient in gradients.items():
                attention_bwd_sum_kernel[(triton.cdiv(num_tokens, SUM_TOKENS), num_kv_heads)](
                    parts[name],
                    gradient,
                    *gradient.stride()[:2],
                    num_tokens,
                    PARTS=num_parts,
                    K=head_size,
                    BK=settings["BK"],
                    BT=SUM_TOKENS,
                )
    tile = tiles.q
    attention_bwd_dq_kernel[tile.grid(triton.cdiv(num_tokens, tile.queries), num_heads)](
        q,
        k,
        v,
        do,
        lse,
        rows,
        dq,
        mask.first_key,
        *strides,
        *dq.stride()[:2],
        num_tokens,
        softmax_scale,
        cap,
        **tile.settings,
        **settings,
    )
    return dq, dk, dv


def _num_parts(tile: Tile, num_programs: int, group: int, device: torch.device) -> int:
    """Into how many parts a group of query heads falls so that each multiprocessor has two programs and a half."""
    if not tile.heads_first or device.type != "cuda":
        return 1
    wanted = 2.5 * torch.cuda.get_device_properties(device).multi_processor_count
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    return next((parts for parts in divisors if num_programs * parts >= wanted), group)


# 64 and 128: the fastest of three to six on an H200 (4 x 2048 tokens, 32 query and 8 key heads, bfloat16);
# 256: the fastest of three to four for each kernel (1 x 2048 tokens, 16 query and 2 key heads). Two sums of 64 x 256
# fill the registers of eight warps, which do every product of 64 rows twice; four warps spill. So dk and dv are summed
# apart, 128 rows each, and dk's blocks of 32 on the other side leave room for a second stage.
BACKWARD_TILES = {
    64: BackwardTiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: BackwardTiles(Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    256: BackwardTiles(
        Tile(128, 64, 8, 1, heads_first=True, is_wrapped=True),
        Tile(32, 128, 8, 2, heads_first=True, is_wrapped=True),
        Tile(64, 128, 8, 2, heads_first=True, is_wrapped=True),
    ),
}
FLOAT32_TILES = BackwardTiles(FLOAT32_TILE, FLOAT32_TILE)
SUM_TOKENS = 8
