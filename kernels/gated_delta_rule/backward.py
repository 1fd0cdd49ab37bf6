"""The gated delta rule, backward. The mathematics is in the package's docstring."""

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.gated_delta_rule.chunks import CHUNK, Chunks
from pyggtrain.kernels.gated_delta_rule.forward import ChunkStates, chunk_states
from pyggtrain.kernels.gated_delta_rule.tiles import (
    Tile,
    check_heads,
    check_inputs,
    chunk_decay,
    decay_of_pairs,
    load_head,
    matrix_tile,
    precision,
    state_tile,
    store_head,
    tile_for,
)


@triton.jit
def delta_rule_du_kernel(
    p_q,
    p_k,
    p_decay,
    p_beta,
    p_do,
    p_du,
    p_first_token,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    do_stride_t,
    do_stride_h,
    decay_stride,
    beta_stride,
    scale,
    N,
    G,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a chunk's own outputs give to dU: scale Pᵀ dO."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(p_first_token + chunk)
    end = tl.load(p_first_token + chunk + 1)
    b_gamma, _, _ = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)
    b_q = load_head(p_q, first, end, head % N, q_stride_t, q_stride_h, 0, C, K)
    b_k = load_head(p_k, first, end, head % N, k_stride_t, k_stride_h, 0, C, K)
    b_p = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * decay_of_pairs(b_gamma, C, False, True) * scale
    b_p = b_p.to(b_q.dtype)
    for column in tl.static_range(0, V, BV):
        b_do = load_head(p_do, first, end, head, do_stride_t, do_stride_h, column, C, BV)
        b_du = tl.dot(b_p, b_do, input_precision=PRECISION)
        store_head(p_du, b_du, first, end, head, G * V, V, column, C, BV)


