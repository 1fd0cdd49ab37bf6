"""Documents of a row of tokens, cut into chunks of at most `CHUNK` tokens: each document begins with a new one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

CHUNK = 64


def most_chunks(num_tokens: int, num_documents: int) -> int:
    """The most chunks that documents of so many tokens together have: the last of each may hold one token alone."""
    return (num_tokens + (CHUNK - 1) * num_documents) // CHUNK


@dataclass(frozen=True, eq=False)
class Chunks:
    """B documents, N chunks. Tables are int32. Where there is room for more than there are, the last documents and
    chunks are empty: they begin and end at T.

    Attributes:
        num_tokens: T.
        first_token: [N + 1], where chunk n begins, and T at the end. All but the last chunk of a document are whole.
        cu_seqlens: [B + 1], where document b begins, and T at the end.
        first_chunk: [B + 1], the first chunk of document b, and at the end the number of chunks that have tokens.
    """

    num_tokens: int
    first_token: torch.Tensor
    cu_seqlens: torch.Tensor
    first_chunk: torch.Tensor

    @staticmethod
    def from_bounds(
        bounds: Sequence[int], device: torch.device | str = "cpu", *, num_documents: int | None = None
    ) -> "Chunks":
        """The chunks of documents that begin at `bounds`, the last of which is their common end.

        Args:
            bounds: of the documents, one more than there are.
            device: where the tables go.
            num_documents: room for so many documents and all chunks that these could have: the tables' sizes depend on
                T and on this alone. None: no more than there are.
        """
        first_token = [first for start, end in pairwise(bounds) for first in range(start, end, CHUNK)]
        first_chunk = [0, *accumulate(-(-(end - start) // CHUNK) for start, end in pairwise(bounds))]
        cu_seqlens = list(bounds)
        if num_documents is not None:
            num_added = num_documents - (len(bounds) - 1)
            assert num_added >= 0, f"{len(bounds) - 1} documents: needed at most {num_documents}"
            cu_seqlens += [bounds[-1]] * num_added
            first_chunk += [len(first_token)] * num_added
            first_token += [bounds[-1]] * (most_chunks(bounds[-1], num_documents) - len(first_token))
        tables = ([*first_token, bounds[-1]], cu_seqlens, first_chunk)
        return Chunks(
            bounds[-1], *(torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True) for table in tables)
        )

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """first_token, cu_seqlens, first_chunk."""
        return self.first_token, self.cu_seqlens, self.first_chunk

    def clone(self) -> "Chunks":
        """The same tables at other places."""
        return Chunks(self.num_tokens, *(table.clone() for table in self.tables))

    def copy_(self, other: "Chunks") -> None:
        """Put tables of the same sizes where these are: a CUDA graph goes on reading there."""
        for own, new in zip(self.tables, other.tables, strict=True):
            own.copy_(new)

    @property
    def num_chunks(self) -> int:
        """N."""
        return self.first_token.shape[0] - 1

    @property
    def num_documents(self) -> int:
        """B."""
        return self.cu_seqlens.shape[0] - 1
