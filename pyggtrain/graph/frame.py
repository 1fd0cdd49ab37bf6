"""What a run of a graph knows besides the tensors that flow through it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from pyggtrain.graph.ir import Number, Sizes, at
from pyggtrain.nn import Batch, RopeTableCache
from pyggtrain.ops import RopeTables
from pyggtrain.ops.quant_matmul import HALF_DTYPES


@dataclass(frozen=True, eq=False)
class Frame:
    """One run.

    Attributes:
        batch: the micro-batch.
        rows: int64 [O], the tokens whose logits are asked for. takes_all: these are all tokens in their order.
        dtype: of what products and attention read, what layers give each other, and of token embeddings. In half
            precision what lies between may be float32, see `rounded`.
        rope_tables: cos and sin by settings: every layer with equal settings shares one table.
        rope_caches: the same for all positions, from run to run.
        with_noise: what training does to token embeddings, see `nn.Model.with_noise`; None: nothing.
    """

    batch: Batch
    rows: torch.Tensor
    takes_all: bool = False
    dtype: torch.dtype = torch.float32
    rope_tables: dict[object, RopeTables] = field(default_factory=dict)
    rope_caches: dict[object, RopeTableCache] = field(default_factory=dict)
    with_noise: Callable[[torch.Tensor, Batch], torch.Tensor] | None = None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch.num_tokens, self.rows.shape[0])

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x in half precision if the run is; a run in full precision leaves everything as it is."""
        return x.to(self.dtype) if self.dtype in HALF_DTYPES and x.is_floating_point() else x

    def shape(self, numbers: Iterable[Number]) -> tuple[int, ...]:
        """Sizes of this run."""
        sizes = self.sizes
        return tuple(at(number, sizes) for number in numbers)


def in_full(x: torch.Tensor) -> torch.Tensor:
    """x in float32 if it is in half precision, for sums and exponentials that want it."""
    return x.float() if x.dtype in HALF_DTYPES else x
