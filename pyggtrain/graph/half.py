"""A half of a layer that was found in a graph, and how it runs as one fused operation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.lowering.rope import Tables
from pyggtrain.nn import AttentionHalf, DeltaHalf, FeedForwardHalf, HostStash
from pyggtrain.ops.fused import Kept


@dataclass(frozen=True, eq=False)
class Half:
    """A half of a layer.

    Attributes:
        nodes: all that it stands for; `result` is the last of them.
        sources: the nodes that it reads: x, and for a rotation the leaves that its tables are made from.
        modules: its weights.
        selects_rows: only the wanted tokens' rows come out.
        tables: of the rotation, None for none.
    """

    nodes: frozenset[int]
    sources: tuple[int | None, ...]
    result: int
    modules: AttentionHalf | DeltaHalf | FeedForwardHalf
    selects_rows: bool = False
    tables: Tables | None = None

    def __call__(
        self, frame: Frame, values: Sequence[torch.Tensor | None], kept: Kept, stash: HostStash | None
    ) -> torch.Tensor:
        """The result [1, 1, T, D], fused.

        Args:
            values: of `self.sources`; x is [1, 1, T, D].
            kept, stash: see `nn.AttentionHalf`.
        """
        x, positions, factors = (*values, None, None)[:3]
        assert x is not None
        x_TD = frame.rounded(x).flatten(0, 2).contiguous()
        if isinstance(self.modules, FeedForwardHalf):
            y_TD = self.modules(x_TD, kept, stash)
        elif isinstance(self.modules, DeltaHalf):
            y_TD = self.modules(x_TD, frame.batch.documents, kept, stash)
        else:
            tables = None
            if self.tables is not None:
                assert positions is not None, "a rotation without positions"
                tables = self.tables(frame, positions, factors, x_TD.shape[0])
            y_TD = self.modules(x_TD, tables, frame.batch.documents, kept, stash)
        if self.selects_rows and not frame.takes_all:
            y_TD = y_TD.index_select(0, frame.rows)
        return y_TD[None, None]
