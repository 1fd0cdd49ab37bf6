"""Device functions and tile sizes that forward and backward share."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# below any score, and finite: rows that have not seen a key yet must not turn into NaN
NOTHING = tl.constexpr(-1e30)


@triton.jit
def load_tile(p_tile, m_rows, m_columns, IS_CHECKED: tl.constexpr):
    """A tile whose pointers are already laid out; checks cost registers, so whole tiles go without."""
    if IS_CHECKED:
        return tl.load(p_tile, mask=m_rows & m_columns, other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def scores(b_q, b_k, softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """z [BT, BS] of b_q [BT, BK] and b_k [BK, BS], in units of log 2."""
    b_z = tl.dot(b_q, b_k, input_precision=PRECISION) * softmax_scale
    if HAS_SOFTCAP:
        # tanh x = 2 sigmoid(2 x) - 1
        b_z = softcap * (2 * tl.sigmoid(2 * b_z / softcap) - 1)
    return b_z * LOG2_E


@triton.jit
def key_bounds(p_first_key, row, end, BS: tl.constexpr):
    """For queries row..end - 1, where blocks of keys start to be seen, to be seen whole, and to reach the diagonal.

    All multiples of BS: keys from `first` are seen by some query, keys from `whole` to `diagonal` by every query.
    """
    first = tl.load(p_first_key + row) // BS * BS
    whole = tl.minimum(tl.cdiv(tl.load(p_first_key + end - 1), BS), tl.cdiv(end, BS)) * BS
    diagonal = tl.maximum((row + 1) // BS * BS, whole)
    return first, whole, diagonal


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a block, warps, and stages of the pipeline that loads the next one."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# Products of float32 are unrolled into single multiplications: a larger tile takes minutes to compile.
FLOAT32_TILE = Tile(16, 16, 4, 1)


def tile_for(tiles: dict[int, Tile], q: torch.Tensor) -> Tile:
    """The tile of q's dtype and head size; `tiles` are by head size rounded up to a power of two, at least 64."""
    return FLOAT32_TILE if q.dtype == torch.float32 else tiles[triton.next_power_of_2(max(q.shape[2], 64))]


def precision(dtype: torch.dtype) -> str:
    """float32 inputs are multiplied as such and not rounded to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"
