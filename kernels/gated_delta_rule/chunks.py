"""Documents of a row of tokens, cut into chunks of at most `CHUNK` tokens: each document begins with a new one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

CHUNK = 64


@dataclass(frozen=True, eq=False)
class Chunks:
    """B documents, N chunks. Tables are int32.

    Attributes:
        num_tokens: T.
        first_token: [N + 1], where chunk n begins, and T at the end. All but the last chunk of a document are whole.
        cu_seqlens: [B + 1], where document b begins, and T at the end.
        first_chunk: [B + 1], the first chunk of document b, and N at the end.
    """

    num_tokens: int
    first_token: torch.Tensor
    cu_seqlens: torch.Tensor
    first_chunk: torch.Tensor

    @staticmethod
    def from_bounds(bounds: Sequence[int], device: torch.device | str = "cpu") -> "Chunks":
        """The chunks of documents that begin at `bounds` [B + 1], the last of which is their common end."""
        first_token = [first for start, end in pairwise(bounds) for first in range(start, end, CHUNK)]
        counts = torch.tensor([-(-(end - start) // CHUNK) for start, end in pairwise(bounds)])
        first_chunk = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        tables = (torch.tensor([*first_token, bounds[-1]]), torch.tensor(bounds), first_chunk)
        return Chunks(bounds[-1], *(table.to(device, torch.int32) for table in tables))

    @property
    def num_chunks(self) -> int:
        """N."""
        return self.first_token.shape[0] - 1

    @property
    def num_documents(self) -> int:
        """B."""
        return self.cu_seqlens.shape[0] - 1
