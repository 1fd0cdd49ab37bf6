"""Device functions and tile sizes that forward and backward share."""

from dataclasses import dataclass
from typing import TypeVar

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# below any score, and finite: rows that have not seen a key yet must not turn into NaN
NOTHING = tl.constexpr(-1e30)


@triton.jit
def block_and_head(HEADS_FIRST: tl.constexpr):
    """What a program is for. Programs start in the order of their first number."""
    if HEADS_FIRST:
        return tl.program_id(1), tl.program_id(0).to(tl.int64)
    else:
        return tl.program_id(0), tl.program_id(1).to(tl.int64)


@triton.jit
def last_rows_first(BT: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """The first row and the head of a program: the last blocks see most keys, so they start first."""
    block, h = block_and_head(HEADS_FIRST)
    num_blocks = tl.num_programs(1) if HEADS_FIRST else tl.num_programs(0)
    return (num_blocks - 1 - block) * BT, h


@triton.jit
def num_rounds(end, T, IS_WRAPPED: tl.constexpr):
    """One; if IS_WRAPPED, in a way that the compiler does not see through (0 < end <= T)."""
    if IS_WRAPPED:
        return tl.cdiv(end, T)
    else:
        return 1


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
    """How a kernel goes over a head.

    Attributes:
        queries, keys: of a block.
        num_warps, num_stages: warps of a program, and stages of the pipeline that loads the next block.
        heads_first: a block's programs for all heads start one after the other, then those of the next block: where
            programs are few, the longest must not start last. Else a head's blocks follow each other.
        is_wrapped: the loops over blocks lie in one more, of one round. Where the first of them starts from sums that
            are known to be 0, ptxas has each product of the matrix units wait for the one before (its C7515).
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    heads_first: bool = False
    is_wrapped: bool = False

    @property
    def settings(self) -> dict[str, int | bool]:
        """A kernel's constants and the compiler's options."""
        return {
            "BT": self.queries,
            "BS": self.keys,
            "HEADS_FIRST": self.heads_first,
            "IS_WRAPPED": self.is_wrapped,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def grid(self, num_blocks: int, num_heads: int) -> tuple[int, int]:
        return (num_heads, num_blocks) if self.heads_first else (num_blocks, num_heads)


# A tile, or several.
_Tile = TypeVar("_Tile")
# Products of float32 are unrolled into single multiplications: a larger tile takes minutes to compile.
FLOAT32_TILE = Tile(16, 16, 4, 1)


def tile_for(tiles: dict[int, _Tile], q: torch.Tensor, float32: _Tile) -> _Tile:
    """The tile of q's dtype and head size; `tiles` are by head size rounded up to a power of two, at least 64."""
    return float32 if q.dtype == torch.float32 else tiles[triton.next_power_of_2(max(q.shape[2], 64))]


def precision(dtype: torch.dtype) -> str:
    """float32 inputs are multiplied as such and not rounded to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"
