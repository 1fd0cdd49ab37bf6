"""Attention, forward. The mathematics is in the package's docstring."""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.attention.mask import AttentionMask, check_attention, check_heads
from pyggtrain.kernels.attention.scores import (
    FLOAT32_TILE,
    LOG2_E,
    NOTHING,
    Tile,
    key_bounds,
    last_rows_first,
    load_tile,
    num_rounds,
    precision,
    scores,
    tile_for,
)


@triton.jit
def fwd_keys(
    b_o,
    b_max,
    b_sum,
    b_q,
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
    """Attend to keys first..last - 1, both multiples of BS."""
    o_k = tl.arange(0, BK)
    IS_CHECKED: tl.constexpr = IS_MASKED or K < BK
    for start in range(first, last, BS):
        o_s = start + tl.arange(0, BS)
        o_s_block = tl.arange(0, BS)
        p_k_tile = p_k + tl.cast(start, tl.int64) * k_stride_t + (o_s_block[None, :] * k_stride_t + o_k[:, None])
        b_k = load_tile(p_k_tile, (o_k < K)[:, None], (o_s < T)[None, :], IS_CHECKED)
        b_z = scores(b_q, b_k, softmax_scale, softcap, HAS_SOFTCAP, PRECISION)
        if IS_MASKED:
            m_seen = (o_s[None, :] <= o_t[:, None]) & (o_s[None, :] >= b_first_key[:, None])
            b_z = tl.where(m_seen, b_z, NOTHING)
        b_new = tl.maximum(b_max, tl.max(b_z, 1))
        b_p = tl.exp2(b_z - b_new[:, None])
        if IS_MASKED:
            b_p = tl.where(m_seen, b_p, 0.0)
        b_shrink = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_max = b_new
        p_v_tile = p_v + tl.cast(start, tl.int64) * v_stride_t + (o_s_block[:, None] * v_stride_t + o_k[None, :])
        b_v = load_tile(p_v_tile, (o_s < T)[:, None], (o_k < K)[None, :], IS_CHECKED)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_shrink[:, None], input_precision=PRECISION)
    return b_o, b_max, b_sum


@triton.jit
def attention_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_lse,
    p_first_key,
    p_sinks,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    o_stride_t,
    o_stride_h,
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
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, h = last_rows_first(BT, HEADS_FIRST)
    o_t = row + tl.arange(0, BT)
    m_t = o_t < T
    o_k = tl.arange(0, BK)
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    end = tl.minimum(row + BT, T)
    b_first_key = tl.load(p_first_key + o_t, mask=m_t, other=0)
    b_q = tl.load(p_q + h * q_stride_h + o_t[:, None].to(tl.int64) * q_stride_t + o_k[None, :], mask=m_tk, other=0.0)
    p_k += h // GROUP * k_stride_h
    p_v += h // GROUP * v_stride_h
    if HAS_SINKS:
        b_max = tl.zeros([BT], tl.float32) + tl.load(p_sinks + h).to(tl.float32) * LOG2_E
        b_sum = tl.full([BT], 1.0, tl.float32)
    else:
        b_max = tl.full([BT], NOTHING, tl.float32)
        b_sum = tl.zeros([BT], tl.float32)
    b_o = tl.zeros([BT, BK], tl.float32)

    first, whole, diagonal = key_bounds(p_first_key, row, end, BS)
    for _ in range(num_rounds(end, T, IS_WRAPPED)):
        for part in tl.static_range(3):
            b_o, b_max, b_sum = fwd_keys(
                b_o,
                b_max,
                b_sum,
                b_q,
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

    p_o = p_o + h * o_stride_h + o_t[:, None].to(tl.int64) * o_stride_t + o_k[None, :]
    tl.store(p_o, (b_o / b_sum[:, None]).to(p_o.dtype.element_ty), mask=m_tk)
    tl.store(p_lse + h * T + o_t, (b_max + tl.log2(b_sum)) / LOG2_E, mask=m_t)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o_t = sum_s softmax_s(z_ts) v_s over the keys that the mask lets t see.

    Args:
        q: [T, H, K], any float dtype, heads stored whole (so are all others), K <= 256.
        k, v: [T, N, K] with N dividing H; query head h uses head h N // H.
        softmax_scale: factor on q . k, usually K^-1/2.
        softcap: c of z = c tanh(z / c), applied after the scale.
        sinks: [H], one more logit per head that takes part in the sum and has no value.
        out: [T, H, K], where o goes; made if None.
        tile: None: of `FORWARD_TILES`.

    Returns:
        o [T, H, K], lse float32 [H, T] (natural logarithm, sink included).
    """
    check_attention(q, k, v, mask)
    num_tokens, num_heads, head_size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_heads("out", out, num_heads, q)
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks are {list(sinks.shape)}; needed: contiguous [{num_heads}].")
    lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q.device)
    tile = tile_for(FORWARD_TILES, q, FLOAT32_TILE) if tile is None else tile
    attention_fwd_kernel[tile.grid(triton.cdiv(num_tokens, tile.queries), num_heads)](
        q,
        k,
        v,
        out,
        lse,
        mask.first_key,
        q if sinks is None else sinks,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        num_tokens,
        softmax_scale,
        0.0 if softcap is None else softcap,
        GROUP=num_heads // k.shape[1],
        K=head_size,
        BK=max(16, triton.next_power_of_2(head_size)),
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=precision(q.dtype),
        **tile.settings,
    )
    return out, lse


# 64 and 128: the fastest of three and five on an H200 (4 x 2048 tokens, 32 query and 8 key heads, bfloat16);
# 256: the fastest of four there (16 query and 2 key heads; eight warps do products of 64 rows twice)
FORWARD_TILES = {
    64: Tile(128, 64, 4, 3),
    128: Tile(64, 64, 4, 3),
    256: Tile(128, 64, 8, 2, heads_first=True, is_wrapped=True),
}