@triton.jit
def delta_rule_d_states_kernel(
    p_q,
    p_k,
    p_decay,
    p_beta,
    p_w,
    p_do,
    p_du,
    p_d_states,
    p_cu_seqlens,
    p_first_chunk,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    do_stride_t,
    do_stride_h,
    decay_stride,
    beta_stride,
    scale,
    N,
    G,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of the state that each chunk ends with, and what it gives to dU, added to what is there."""
    column = tl.program_id(0) * BV
    head = tl.program_id(1)
    document = tl.program_id(2)
    token = tl.load(p_cu_seqlens + document)
    end = tl.load(p_cu_seqlens + document + 1)
    chunk = tl.load(p_first_chunk + document + 1) - 1
    num_chunks = tl.cdiv(end - token, C)
    b_z = tl.zeros([K, BV], tl.float32)
    for index in range(num_chunks):
        first = token + (num_chunks - 1 - index) * C
        b_z_half = b_z.to(p_d_states.dtype.element_ty)
        tl.store(state_tile(p_d_states, chunk * G + head, column, K, V, BV), b_z_half)
        b_k = load_head(p_k, first, end, head % N, k_stride_t, k_stride_h, 0, C, K)
        b_q = load_head(p_q, first, end, head % N, q_stride_t, q_stride_h, 0, C, K)
        b_w = load_head(p_w, first, end, head, G * K, K, 0, C, K)
        b_do = load_head(p_do, first, end, head, do_stride_t, do_stride_h, column, C, BV)
        b_du = load_head(p_du, first, end, head, G * V, V, column, C, BV).to(tl.float32)
        b_gamma, _, last = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)
        b_du += tl.dot(b_k, b_z_half, input_precision=PRECISION) * tl.exp(last - b_gamma)[:, None]
        store_head(p_du, b_du, first, end, head, G * V, V, column, C, BV)
        b_faded = (b_do.to(tl.float32) * (tl.exp(b_gamma) * scale)[:, None]).to(b_q.dtype)
        b_z = b_z * tl.exp(last) + tl.dot(tl.trans(b_q), b_faded, input_precision=PRECISION)
        b_z -= tl.dot(tl.trans(b_w), b_du.to(b_w.dtype), input_precision=PRECISION)
        chunk -= 1


@triton.jit
def delta_rule_dv_kernel(
    p_v,
    p_decay,
    p_beta,
    p_inverse,
    p_du,
    p_dv,
    p_d_beta,
    p_first_token,
    v_stride_t,
    v_stride_h,
    dv_stride_t,
    dv_stride_h,
    decay_stride,
    beta_stride,
    G,
    C: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dR of a chunk and value head in place of dU, dv, and dR·v for dbeta."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(p_first_token + chunk)
    end = tl.load(p_first_token + chunk + 1)
    o_c = tl.arange(0, C)
    _, b_beta, _ = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)
    b_inverse = tl.load(matrix_tile(p_inverse, chunk * G + head, C, True)).to(p_v.dtype.element_ty)
    b_d_beta = tl.zeros([C], tl.float32)
    for column in tl.static_range(0, V, BV):
        b_du = load_head(p_du, first, end, head, G * V, V, column, C, BV)
        b_v = load_head(p_v, first, end, head, v_stride_t, v_stride_h, column, C, BV)
        b_dr = tl.dot(b_inverse, b_du, input_precision=PRECISION)
        store_head(p_du, b_dr, first, end, head, G * V, V, column, C, BV)
        store_head(p_dv, b_dr * b_beta[:, None], first, end, head, dv_stride_t, dv_stride_h, column, C, BV)
        b_d_beta += tl.sum(b_dr * b_v.to(tl.float32), 1)
    tl.store(p_d_beta + (first + o_c).to(tl.int64) * G + head, b_d_beta, mask=first + o_c < end)


@triton.jit
def delta_rule_dqk_kernel(
    p_q,
    p_k,
    p_decay,
    p_beta,
    p_u,
    p_states,
    p_do,
    p_dr,
    p_d_states,
    p_dq,
    p_dk,
    p_d_decay,
    p_d_beta,
    p_first_token,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    do_stride_t,
    do_stride_h,
    decay_stride,
    beta_stride,
    scale,
    N,
    G,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq and dk of a chunk and value head (of this head alone), dg, and the rest of dbeta."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(p_first_token + chunk)
    end = tl.load(p_first_token + chunk + 1)
    o_c = tl.arange(0, C)
    o_gate = (first + o_c).to(tl.int64) * G + head
    m_t = first + o_c < end
    b_gamma, b_beta, last = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)

    # what goes through the states
    b_do_s = tl.zeros([C, K], tl.float32)
    b_dr_s = tl.zeros([C, K], tl.float32)
    b_u_z = tl.zeros([C, K], tl.float32)
    b_z_s = tl.zeros([K], tl.float32)
    for column in range(0, V, BV):
        b_s = tl.load(state_tile(p_states, chunk * G + head, column, K, V, BV))
        b_z = tl.load(state_tile(p_d_states, chunk * G + head, column, K, V, BV))
        b_do = load_head(p_do, first, end, head, do_stride_t, do_stride_h, column, C, BV)
        b_dr = load_head(p_dr, first, end, head, G * V, V, column, C, BV)
        b_u = load_head(p_u, first, end, head, G * V, V, column, C, BV)
        b_z_s += tl.sum(b_z.to(tl.float32) * b_s.to(tl.float32), 1)
        b_do_s = tl.dot(b_do, tl.trans(b_s), b_do_s, input_precision=PRECISION)
        b_dr_s = tl.dot(b_dr, tl.trans(b_s), b_dr_s, input_precision=PRECISION)
        b_u_z = tl.dot(b_u, tl.trans(b_z), b_u_z, input_precision=PRECISION)
    b_q = load_head(p_q, first, end, head % N, q_stride_t, q_stride_h, 0, C, K)
    b_k = load_head(p_k, first, end, head % N, k_stride_t, k_stride_h, 0, C, K)
    b_k_float = b_k.to(tl.float32)
    b_grown = tl.exp(b_gamma)
    # what each term gives to gamma: the term times its gradient
    b_dq = b_do_s * (b_grown * scale)[:, None]
    b_d_gamma = tl.sum(b_dq * b_q.to(tl.float32), 1)
    b_seen = tl.sum(b_dr_s * b_k_float, 1) * b_grown
    b_d_beta = tl.load(p_d_beta + o_gate, mask=m_t, other=0.0) - b_seen
    b_d_gamma -= b_seen * b_beta
    b_u_z *= tl.exp(last - b_gamma)[:, None]
    b_given = tl.sum(b_u_z * b_k_float, 1)
    b_d_gamma -= b_given
    d_last = tl.sum(b_given, 0) + tl.exp(last) * tl.sum(b_z_s, 0)
    b_dk = b_u_z - b_dr_s * (b_beta * b_grown)[:, None]

    # what goes from token to token inside the chunk. Both ways round are summed: see `tiles.NARROW_TILE`.
    b_dp = tl.zeros([C, C], tl.float32)
    b_dp_t = tl.zeros([C, C], tl.float32)
    b_da = tl.zeros([C, C], tl.float32)
    b_da_t = tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        b_do = load_head(p_do, first, end, head, do_stride_t, do_stride_h, column, C, BV)
        b_dr = load_head(p_dr, first, end, head, G * V, V, column, C, BV)
        b_u = load_head(p_u, first, end, head, G * V, V, column, C, BV)
        b_dp = tl.dot(b_do, tl.trans(b_u), b_dp, input_precision=PRECISION)
        b_dp_t = tl.dot(b_u, tl.trans(b_do), b_dp_t, input_precision=PRECISION)
        b_da = tl.dot(b_dr, tl.trans(b_u), b_da, input_precision=PRECISION)
        b_da_t = tl.dot(b_u, tl.trans(b_dr), b_da_t, input_precision=PRECISION)
    b_dp = b_dp * decay_of_pairs(b_gamma, C, False, False) * scale
    b_term = b_dp * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_d_gamma += tl.sum(b_term, 1) - tl.sum(b_term, 0)
    b_dp_t = b_dp_t * decay_of_pairs(b_gamma, C, False, True) * scale
    b_dq = tl.dot(b_dp.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    b_dk = tl.dot(b_dp_t.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    b_da = -b_da * decay_of_pairs(b_gamma, C, True, False)
    b_term = b_da * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_d_beta += tl.sum(b_term, 1)
    b_term *= b_beta[:, None]
    b_d_gamma += tl.sum(b_term, 1) - tl.sum(b_term, 0)
    b_both = b_da * b_beta[:, None] - b_da_t * decay_of_pairs(b_gamma, C, True, True) * b_beta[None, :]
    b_dk = tl.dot(b_both.to(b_k.dtype), b_k, b_dk, input_precision=PRECISION)

    store_head(p_dq, b_dq, first, end, head, G * K, K, 0, C, K)
    store_head(p_dk, b_dk, first, end, head, G * K, K, 0, C, K)
    tl.store(p_d_decay + o_gate, tl.cumsum(b_d_gamma, 0, reverse=True) + d_last, mask=m_t)
    tl.store(p_d_beta + o_gate, b_d_beta, mask=m_t)


def gated_delta_rule_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    made: ChunkStates | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, log_decay and beta.

    Args:
        do: [T, G, V], the gradient of o. q, k, v, log_decay, beta, chunks, scale: as in forward.
        made: what forward made; made again if None.
        out: where dq, dk and dv go; made if None.

    Returns:
        dq and dk [T, N, K], dv [T, G, V], d_log_decay and d_beta float32 [T, G].
    """
    check_inputs(q, k, v, log_decay, beta, chunks)
    check_heads("do", do, tuple(v.shape), q)
    num_tokens, num_key_heads, key_size = q.shape
    num_heads, value_size = v.shape[1:]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v)) if out is None else out
    for name, gradient, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        check_heads(name, gradient, tuple(like.shape), q)
    made = chunk_states(k, v, log_decay, beta, chunks) if made is None else made
    sizes = {"C": CHUNK, "K": key_size, "V": value_size, "PRECISION": precision()}
    strides_qk = (*q.stride()[:2], *k.stride()[:2])
    strides_do = do.stride()[:2]
    strides_gates = (log_decay.stride(0), beta.stride(0))
    heads = (num_key_heads, num_heads)

    du = v.new_empty(v.shape)
    tile = tile_for(DU_TILE, v, key_size)
    delta_rule_du_kernel[(chunks.num_chunks, num_heads)](
        q,
        k,
        log_decay,
        beta,
        do,
        du,
        chunks.first_token,
        *strides_qk,
        *strides_do,
        *strides_gates,
        scale,
        *heads,
        BV=tile.values,
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    d_states = torch.empty_like(made.states)
    tile = tile_for(D_STATES_TILE, v, key_size)
    delta_rule_d_states_kernel[(value_size // tile.values, num_heads, chunks.num_documents)](
        q,
        k,
        log_decay,
        beta,
        made.w,
        do,
        du,
        d_states,
        chunks.cu_seqlens,
        chunks.first_chunk,
        *strides_qk,
        *strides_do,
        *strides_gates,
        scale,
        *heads,
        BV=tile.values,
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    d_log_decay, d_beta = (log_decay.new_empty(num_tokens, num_heads) for _ in range(2))
    tile = tile_for(DV_TILE, v, key_size)
    delta_rule_dv_kernel[(chunks.num_chunks, num_heads)](
        v,
        log_decay,
        beta,
        made.inverse,
        du,
        dv,
        d_beta,
        chunks.first_token,
        *v.stride()[:2],
        *dv.stride()[:2],
        *strides_gates,
        num_heads,
        C=CHUNK,
        V=value_size,
        BV=tile.values,
        PRECISION=precision(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    # Of each value head; those that read one key head are added afterwards.
    dq_heads, dk_heads = (q.new_empty(num_tokens, num_heads, key_size) for _ in range(2))
    tile = tile_for(DQK_TILE, v, key_size)
    delta_rule_dqk_kernel[(chunks.num_chunks, num_heads)](
        q,
        k,
        log_decay,
        beta,
        made.u,
        made.states,
        do,
        du,
        d_states,
        dq_heads,
        dk_heads,
        d_log_decay,
        d_beta,
        chunks.first_token,
        *strides_qk,
        *strides_do,
        *strides_gates,
        scale,
        *heads,
        BV=tile.values,
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    for total, of_heads in ((dq, dq_heads), (dk, dk_heads)):
        torch.sum(of_heads.view(num_tokens, -1, num_key_heads, key_size), 1, out=total)
    return dq, dk, dv, d_log_decay, d_beta


# H200, heads of 128.
DU_TILE = Tile(64, 4, 1)
D_STATES_TILE = Tile(64, 4, 2)
DV_TILE = Tile(64, 4, 1)
DQK_TILE = Tile(64, 8, 2)
