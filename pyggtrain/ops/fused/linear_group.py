"""Linears that read one input, and their low-rank pairs, as one extended weight E (`kernels/lora.py`).

    y = [x | s x Aᵀ] E[:N]ᵀ        dx = [dy | dy B] E[:, :K]        dA = s (dy B)ᵀ x        dB_i = dy_iᵀ (s_i x A_iᵀ)

x and dy live in buffers with P more columns than they need, where the low-rank products go.

With 8-bit floats (`kernels/fp8`) both factors of each big product are rounded row by row, the low-rank columns with
them; the thin products, and with them all gradients of pairs, read unrounded numbers. A result of such a product has no
free columns, so where dy takes the place of one, dy B lies beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from pyggtrain.ops.dequantize import FLOAT_TYPES

Pair = tuple[torch.Tensor, torch.Tensor] | None
"""lora_a [R, K] and lora_b [N, R] of a linear, or None."""

# Rows of an extended weight begin at 128-byte borders with it.
_PADDING = 64


@dataclass(frozen=True, eq=False)
class LinearGroup:
    """Frozen weights of one to three linears with a common input of K numbers.

    Attributes:
        blocks: of each, uint8 [N_i, row_bytes].
        types: ggml's name of each one's type.
        row_counts: N_i.
        num_columns: K.
        scales: alpha / r of each one's pair; any number for a linear without.
        is_fp8: whether big products are of 8-bit floats.
    """

    blocks: tuple[torch.Tensor, ...]
    types: tuple[str, ...]
    row_counts: tuple[int, ...]
    num_columns: int
    scales: tuple[float, ...]
    is_fp8: bool = False

    @property
    def num_rows(self) -> int:
        """N, of all together."""
        return sum(self.row_counts)


class ExtendedWeight:
    """The decoded weights of a group with its pairs around them.

    Args:
        group: the weights.
        pairs: of each linear; trained masters of any float dtype.
        dtype: of the products.
    """

    def __init__(self, group: LinearGroup, pairs: Sequence[Pair], dtype: torch.dtype) -> None:
        self.group = group
        self._dy_b: torch.Tensor | None = None
        self.ranks = [0 if pair is None else pair[0].shape[0] for pair in pairs]
        self.num_ranks = sum(self.ranks)
        self.padding = padding_of(self.num_ranks)
        num_rows, width = group.num_rows, group.num_columns
        self.values = torch.empty(
            num_rows + self.padding, width + self.padding, dtype=dtype, device=group.blocks[0].device
        )
        first = 0
        for blocks, type, count in zip(group.blocks, group.types, group.row_counts, strict=True):
            _decode(blocks, type, self.values[first : first + count, :width])
            first += count
        if self.padding:
            from pyggtrain.kernels.lora import lora_extend_

            scaled = [None if pair is None else (*pair, scale) for pair, scale in zip(pairs, group.scales, strict=True)]
            lora_extend_(self.values, scaled, row_counts=group.row_counts)

    def input_buffer(self, num_tokens: int) -> torch.Tensor:
        """Uninitialised [T, K + P]: x goes into the first K columns, `fill_low_rank` does the rest."""
        return self.values.new_empty(num_tokens, self.group.num_columns + self.padding)

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor, *, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """norm(x) in the first K columns of an input buffer, and 1 / rms of each token, float32 [T]."""
        from pyggtrain.kernels.rms_norm import rms_norm_forward

        buffer = self.input_buffer(x.shape[0])
        _, _, inverse_rms = rms_norm_forward(x, norm_weight, eps=eps, out=buffer[:, : x.shape[1]])
        return buffer, inverse_rms

    def output_buffer(self, num_tokens: int) -> torch.Tensor:
        """Uninitialised [T, N + P]: dy goes into the first N columns, `backward` does the rest."""
        return self.values.new_empty(num_tokens, self.group.num_rows + self.padding)

    def result_buffer(self, num_tokens: int) -> torch.Tensor:
        """A buffer for a result that dy replaces later: [T, N + P], or [T, N] with 8-bit floats."""
        return (
            self.values.new_empty(num_tokens, self.group.num_rows)
            if self.group.is_fp8
            else self.output_buffer(num_tokens)
        )

    def fill_low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """s x Aᵀ into the columns of the buffer x [T, K + P] behind its first K; returns a copy [T, P] to keep."""
        width = self.group.num_columns
        if self.padding:
            torch.mm(x[:, :width], self.values[self.group.num_rows :, :width].t(), out=x[:, width:])
        return _copied(x[:, width:])

    def forward(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """y [T, N] from the buffer x [T, K + P], low-rank columns filled."""
        if self.group.is_fp8:
            return self._fp8_forward(x, self.values[: self.group.num_rows], out=out)
        rows = self.values[: self.group.num_rows].t()
        return torch.mm(x, rows) if out is None else torch.mm(x, rows, out=out)

    def add_forward(self, residual: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """residual + y [T, N]. x is a buffer [T, K + P], or [T, K] for y without the low-rank part."""
        weight = self.values[: self.group.num_rows, : x.shape[1]]
        if self.group.is_fp8:
            return torch.add(residual, self._fp8_forward(x, weight), out=out)
        return torch.addmm(residual, x, weight.t(), out=out)

    def add_backward_(self, dx: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """dx += dy W, without the low-rank part."""
        weight = self.values[: self.group.num_rows, : self.group.num_columns]
        return dx.add_(self._fp8_backward(dy, weight)) if self.group.is_fp8 else dx.addmm_(dy, weight)

    def backward(self, dy: torch.Tensor) -> torch.Tensor:
        """Fill the columns of the buffer dy [T, N + P] behind its first N, and return dx [T, K].

        dy B is a thin product that reads all of dy. Where dy is much wider than x it comes out of the big product
        instead, as P more columns, and its share of dx is added afterwards.
        """
        from pyggtrain.kernels.columns import copy_columns_

        num_rows, width = self.group.num_rows, self.group.num_columns
        if not self.padding:
            return self._fp8_backward(dy, self.values) if self.group.is_fp8 else torch.mm(dy, self.values)
        if dy.shape[1] == num_rows:
            self._dy_b = torch.mm(dy, self.values[:num_rows, width:])
            return self._fp8_backward(dy, self.values[:num_rows, :width]).addmm_(
                self._dy_b, self.values[num_rows:, :width]
            )
        if self.group.is_fp8:
            torch.mm(dy[:, :num_rows], self.values[:num_rows, width:], out=dy[:, num_rows:])
            return self._fp8_backward(dy, self.values[:, :width])
        if num_rows < 3 * width:
            torch.mm(dy[:, :num_rows], self.values[:num_rows, width:], out=dy[:, num_rows:])
            return torch.mm(dy, self.values[:, :width])
        both = torch.mm(dy[:, :num_rows], self.values[:num_rows])
        copy_columns_(dy[:, num_rows:], both[:, width:])
        return both[:, :width].addmm_(both[:, width:], self.values[num_rows:, :width])

    def pair_gradients(self, dy: torch.Tensor, x: torch.Tensor, low_rank: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of lora_a and lora_b of each linear in turn, float32; None for one without a pair.

        Args:
            dy: [T, N + P] after `backward`.
            x: [T, K].
            low_rank: [T, P], what `fill_low_rank` returned.
        """
        from pyggtrain.kernels.lora import mm_float32

        num_rows = self.group.num_rows
        if not self.padding:
            return [None, None] * len(self.ranks)
        dy_b = dy[:, num_rows:] if self._dy_b is None else self._dy_b
        d_lora_a = self._scaled(mm_float32(dy_b[:, : self.num_ranks].t(), x))
        self._dy_b = None
        gradients: list[torch.Tensor | None] = []
        column = row = 0
        for rank, count in zip(self.ranks, self.group.row_counts, strict=True):
            if rank:
                d_lora_b = mm_float32(dy[:, row : row + count].t(), low_rank[:, column : column + rank])
                gradients += [d_lora_a[column : column + rank], d_lora_b]
            else:
                gradients += [None, None]
            column, row = column + rank, row + count
        return gradients

    def _fp8_forward(self, x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        from pyggtrain.kernels import fp8

        return fp8.product(fp8.quantize_rows(x), fp8.quantize_rows(weight), out=out)

    def _fp8_backward(self, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from pyggtrain.kernels import fp8

        return fp8.product(fp8.quantize_rows(dy), fp8.quantize_columns(weight))

    def _scaled(self, d_lora_a: torch.Tensor) -> torch.Tensor:
        """The rows of each pair times its scale, in place."""
        scales = {scale for rank, scale in zip(self.ranks, self.group.scales, strict=True) if rank}
        if len(scales) == 1:
            (scale,) = scales
            return d_lora_a if scale == 1.0 else d_lora_a.mul_(scale)
        for part, scale in zip(torch.split(d_lora_a, self.ranks), self.group.scales, strict=True):
            part.mul_(scale)
        return d_lora_a


def padding_of(num_ranks: int) -> int:
    """Columns beside a weight for pairs of so many ranks together: a power of two, 0 for none."""
    return 0 if num_ranks == 0 else max(_PADDING, 1 << (num_ranks - 1).bit_length())


def add_gradients(
    total: list[torch.Tensor | None] | None, part: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Sum of what several parts of the tokens give; `total` is changed."""
    if total is None:
        return part
    return [None if a is None or b is None else a.add_(b) for a, b in zip(total, part, strict=True)]


def pairs_of(lora: Sequence[torch.Tensor | None]) -> list[Pair]:
    """lora_a, lora_b, lora_a, ... as pairs."""
    return [None if a is None or b is None else (a, b) for a, b in zip(lora[::2], lora[1::2], strict=True)]


def heads_of(x: torch.Tensor, counts: Sequence[int], width: int) -> list[torch.Tensor]:
    """Parts of the rows x [T, at least (Σ counts) width] as [T, count, width] views."""
    starts = accumulate(counts, initial=0)
    return [
        x[:, start * width : (start + count) * width].view(-1, count, width)
        for start, count in zip(starts, counts, strict=False)
    ]


def _copied(x: torch.Tensor) -> torch.Tensor:
    from pyggtrain.kernels.columns import copy_columns_

    return copy_columns_(x.new_empty(x.shape), x)


def _decode(blocks: torch.Tensor, type: str, out: torch.Tensor) -> None:
    if type in FLOAT_TYPES:
        out.copy_(blocks.view(FLOAT_TYPES[type]))
        return
    from pyggtrain.kernels.dequant import dequantize

    dequantize(blocks, type, out=out)
