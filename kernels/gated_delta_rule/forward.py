"""The gated delta rule, forward. The mathematics is in the package's docstring."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.gated_delta_rule.chunks import CHUNK, Chunks
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
def delta_rule_system_kernel(
    p_k,
    p_decay,
    p_beta,
    p_first_token,
    p_system,
    k_stride_t,
    k_stride_h,
    decay_stride,
    beta_stride,
    N,
    G,
    C: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A of a chunk and value head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(p_first_token + chunk)
    end = tl.load(p_first_token + chunk + 1)
    b_gamma, b_beta, _ = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)
    b_k = load_head(p_k, first, end, head % N, k_stride_t, k_stride_h, 0, C, K)
    b_keys = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_a = b_keys * decay_of_pairs(b_gamma, C, True, False) * b_beta[:, None]
    tl.store(matrix_tile(p_system, chunk * G + head, C, False), b_a)


@triton.jit
def block_tile(p_matrix, row: tl.constexpr, column: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Pointers to block (row, column) of B x B numbers."""
    o_row = row * B + tl.arange(0, B)[:, None]
    return p_matrix + o_row * C + column * B + tl.arange(0, B)[None, :]


@triton.jit
def block_of(b_blocks, index: tl.constexpr, NB: tl.constexpr):
    """Block `index` of [NB, B, B]."""
    return tl.sum(tl.where(tl.arange(0, NB)[:, None, None] == index, b_blocks, 0.0), 0)


@triton.jit
def delta_rule_inverse_kernel(p_system, C: tl.constexpr, PRECISION: tl.constexpr):
    """X in place of A: four blocks on the diagonal by forward substitution, the others from these."""
    B: tl.constexpr = 16
    NB: tl.constexpr = 4
    p_matrix = p_system + tl.program_id(0).to(tl.int64) * (C * C)
    o_block = tl.arange(0, NB)[:, None]
    o_i = tl.arange(0, B)
    b_x = tl.where(o_i[None, :, None] == o_i[None, None, :], 1.0, tl.zeros([NB, B, B], tl.float32))
    # row i = e_i - sum over j < i of a_ij row_j
    for i in range(1, B):
        b_row = tl.load(p_matrix + (o_block * B + i) * C + o_block * B + o_i[None, :])
        b_new = tl.sum(b_row[:, :, None] * b_x, 1)
        b_x = tl.where(o_i[None, :, None] == i, b_x - b_new[:, None, :], b_x)
    b_x0 = block_of(b_x, 0, NB)
    b_x1 = block_of(b_x, 1, NB)
    b_x2 = block_of(b_x, 2, NB)
    b_x3 = block_of(b_x, 3, NB)
    b_a10 = tl.load(block_tile(p_matrix, 1, 0, C, B))
    b_a20 = tl.load(block_tile(p_matrix, 2, 0, C, B))
    b_a21 = tl.load(block_tile(p_matrix, 2, 1, C, B))
    b_a30 = tl.load(block_tile(p_matrix, 3, 0, C, B))
    b_a31 = tl.load(block_tile(p_matrix, 3, 1, C, B))
    b_a32 = tl.load(block_tile(p_matrix, 3, 2, C, B))
    # block row r of (I + A) X = I, column c: X_rc = -X_rr sum over c <= m < r of A_rm X_mc
    b_x10 = -tl.dot(b_x1, tl.dot(b_a10, b_x0, input_precision=PRECISION), input_precision=PRECISION)
    b_x21 = -tl.dot(b_x2, tl.dot(b_a21, b_x1, input_precision=PRECISION), input_precision=PRECISION)
    b_x32 = -tl.dot(b_x3, tl.dot(b_a32, b_x2, input_precision=PRECISION), input_precision=PRECISION)
    b_sum = tl.dot(b_a20, b_x0, input_precision=PRECISION)
    b_sum += tl.dot(b_a21, b_x10, input_precision=PRECISION)
    b_x20 = -tl.dot(b_x2, b_sum, input_precision=PRECISION)
    b_sum = tl.dot(b_a31, b_x1, input_precision=PRECISION)
    b_sum += tl.dot(b_a32, b_x21, input_precision=PRECISION)
    b_x31 = -tl.dot(b_x3, b_sum, input_precision=PRECISION)
    b_sum = tl.dot(b_a30, b_x0, input_precision=PRECISION)
    b_sum += tl.dot(b_a31, b_x10, input_precision=PRECISION)
    b_sum += tl.dot(b_a32, b_x20, input_precision=PRECISION)
    b_x30 = -tl.dot(b_x3, b_sum, input_precision=PRECISION)
    # all of A has been read; above the diagonal it is 0, as X is
    tl.debug_barrier()
    tl.store(block_tile(p_matrix, 0, 0, C, B), b_x0)
    tl.store(block_tile(p_matrix, 1, 1, C, B), b_x1)
    tl.store(block_tile(p_matrix, 2, 2, C, B), b_x2)
    tl.store(block_tile(p_matrix, 3, 3, C, B), b_x3)
    tl.store(block_tile(p_matrix, 1, 0, C, B), b_x10)
    tl.store(block_tile(p_matrix, 2, 0, C, B), b_x20)
    tl.store(block_tile(p_matrix, 2, 1, C, B), b_x21)
    tl.store(block_tile(p_matrix, 3, 0, C, B), b_x30)
    tl.store(block_tile(p_matrix, 3, 1, C, B), b_x31)
    tl.store(block_tile(p_matrix, 3, 2, C, B), b_x32)


