"""Rotary position embedding, with the angles of all layers that share settings computed once per run.

ROPE(x [1, T, H, K], positions, factors): parameters 1 number of rotated numbers, 2 mode, 4 original context, 5-10
base, frequency scale, extrapolation factor, magnitude, beta fast and slow, 11-14 sections, 15 offset of the first
rotated number.
"""

import math
from dataclasses import dataclass

import torch

from pyggtrain import ops
from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering
from pyggtrain.nn import RopeSettings, YarnSettings
from pyggtrain.ops import RopeTables
from pyggtrain.ops.rope import Pairing

# ggml.h: GGML_ROPE_TYPE_NORMAL, _NEOX, _MROPE, _IMROPE.
_PAIRINGS: dict[int, Pairing] = {0: "NORM", 2: "NEOX", 8: "NEOX", 40: "NEOX"}
_INTERLEAVED = 40


@dataclass(frozen=True)
class _Angles:
    """What decides the angles besides positions and factors."""

    dimension_count: int
    mode: int
    original_context_length: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    magnitude: float
    beta_fast: float
    beta_slow: float
    sections: tuple[int, ...]

    @classmethod
    def read(cls, node: Node) -> "_Angles":
        mode, ext_factor = node.integer(2), node.number(7)
        if mode not in _PAIRINGS:
            raise UnsupportedError(
                f"{node.op} '{node.name}' rotates in ggml's mode {mode}: supported are {sorted(_PAIRINGS)}."
            )
        if ext_factor not in (0.0, 1.0):
            raise UnsupportedError(f"{node.op} '{node.name}' mixes YaRN by {ext_factor}: supported are 0 and 1.")
        freq_scale = node.number(6)
        # ggml multiplies YaRN's growth back that the context has divided out.
        growth = 1 + 0.1 * math.log(1 / freq_scale) if ext_factor else 1.0
        return cls(
            dimension_count=node.integer(1),
            mode=mode,
            original_context_length=node.integer(4),
            freq_base=node.number(5),
            freq_scale=freq_scale,
            ext_factor=ext_factor,
            magnitude=node.number(8) * growth,
            beta_fast=node.number(9),
            beta_slow=node.number(10),
            sections=tuple(node.integer(index) for index in range(11, 15)),
        )

    def tables(self, positions: torch.Tensor, factors: torch.Tensor | None, num_tokens: int) -> RopeTables:
        yarn = YarnSettings(self.original_context_length, self.beta_fast, self.beta_slow) if self.ext_factor else None
        settings = RopeSettings(
            dimension_count=self.dimension_count,
            freq_base=self.freq_base,
            pairing=_PAIRINGS[self.mode],
            freq_scale=self.freq_scale,
            yarn=yarn,
            freq_factors=None if factors is None else factors.reshape(-1)[: self.dimension_count // 2],
        )
        tables = settings.tables(positions.reshape(-1)[:num_tokens].long())
        # `settings` knows the magnitude of a file's keys; here it is the operation's own.
        correction = self.magnitude / settings.magnitude()
        cos_TP, sin_TP = tables.cos_TP * correction, tables.sin_TP * correction
        if fixed := self._pairs_without_position():
            cos_TP[:, fixed], sin_TP[:, fixed] = self.magnitude, 0.0
        return RopeTables(cos_TP, sin_TP, tables.pairing)

    def _pairs_without_position(self) -> list[int]:
        """Pairs of the fourth section, whose position is 0 in text; the other three have the token's."""
        if not any(self.sections):
            return []
        t, h, w, _ = self.sections
        total = sum(self.sections)
        places = [pair % total for pair in range(self.dimension_count // 2)]
        if self.mode == _INTERLEAVED:
            limits = {0: 3 * t, 1: 3 * h, 2: 3 * w}
            return [pair for pair, place in enumerate(places) if place >= limits[place % 3]]
        return [pair for pair, place in enumerate(places) if place >= t + h + w]


def _rope(is_inverse: bool) -> Lowering:
    def lowering(graph: Graph, node: Node) -> Kernel:
        angles = _Angles.read(node)
        first = node.integer(15)
        key = (angles, node.sources[1:])

        def kernel(
            frame: Frame, x: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None = None
        ) -> torch.Tensor:
            num_tokens = x.shape[1]
            tables = frame.rope_tables.get(key)
            if tables is None:
                tables = angles.tables(positions, factors, num_tokens)
                frame.rope_tables[key] = tables
            if is_inverse:
                tables = RopeTables(tables.cos_TP, -tables.sin_TP, tables.pairing)
            x_THK = x.squeeze(0)
            rotated = ops.rope(x_THK[..., first:], tables)
            return (torch.cat([x_THK[..., :first], rotated], -1) if first else rotated).unsqueeze(0)

        return kernel

    return lowering


LOWERINGS: dict[str, Lowering] = {"ROPE": _rope(is_inverse=False), "ROPE_BACK": _rope(is_inverse=True)}
