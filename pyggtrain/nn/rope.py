"""Rotation angles, as llama.cpp computes them.

Pair i of a head turns at position p by

    θ = p base^(-2i / n) / f_i        n rotated numbers per head, f the file's frequency factors (1 without)
    θ ← s θ                           linear scaling, s = 1 / rope.scaling.factor
    θ ← s θ (1 - m_i) + θ m_i         YaRN (Peng et al. 2023, eq. 19-23), m_i from 1 (keep) to 0 (interpolate)

and cos θ, sin θ are multiplied by a magnitude. ggml (`ggml_rope_cache_init`, `rope_yarn` in ggml-cpu/ops.cpp) takes θ
from one pair to the next by a multiplication in float32. Over tens of pairs and thousands of positions that drifts away
from the formula, so that a table in better arithmetic would be a different rotation than the one served. Here every
step is rounded to float32 as it is there.
"""

import math
import struct
from dataclasses import dataclass
from typing import Protocol

import torch

from pyggtrain.nn.batch import Batch
from pyggtrain.ops.rope import Pairing, RopeTables


def _f32(value: float) -> float:
    """`value` rounded to float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class YarnSettings:
    """Where YaRN keeps, mixes and interpolates.

    Attributes:
        original_context_length: tokens the model was first trained on; decides which pairs turn often enough to be
            kept.
        beta_fast, beta_slow: full turns within that length above which a pair is kept, below which it is interpolated.
    """

    original_context_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, eq=False)
class RopeSettings:
    """Everything that decides a rotation besides the position.

    Attributes:
        dimension_count: numbers per head that are rotated, n.
        freq_base: base of the frequencies.
        pairing: "NORM" or "NEOX", see `ops.rope`.
        freq_scale: s, 1 / scaling factor.
        attn_factor: multiplies the magnitude (`rope.scaling.attn_factor`).
        yarn: None unless `rope.scaling.type` is "yarn".
        freq_factors: float32 [n / 2], divisors of the angles (`rope_freqs.weight`, or longrope's long or short
            factors), or None.
    """

    dimension_count: int
    freq_base: float
    pairing: Pairing
    freq_scale: float = 1.0
    attn_factor: float = 1.0
    yarn: YarnSettings | None = None
    freq_factors: torch.Tensor | None = None

    def magnitude(self) -> float:
        """What cos and sin are multiplied by.

        YaRN's 1 + 0.1 ln(1 / s): llama.cpp divides the context's factor by this number and lets the kernel multiply it
        back, so the steps are repeated here for their rounding.
        """
        if self.yarn is None:
            return _f32(self.attn_factor)
        factor = _f32(1.0 / self.freq_scale)
        grown = _f32(1.0 + _f32(0.1 * math.log(factor)))
        context_factor = _f32(_f32((grown if factor > 1.0 else 1.0) * _f32(1.0 / grown)) * self.attn_factor)
        return _f32(context_factor * grown)

    def _kept(self, yarn: YarnSettings) -> torch.Tensor:
        """m, float32 [n / 2]: 1 where YaRN keeps a pair's own frequency, 0 where it interpolates."""
        n, base = self.dimension_count, self.freq_base

        def pair_turning(turns: float) -> float:
            length = _f32(yarn.original_context_length / _f32(_f32(turns * 2) * _f32(math.pi)))
            return _f32(_f32(n * _f32(math.log(length))) / _f32(2 * _f32(math.log(base))))

        low = max(0, math.floor(pair_turning(yarn.beta_fast)))
        high = min(n - 1, math.ceil(pair_turning(yarn.beta_slow)))
        i = torch.arange(n // 2, dtype=torch.float32)
        return 1 - ((i - low) / max(0.001, high - low)).clamp(0, 1)

    def tables(self, positions_T: torch.Tensor) -> RopeTables:
        """cos θ and sin θ for each token.

        Args:
            positions_T: int64 [T].

        Returns:
            Tables [T, n / 2] on the device of `positions_T`, equal to ggml's to 1e-6.
        """
        num_pairs = self.dimension_count // 2
        step = _f32(math.pow(self.freq_base, _f32(-2.0 / self.dimension_count)))
        theta_PT = torch.empty(num_pairs, positions_T.shape[0], dtype=torch.float32)
        theta_PT[0] = positions_T
        for i in range(1, num_pairs):
            torch.mul(theta_PT[i - 1], step, out=theta_PT[i])
        if self.freq_factors is not None:
            theta_PT /= self.freq_factors.to(device="cpu", dtype=torch.float32).unsqueeze(1)
        scaled_PT = theta_PT * self.freq_scale
        if self.yarn is not None:
            kept_P1 = self._kept(self.yarn).unsqueeze(1)
            # The compiled kernel fuses the first product with the sum (fused multiply-add): only the second is rounded
            # by itself. float64 holds the product of two float32 exactly.
            kept_part_PT = theta_PT * kept_P1
            scaled_PT = (scaled_PT.double() * (1 - kept_P1) + kept_part_PT).float()
        theta_TP = scaled_PT.t().to(positions_T.device, torch.float64)
        magnitude = self.magnitude()
        return RopeTables(
            cos_TP=theta_TP.cos().float().mul_(magnitude).contiguous(),
            sin_TP=theta_TP.sin().float().mul_(magnitude).contiguous(),
            pairing=self.pairing,
        )


class Rotation(Protocol):
    """What decides a rotation besides the position."""

    def tables(self, positions_T: torch.Tensor) -> RopeTables:
        """See `RopeSettings.tables`."""
        ...


class RopeTableCache:
    """The tables of positions 0, 1, 2, ... made once on the host, kept where the model computes, and grown on demand.

    Args:
        settings: of the rotation.
    """

    def __init__(self, settings: Rotation) -> None:
        self.settings = settings
        # All that were made: a CUDA graph may go on reading one that has been outgrown. Together they are less than
        # twice the last.
        self._tables: list[RopeTables] = []

    def tables(self, batch: Batch) -> RopeTables:
        """cos θ and sin θ for each token of a batch, [T, n / 2]; the same numbers as `settings.tables`."""
        longest, device = batch.longest_document, batch.tokens_T.device
        known = self._tables[-1] if self._tables else None
        if known is None or known.cos_TP.shape[0] < longest or known.cos_TP.device != device:
            positions = torch.arange(1 << (longest - 1).bit_length())
            made = self.settings.tables(positions)
            known = RopeTables(made.cos_TP.to(device), made.sin_TP.to(device), made.pairing)
            self._tables.append(known)
        if batch.num_documents == 1:
            return RopeTables(known.cos_TP[:longest], known.sin_TP[:longest], known.pairing)
        cos_TP, sin_TP = (table.index_select(0, batch.positions_T) for table in (known.cos_TP, known.sin_TP))
        return RopeTables(cos_TP, sin_TP, known.pairing)