@triton.jit
def delta_rule_w_u_kernel(
    p_k,
    p_v,
    p_decay,
    p_beta,
    p_first_token,
    p_inverse,
    p_w,
    p_u,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    decay_stride,
    beta_stride,
    N,
    G,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W and X (beta ∘ v) of a chunk and value head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(p_first_token + chunk)
    end = tl.load(p_first_token + chunk + 1)
    b_gamma, b_beta, _ = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)
    b_inverse = tl.load(matrix_tile(p_inverse, chunk * G + head, C, False))
    # The diagonal matrices go to the inverse's columns: k and v enter as they are.
    b_of_k = (b_inverse * (b_beta * tl.exp(b_gamma))[None, :]).to(p_k.dtype.element_ty)
    b_of_v = (b_inverse * b_beta[None, :]).to(p_v.dtype.element_ty)
    b_k = load_head(p_k, first, end, head % N, k_stride_t, k_stride_h, 0, C, K)
    store_head(p_w, tl.dot(b_of_k, b_k, input_precision=PRECISION), first, end, head, G * K, K, 0, C, K)
    for column in tl.static_range(0, V, BV):
        b_v = load_head(p_v, first, end, head, v_stride_t, v_stride_h, column, C, BV)
        b_u = tl.dot(b_of_v, b_v, input_precision=PRECISION)
        store_head(p_u, b_u, first, end, head, G * V, V, column, C, BV)


@triton.jit
def delta_rule_states_kernel(
    p_k,
    p_decay,
    p_beta,
    p_w,
    p_u,
    p_states,
    p_cu_seqlens,
    p_first_chunk,
    k_stride_t,
    k_stride_h,
    decay_stride,
    beta_stride,
    N,
    G,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state that each chunk of a document begins with, and U in place of X (beta ∘ v)."""
    column = tl.program_id(0) * BV
    head = tl.program_id(1)
    document = tl.program_id(2)
    token = tl.load(p_cu_seqlens + document)
    end = tl.load(p_cu_seqlens + document + 1)
    chunk = tl.load(p_first_chunk + document)
    b_s = tl.zeros([K, BV], tl.float32)
    for first in range(token, end, C):
        b_s_half = b_s.to(p_states.dtype.element_ty)
        tl.store(state_tile(p_states, chunk * G + head, column, K, V, BV), b_s_half)
        b_w = load_head(p_w, first, end, head, G * K, K, 0, C, K)
        b_u = load_head(p_u, first, end, head, G * V, V, column, C, BV)
        b_k = load_head(p_k, first, end, head % N, k_stride_t, k_stride_h, 0, C, K)
        b_gamma, _, last = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)
        b_u = b_u.to(tl.float32) - tl.dot(b_w, b_s_half, input_precision=PRECISION)
        store_head(p_u, b_u, first, end, head, G * V, V, column, C, BV)
        b_faded = (b_u * tl.exp(last - b_gamma)[:, None]).to(b_k.dtype)
        b_s = b_s * tl.exp(last) + tl.dot(tl.trans(b_k), b_faded, input_precision=PRECISION)
        chunk += 1


@triton.jit
def delta_rule_output_kernel(
    p_q,
    p_k,
    p_decay,
    p_beta,
    p_u,
    p_states,
    p_o,
    p_first_token,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    o_stride_t,
    o_stride_h,
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
    """O of a chunk and value head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(p_first_token + chunk)
    end = tl.load(p_first_token + chunk + 1)
    b_gamma, _, _ = chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C)
    b_q = load_head(p_q, first, end, head % N, q_stride_t, q_stride_h, 0, C, K)
    b_k = load_head(p_k, first, end, head % N, k_stride_t, k_stride_h, 0, C, K)
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * decay_of_pairs(b_gamma, C, False, False)
    b_p = b_p.to(b_q.dtype)
    for column in tl.static_range(0, V, BV):
        b_s = tl.load(state_tile(p_states, chunk * G + head, column, K, V, BV))
        b_o = tl.dot(b_q, b_s, input_precision=PRECISION) * tl.exp(b_gamma)[:, None]
        b_u = load_head(p_u, first, end, head, G * V, V, column, C, BV)
        b_o = tl.dot(b_p, b_u, b_o, input_precision=PRECISION)
        store_head(p_o, b_o * scale, first, end, head, o_stride_t, o_stride_h, column, C, BV)


