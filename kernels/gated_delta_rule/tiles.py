"""Device functions that forward and backward share, tile sizes, and preconditions."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from pyggtrain.kernels.gated_delta_rule.chunks import CHUNK, Chunks

HEAD_SIZES = (16, 32, 64, 128)


@triton.jit
def chunk_decay(p_decay, p_beta, first, end, head, decay_stride, beta_stride, C: tl.constexpr):
    """gamma, beta and the chunk's whole decay; 0 behind the chunk's end, which keeps gamma as it is there."""
    o_c = tl.arange(0, C)
    o_t = (first + o_c).to(tl.int64)
    m_t = first + o_c < end
    b_g = tl.load(p_decay + o_t * decay_stride + head, mask=m_t, other=0.0)
    b_beta = tl.load(p_beta + o_t * beta_stride + head, mask=m_t, other=0.0)
    return tl.cumsum(b_g, 0), b_beta, tl.sum(b_g, 0)


@triton.jit
def decay_of_pairs(b_gamma, C: tl.constexpr, IS_STRICT: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """D [t, s], 0 for later s (with IS_STRICT also for s = t); [s, t] with IS_TRANSPOSED."""
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    if IS_TRANSPOSED:
        b_difference = b_gamma[None, :] - b_gamma[:, None]
        m_seen = o_column > o_row if IS_STRICT else o_column >= o_row
    else:
        b_difference = b_gamma[:, None] - b_gamma[None, :]
        m_seen = o_row > o_column if IS_STRICT else o_row >= o_column
    return tl.where(m_seen, tl.exp(tl.where(m_seen, b_difference, 0.0)), 0.0)


@triton.jit
def load_head(p_x, first, end, head, stride_t, stride_h, column, C: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first..end - 1 of a head, columns `column`.. of them: [C, WIDTH], 0 behind the end."""
    o_c = tl.arange(0, C)[:, None]
    p_tile = p_x + (first + o_c).to(tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h + column
    return tl.load(p_tile + tl.arange(0, WIDTH)[None, :], mask=first + o_c < end, other=0.0)


@triton.jit
def store_head(p_x, b_x, first, end, head, stride_t, stride_h, column, C: tl.constexpr, WIDTH: tl.constexpr):
    """The reverse of `load_head`."""
    o_c = tl.arange(0, C)[:, None]
    p_tile = p_x + (first + o_c).to(tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h + column
    tl.store(p_tile + tl.arange(0, WIDTH)[None, :], b_x.to(p_x.dtype.element_ty), mask=first + o_c < end)


@triton.jit
def state_tile(p_states, index, column, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Pointers to columns of state `index`, [K, BV]."""
    o_k = tl.arange(0, K)[:, None]
    return p_states + tl.cast(index, tl.int64) * (K * V) + o_k * V + column + tl.arange(0, BV)[None, :]


@triton.jit
def matrix_tile(p_matrices, index, C: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """Pointers to matrix `index` of [C, C], or to its transpose."""
    o_row = tl.arange(0, C)[:, None]
    o_column = tl.arange(0, C)[None, :]
    p_tile = p_matrices + tl.cast(index, tl.int64) * (C * C)
    return p_tile + (o_column * C + o_row if IS_TRANSPOSED else o_row * C + o_column)


@dataclass(frozen=True)
class Tile:
    """Columns of the values that a program takes at a time, warps, and stages of the pipeline."""

    values: int
    num_warps: int
    num_stages: int


# Triton 3.4 to 3.7 compiles some products of four warps on Hopper into reads beyond shared memory or wrong numbers:
# some with a side below 64, of float32, or of the transpose of something computed (fla-org/flash-linear-attention #640
# and #984, triton-lang/triton #11366; all seen here with 3.6). Two warps take other instructions. So no tile of four
# warps is narrower than 64, even where 32 columns passed every check and were faster.
NARROW_TILE = Tile(32, 2, 1)


def tile_for(tile: Tile, v: torch.Tensor, key_size: int) -> Tile:
    """`tile`, which is for half precision and heads of at least 64 numbers, or what is safe for all others."""
    value_size = v.shape[2]
    tile = tile if v.dtype.itemsize == 2 and min(key_size, value_size) >= 64 else NARROW_TILE
    return Tile(min(tile.values, value_size), tile.num_warps, tile.num_stages)


def precision() -> str:
    """Of products of float32: three of tf32 are as exact, and tensor cores take them. (Others ignore it.)"""
    return "ieee" if torch.version.hip is not None else "tf32x3"


def check_heads(name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Require a shape, and heads stored whole; tokens and heads may lie any distance apart."""
    if tensor.shape != shape or tensor.stride(2) != 1 or tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"needed: {like.dtype} {list(shape)} with heads stored whole, on {like.device}."
        )


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, chunks: Chunks
) -> None:
    """Raise ValueError for what the kernels do not take."""
    num_tokens, num_key_heads, key_size = q.shape
    num_heads, value_size = v.shape[1:]
    if key_size not in HEAD_SIZES or value_size not in HEAD_SIZES or num_heads % num_key_heads:
        raise ValueError(
            f"q has {num_key_heads} heads of {key_size} numbers, v {num_heads} of {value_size}; "
            f"needed: value heads a multiple of key heads, and sizes of {HEAD_SIZES}."
        )
    check_heads("q", q, tuple(q.shape), q)
    check_heads("k", k, tuple(q.shape), q)
    check_heads("v", v, (num_tokens, num_heads, value_size), q)
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        if gate.shape != (num_tokens, num_heads) or gate.dtype != torch.float32 or gate.stride(1) != 1:
            raise ValueError(
                f"{name} is {gate.dtype} {list(gate.shape)} with strides {gate.stride()}; "
                f"needed: float32 [{num_tokens}, {num_heads}] with heads side by side."
            )
    if chunks.first_token.device != q.device:
        raise ValueError(f"chunks are on {chunks.first_token.device}; needed: {q.device}.")


def empty_like_values(v: torch.Tensor, width: int) -> torch.Tensor:
    """Uninitialised [T, G, width], contiguous."""
    return v.new_empty(v.shape[0], v.shape[1], width)


__all__ = [
    "CHUNK",
    "Chunks",
    "Tile",
    "check_heads",
    "check_inputs",
    "chunk_decay",
    "decay_of_pairs",
    "empty_like_values",
    "load_head",
    "matrix_tile",
    "precision",
    "state_tile",
    "store_head",
    "tile_for",
]
