"""Encoded rows: token ids with labels, alone or in pairs."""

from array import array
from dataclasses import dataclass

NOT_LEARNT = -100


@dataclass(frozen=True)
class Example:
    """One training example.

    Attributes:
        input_ids: token ids, int32.
        labels: of the same length; the id itself where it is to be learnt, else -100. Not shifted: the model predicts
            `labels[t]` at position t - 1. The first label is always -100, since nothing comes before it.
        source: where the row stands, as `chat.jsonl:12`.
    """

    input_ids: "array[int]"
    labels: "array[int]"
    source: str

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_learnt(self) -> int:
        """Tokens with a label."""
        return len(self.labels) - self.labels.count(NOT_LEARNT)


@dataclass(frozen=True)
class ExamplePair:
    """A preference: two answers to one prompt.

    Labels cover the answers only, each up to and including its end of turn; what comes before is the same in both.

    Attributes:
        chosen: prompt and the better answer.
        rejected: prompt and the worse answer.
    """

    chosen: Example
    rejected: Example

    @property
    def source(self) -> str:
        return self.chosen.source

    @property
    def num_tokens(self) -> int:
        """Of both together."""
        return self.chosen.num_tokens + self.rejected.num_tokens

    @property
    def num_learnt(self) -> int:
        """Of both together."""
        return self.chosen.num_learnt + self.rejected.num_learnt
