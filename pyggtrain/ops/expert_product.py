"""Products of rows with their own expert's quantised matrix on a GPU, without autograd: what ops of experts build on.

Two ways, by the number of rows that an expert has on average (known without asking the GPU):

* few: the packed blocks are decoded tile by tile where they are multiplied (`kernels.grouped_dequant_matmul`); nothing
  but the blocks is read.
* many: a slice of the experts is decoded into the workspace, then multiplied (`kernels.grouped_matmul`). The workspace
  bounds the slice, so no stack is ever decoded as a whole unless it fits there.

Where they cross was measured (docs/performance.md). Both give sums in float32 of the same decoded numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pyggtrain.ops import workspace
from pyggtrain.ops.dequantize import FLOAT_TYPES

if TYPE_CHECKING:
    from pyggtrain.kernels.grouped_matmul import LowRank
    from pyggtrain.kernels.moe_routing import Routing

# Rows of an expert on average up to which packed products are the faster ones (H200), and the types for which they are:
# MXFP4, whose blocks of 17 bytes are read byte by byte, lost at 16 rows already. Others were not measured.
FEW_ROWS = 64
PACKED_TYPES = frozenset({"Q4_K"})


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """Frozen weights W [E, N, K] of all experts.

    Attributes:
        blocks: uint8 [E, N, row_bytes].
        type: ggml's name of the type.
        expert_scale: the file's own factor of each expert, [E], or None.
        bias: float32 [E, N], or None.
    """

    blocks: torch.Tensor
    type: str
    expert_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.blocks.shape[0]

    @property
    def num_rows(self) -> int:
        """N."""
        return self.blocks.shape[1]

    @property
    def num_columns(self) -> int:
        """K."""
        from pyggtrain.kernels.dequant import DECODERS

        row_bytes = self.blocks.shape[2]
        if self.type in FLOAT_TYPES:
            return row_bytes // FLOAT_TYPES[self.type].itemsize
        decoder = DECODERS[self.type]
        return row_bytes // decoder.block_bytes * decoder.block_size


class Decoded:
    """Stacks of one shape, decoded slice by slice; if one slice holds all, it is decoded once.

    Args:
        stacks: one or two.
        dtype: of the products.
    """

    def __init__(self, stacks: Sequence[ExpertStack], dtype: torch.dtype) -> None:
        first = stacks[0]
        self._stacks = stacks
        self._dtype = dtype
        self._shape = (first.num_rows, first.num_columns)
        expert_bytes = len(stacks) * first.num_rows * first.num_columns * dtype.itemsize
        limit = workspace.limit_bytes(first.blocks.device.type)
        num_slices = -(-first.num_experts // max(1, min(first.num_experts, limit // expert_bytes)))
        self._length = -(-first.num_experts // num_slices)
        self._whole: torch.Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether one slice holds all: only then a second product finds what a first one has decoded."""
        return self._length == self._stacks[0].num_experts

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first expert, [P, G, N, K]) of each slice, valid until the next."""
        num_experts = self._stacks[0].num_experts
        if self._whole is not None:
            yield 0, self._whole
            return
        device = self._stacks[0].blocks.device
        buffer = torch.empty(len(self._stacks), self._length, *self._shape, dtype=self._dtype, device=device)
        for first in range(0, num_experts, self._length):
            end = min(first + self._length, num_experts)
            values = buffer[:, : end - first]
            for stack, part in zip(self._stacks, values, strict=True):
                _decode(stack, first, end, part)
            if self.is_whole:
                self._whole = values
            yield first, values


def _decode(stack: ExpertStack, first: int, end: int, out: torch.Tensor) -> None:
    blocks = stack.blocks[first:end].flatten(0, 1)
    if stack.type in FLOAT_TYPES:
        out.copy_(blocks.view(FLOAT_TYPES[stack.type]).view(out.shape))
        return
    from pyggtrain.kernels.dequant import dequantize

    dequantize(blocks, stack.type, out=out.flatten(0, 1))


def is_packed(stacks: Sequence[ExpertStack], routing: "Routing") -> bool:
    """Whether products of so few rows take the packed blocks."""
    same = all(stack.type == stacks[0].type for stack in stacks)
    return same and stacks[0].type in PACKED_TYPES and routing.num_slots <= FEW_ROWS * routing.num_experts


def _scale_of(stacks: Sequence[ExpertStack]) -> torch.Tensor | None:
    """c of the one stack; two with factors of experts are refused: each would need its own."""
    if len(stacks) > 1 and any(stack.expert_scale is not None for stack in stacks):
        raise ValueError("two stacks with factors of their experts; needed: one at a time.")
    return stacks[0].expert_scale


def biases_of(stacks: Sequence[ExpertStack]) -> list[torch.Tensor]:
    """b of each stack, zeros for one that has none beside one that has; or none at all."""
    like = next((stack.bias for stack in stacks if stack.bias is not None), None)
    if like is None:
        return []
    return [torch.zeros_like(like) if stack.bias is None else stack.bias for stack in stacks]


def forward(
    x: torch.Tensor,
    stacks: Sequence[ExpertStack],
    routing: "Routing",
    *,
    out: torch.Tensor,
    slots_per_row: int = 0,
    to_slots: bool = False,
    low_rank: "LowRank | None" = None,
    decoded: Decoded | None = None,
) -> torch.Tensor:
    """out_p[s] = c W_p[e] x[s] + b_p[e] + B_p[e] h_p[s] for one or two stacks of one shape; arguments as those of
    `kernels.grouped_matmul.grouped_matmul_forward`.

    Args:
        decoded: of the stacks, if they are decoded for other products too.
    """
    from pyggtrain.kernels.grouped_dequant_matmul import grouped_dequant_forward
    from pyggtrain.kernels.grouped_matmul import LowRank, grouped_matmul_forward

    options: dict[str, Any] = {
        "slots_per_row": slots_per_row,
        "to_slots": to_slots,
        "expert_scale": _scale_of(stacks),
    }
    if decoded is None and is_packed(stacks, routing):
        outs = out.chunk(len(stacks), 1)
        hs = [] if low_rank is None else low_rank.h.chunk(len(stacks), 1)
        for index, stack in enumerate(stacks):
            own = None if low_rank is None else LowRank(hs[index], (low_rank.factors[index],))
            grouped_dequant_forward(
                x, stack.blocks, stack.type, routing, out=outs[index], low_rank=own, bias=stack.bias, **options
            )
        return out
    biases = biases_of(stacks)
    for first, values in (decoded or Decoded(stacks, x.dtype)).slices():
        grouped_matmul_forward(
            x, values, routing, out=out, first_expert=first, low_rank=low_rank, biases=biases, **options
        )
    return out


def backward(
    dy: torch.Tensor,
    stacks: Sequence[ExpertStack],
    routing: "Routing",
    *,
    out: torch.Tensor,
    slots_per_row: int = 0,
    to_slots: bool = False,
    low_rank: "LowRank | None" = None,
    decoded: Decoded | None = None,
) -> torch.Tensor:
    """out[s] = c Σ_p W_p[e]ᵀ dy_p[s] + Σ_p A_p[e]ᵀ dh_p[s] for one or two stacks of one shape."""
    from pyggtrain.kernels.grouped_dequant_matmul import grouped_dequant_backward
    from pyggtrain.kernels.grouped_matmul import grouped_matmul_backward

    options: dict[str, Any] = {
        "out": out,
        "slots_per_row": slots_per_row,
        "to_slots": to_slots,
        "low_rank": low_rank,
        "expert_scale": _scale_of(stacks),
    }
    if decoded is None and is_packed(stacks, routing):
        return grouped_dequant_backward(dy, [stack.blocks for stack in stacks], stacks[0].type, routing, **options)
    for first, values in (decoded or Decoded(stacks, dy.dtype)).slices():
        grouped_matmul_backward(dy, values, routing, first_expert=first, **options)
    return out
