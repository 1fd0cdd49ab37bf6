"""Rotary position embedding, with the angles of all layers that share settings computed once per run.

ROPE(x [1, T, H, K], positions, factors): parameters 1 number of rotated numbers, 2 mode, 4 original context, 5-10
base, frequency scale, extrapolation factor, magnitude, beta fast and slow, 11-14 sections, 15 offset of the first
rotated number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pyggtrain import ops
from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering
from pyggtrain.nn import RopeSettings, RopeTableCache, YarnSettings
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

    def settings(self, factors: torch.Tensor | None) -> RopeSettings:
        yarn = YarnSettings(self.original_context_length, self.beta_fast, self.beta_slow) if self.ext_factor else None
        return RopeSettings(
            dimension_count=self.dimension_count,
            freq_base=self.freq_base,
            pairing=_PAIRINGS[self.mode],
            freq_scale=self.freq_scale,
            yarn=yarn,
            freq_factors=None if factors is None else factors.reshape(-1)[: self.dimension_count // 2],
        )

    def tables(self, positions_T: torch.Tensor, factors: torch.Tensor | None) -> RopeTables:
        settings = self.settings(factors)
        tables = settings.tables(positions_T)
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


@dataclass(frozen=True, eq=False)
class _Rotation:
    """Angles, and the factors of a file; makes tables as `RopeSettings` does."""

    angles: _Angles
    factors: torch.Tensor | None

    def tables(self, positions_T: torch.Tensor) -> RopeTables:
        return self.angles.tables(positions_T, self.factors)


# Inputs that hold the positions of the batch's tokens.
_POSITIONS = (("positions",), ("positions_4",))

# (frame, values of positions and factors, number of tokens) -> their cos and sin.
Tables = Callable[[Frame, torch.Tensor, torch.Tensor | None, int], RopeTables]


def tables_of(graph: Graph, node: Node) -> Tables:
    """How the tables of a rotation are found in each run. Those of the batch's own positions are made once for all
    runs.
    """
    angles = _Angles.read(node)
    leaves = [None if source is None else graph.nodes[source] for source in node.sources[1:]]
    names = tuple(None if leaf is None else leaf.name for leaf in leaves)
    is_of_batch = all(leaf is None or leaf.is_leaf for leaf in leaves) and names[:1] in _POSITIONS
    key = angles, names if is_of_batch else node.sources[1:]

    def tables(frame: Frame, positions: torch.Tensor, factors: torch.Tensor | None, num_tokens: int) -> RopeTables:
        found = frame.rope_tables.get(key)
        if found is None and is_of_batch:
            cache = frame.rope_caches.setdefault(key, RopeTableCache(_Rotation(angles, factors)))
            found = cache.tables(frame.batch)
        elif found is None:
            found = angles.tables(positions.flatten()[:num_tokens].long(), factors)
        frame.rope_tables[key] = found
        return found

    return tables


def _rope(is_inverse: bool) -> Lowering:
    def lowering(graph: Graph, node: Node) -> Kernel:
        tables_in = tables_of(graph, node)
        first = node.integer(15)

        def kernel(
            frame: Frame, x: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None = None
        ) -> torch.Tensor:
            tables = tables_in(frame, positions, factors, x.shape[1])
            if is_inverse:
                tables = RopeTables(tables.cos_TP, -tables.sin_TP, tables.pairing)
            x_THK = x.squeeze(0)
            rotated = ops.rope(x_THK[..., first:], tables)
            return (torch.cat([x_THK[..., :first], rotated], -1) if first else rotated).unsqueeze(0)

        return kernel

    return lowering


LOWERINGS: dict[str, Lowering] = {"ROPE": _rope(is_inverse=False), "ROPE_BACK": _rope(is_inverse=True)}