@dataclass(frozen=True, eq=False)
class ChunkStates:
    """What forward makes on its way, in the inputs' dtype but for X.

    Attributes:
        inverse: X, float32 [N, G, C, C] of N chunks.
        w: W, [T, G, K].
        u: U, [T, G, V].
        states: what each chunk begins with, [N, G, K, V].
    """

    inverse: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    states: torch.Tensor


def chunk_states(
    k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, chunks: Chunks
) -> ChunkStates:
    """X, W, U and the states of all chunks. Arguments as for `gated_delta_rule_forward`."""
    num_tokens, num_key_heads, key_size = k.shape
    num_heads, value_size = v.shape[1:]
    num_chunks = chunks.num_chunks
    made = ChunkStates(
        torch.empty(num_chunks, num_heads, CHUNK, CHUNK, dtype=torch.float32, device=k.device),
        k.new_empty(num_tokens, num_heads, key_size),
        k.new_empty(num_tokens, num_heads, value_size),
        k.new_empty(num_chunks, num_heads, key_size, value_size),
    )
    strides_k, strides_v = k.stride()[:2], v.stride()[:2]
    strides_gates = (log_decay.stride(0), beta.stride(0))
    heads = (num_key_heads, num_heads)
    tile = tile_for(SYSTEM_TILE, v, key_size)
    delta_rule_system_kernel[(num_chunks, num_heads)](
        k,
        log_decay,
        beta,
        chunks.first_token,
        made.inverse,
        *strides_k,
        *strides_gates,
        *heads,
        C=CHUNK,
        K=key_size,
        PRECISION=precision(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    delta_rule_inverse_kernel[(num_chunks * num_heads,)](
        made.inverse, C=CHUNK, PRECISION=precision(), num_warps=1, num_stages=1
    )
    sizes = {"C": CHUNK, "K": key_size, "V": value_size, "PRECISION": precision()}
    tile = tile_for(W_U_TILE, v, key_size)
    delta_rule_w_u_kernel[(num_chunks, num_heads)](
        k,
        v,
        log_decay,
        beta,
        chunks.first_token,
        made.inverse,
        made.w,
        made.u,
        *strides_k,
        *strides_v,
        *strides_gates,
        *heads,
        BV=tile.values,
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    tile = tile_for(STATES_TILE, v, key_size)
    delta_rule_states_kernel[(value_size // tile.values, num_heads, chunks.num_documents)](
        k,
        log_decay,
        beta,
        made.w,
        made.u,
        made.states,
        chunks.cu_seqlens,
        chunks.first_chunk,
        *strides_k,
        *strides_gates,
        *heads,
        BV=tile.values,
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return made


def gated_delta_rule_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ChunkStates]:
    """o_t = scale S_tᵀ q_t with S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}ᵀ k_t))ᵀ.

    Args:
        q, k: [T, N, K], any float dtype, heads stored whole, tokens and heads any distance apart.
        v: [T, G, V] in q's dtype; value head h reads key head h mod N.
        log_decay: g, float32 [T, G], at most 0, heads side by side.
        beta: float32 [T, G], heads side by side.
        chunks: where documents and their chunks begin, on the device of q.
        scale: of the outputs.
        out: [T, G, V], where o goes; made if None.

    Returns:
        o [T, G, V], and what was made on the way, which `gated_delta_rule_backward` takes or makes again.
    """
    check_inputs(q, k, v, log_decay, beta, chunks)
    num_heads, value_size = v.shape[1:]
    out = v.new_empty(v.shape) if out is None else out
    check_heads("out", out, tuple(v.shape), q)
    made = chunk_states(k, v, log_decay, beta, chunks)
    tile = tile_for(OUTPUT_TILE, v, q.shape[2])
    delta_rule_output_kernel[(chunks.num_chunks, num_heads)](
        q,
        k,
        log_decay,
        beta,
        made.u,
        made.states,
        out,
        chunks.first_token,
        *q.stride()[:2],
        *k.stride()[:2],
        *out.stride()[:2],
        log_decay.stride(0),
        beta.stride(0),
        scale,
        q.shape[1],
        num_heads,
        C=CHUNK,
        K=q.shape[2],
        V=value_size,
        BV=tile.values,
        PRECISION=precision(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, made


# H200, heads of 128. The first kernel knows no values.
SYSTEM_TILE = Tile(64, 4, 1)
W_U_TILE = Tile(64, 4, 1)
STATES_TILE = Tile(64, 4, 2)
OUTPUT_TILE = Tile(64, 4, 1)
