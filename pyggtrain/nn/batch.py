"""One micro-batch: documents laid one after another in one row, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pyggtrain.errors import DataError
from pyggtrain.ops.attention import Documents
from pyggtrain.ops.linear_cross_entropy import IGNORED


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens of one or more documents and what to learn from them. T tokens, B documents.

    Attributes:
        tokens_T: int64 [T].
        positions_T: int64 [T], counted from 0 in each document.
        targets_T: int64 [T]; targets_T[t] is the token to predict after position t, -100 where nothing is learnt.
        cu_seqlens: int32 [B + 1]; document b is tokens cu_seqlens[b] to cu_seqlens[b + 1]. Always on the host: what is
            launched depends on it.
        reference_B: float64 [B], the log-probability of each document's targets under a reference model, where a loss
            needs it and it is known already.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    targets_T: torch.Tensor
    cu_seqlens: torch.Tensor
    reference_B: torch.Tensor | None = None

    @classmethod
    def from_documents(cls, documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Batch":
        """Lay documents one after another.

        Args:
            documents: pairs (input_ids, labels) of equal length. Labels are aligned with input_ids, -100 ignored:
                labels[t] says whether input_ids[t] is to be predicted from what stands before it. The shift by one
                happens here, so a document's first label is never used, and no document predicts the first token of the
                next.

        Raises:
            DataError: no document, an empty one, or one with another number of labels than tokens.
        """
        if not documents:
            raise DataError("A batch of no documents: needed at least one.")
        tokens: list[int] = []
        positions: list[int] = []
        targets: list[int] = []
        bounds = [0]
        for index, (input_ids, labels) in enumerate(documents):
            if not input_ids or len(input_ids) != len(labels):
                raise DataError(
                    f"Document {index} has {len(input_ids)} tokens and {len(labels)} labels: "
                    "needed the same number, at least 1."
                )
            tokens += input_ids
            positions += range(len(input_ids))
            targets += [*labels[1:], IGNORED]
            bounds.append(len(tokens))
        return cls(
            tokens_T=torch.tensor(tokens, dtype=torch.int64),
            positions_T=torch.tensor(positions, dtype=torch.int64),
            targets_T=torch.tensor(targets, dtype=torch.int64),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        )

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @cached_property
    def documents(self) -> Documents:
        """Their bounds, as attention wants them."""
        return Documents(self.cu_seqlens)

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document."""
        return int(self.cu_seqlens.diff().max())

    @cached_property
    def supervised(self) -> torch.Tensor:
        """Rows of the head's input, int64: the positions that have a target. May repeat one without, see
        `with_supervised`.
        """
        return (self.targets_T != IGNORED).nonzero().squeeze(1)

    @cached_property
    def num_targets(self) -> int:
        """Tokens that the loss is summed over."""
        return int((self.targets_T != IGNORED).sum())

    def with_supervised(self, supervised: torch.Tensor, num_targets: int | None = None) -> "Batch":
        """The same batch with given rows of the head's input: all positions that have a target, and any others."""
        other = replace(self)
        other.__dict__["supervised"] = supervised
        if num_targets is not None:
            other.__dict__["num_targets"] = num_targets
        return other

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`, without waiting for the device later: what has a size is counted before."""
        if self.tokens_T.device == torch.device(device):
            return self
        names: tuple[str, ...] = ("tokens_T", "positions_T", "targets_T")
        if self.reference_B is not None:
            names = (*names, "reference_B")
        moved = replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})
        return moved.with_supervised(self.supervised.to(device, non_blocking=True), self.num_targets)
