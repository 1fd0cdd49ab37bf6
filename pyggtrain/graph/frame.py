"""What a run of a graph knows besides the tensors that flow through it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from pyggtrain.graph.ir import Number, Sizes, at
from pyggtrain.nn import Batch
from pyggtrain.ops import RopeTables


@dataclass(frozen=True, eq=False)
class Frame:
    """One run.

    Attributes:
        batch: the micro-batch.
        rows: int64 [O], the tokens whose logits are asked for.
        rope_tables: cos and sin by settings: every layer with equal settings shares one table.
        with_noise: what training does to token embeddings, see `nn.Model.with_noise`; None: nothing.
    """

    batch: Batch
    rows: torch.Tensor
    rope_tables: dict[object, RopeTables] = field(default_factory=dict)
    with_noise: Callable[[torch.Tensor, Batch], torch.Tensor] | None = None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch.num_tokens, self.rows.shape[0])

    def shape(self, numbers: Iterable[Number]) -> tuple[int, ...]:
        """Sizes of this run."""
        sizes = self.sizes
        return tuple(at(number, sizes) for number in numbers)
