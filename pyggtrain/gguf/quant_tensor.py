"""A weight as the file holds it: blocks of bytes, their ggml type, and the shape they decode to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """One tensor of a GGUF file, never decoded as a whole.

    Attributes:
        name: its name in the file, e.g. ``blk.0.attn_q.weight``.
        type: ggml's name of its type, e.g. ``Q4_K``, ``F32``.
        shape: logical shape in torch order: [N, K] for a linear, [E, N, K] for experts, [K] for a vector.
        blocks: uint8 [..., row_bytes]. On the CPU a view into the mapped file at the tensor's own address: no copy.
            The mapping is copy-on-write and stays open as long as this tensor lives.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    blocks: "torch.Tensor"

    @property
    def num_rows(self) -> int:
        """Rows of the last dimension: N, E * N, or 1."""
        return self.blocks.numel() // self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes that one row of shape[-1] weights takes."""
        return self.blocks.shape[-1]

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel()

    @property
    def device(self) -> "torch.device":
        return self.blocks.device
