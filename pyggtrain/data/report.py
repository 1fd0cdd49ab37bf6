"""What happened to the rows of a data set on their way to examples."""

from collections import Counter
from dataclasses import dataclass, field

NUM_LISTED = 20
_NUM_SOURCES = 3


@dataclass
class RowCounts:
    """What was found and decided while rows were encoded. Parts of a data set add up.

    Attributes:
        num_rows: rows read.
        num_rows_of: the same by name of the format.
        bad, too_long: source and reason of rows that cannot be used, or are longer than allowed; the first few.
        num_bad, num_too_long: all of them.
        num_truncated: rows cut to the limit.
        num_splits: places where the text was cut for the tokenizer as generation cuts it.
        warnings: sentence -> rows concerned.
        first_sources: sentence -> where the first of these rows stand.
    """

    num_rows: int = 0
    num_rows_of: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[str, str]] = field(default_factory=list)
    too_long: list[tuple[str, str]] = field(default_factory=list)
    num_bad: int = 0
    num_too_long: int = 0
    num_truncated: int = 0
    num_splits: int = 0
    warnings: Counter[str] = field(default_factory=Counter)
    first_sources: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: "RowCounts") -> None:
        """Add the counts of the rows that come next."""
        self.num_rows += other.num_rows
        self.num_rows_of += other.num_rows_of
        self.bad = [*self.bad, *other.bad][:NUM_LISTED]
        self.too_long = [*self.too_long, *other.too_long][:NUM_LISTED]
        self.num_bad += other.num_bad
        self.num_too_long += other.num_too_long
        self.num_truncated += other.num_truncated
        self.num_splits += other.num_splits
        self.warnings += other.warnings
        for text, sources in other.first_sources.items():
            self.first_sources[text] = [*self.first_sources.get(text, ()), *sources][:_NUM_SOURCES]

    def add_warning(self, text: str, source: str) -> None:
        """Count one row under a warning."""
        self.warnings[text] += 1
        sources = self.first_sources.setdefault(text, [])
        if len(sources) < _NUM_SOURCES:
            sources.append(source)

    def warning_lines(self) -> list[str]:
        """The warnings with the number of rows and the first of them."""
        lines = []
        if self.num_splits:
            lines.append(
                "answers that begin inside a token of the whole text, which is cut there as in generation: "
                f"{self.num_splits}"
            )
        for text, count in self.warnings.items():
            sources = self.first_sources[text]
            lines.append(f"{text}: {count} rows ({', '.join(sources)}{', ...' if count > len(sources) else ''})")
        return lines


@dataclass
class EncodeReport:
    """What happened to the rows.

    Attributes:
        max_length: the limit in force, in tokens.
        num_rows: rows read.
        num_rows_of: the same by name of the format.
        num_examples: examples kept; more than rows kept if documents were split or rows are preference pairs.
        dropped: source and reason of rows left out; the first few.
        num_dropped: all of them.
        num_tokens, num_learnt: tokens of all examples, and those with a label.
        lengths: tokens per example: median, 90 %, 99 % and longest.
        num_truncated: rows cut to `max_length`.
        num_splits: places where the prompt's last token would have reached into the answer, so that the text was cut
            there as generation cuts it.
        warnings: what a person should know, one sentence each.
        sha256: of ids and labels in order; a resumed run compares it.
    """

    max_length: int
    num_rows: int = 0
    num_rows_of: dict[str, int] = field(default_factory=dict)
    num_examples: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    num_dropped: int = 0
    num_tokens: int = 0
    num_learnt: int = 0
    lengths: tuple[int, int, int, int] = (0, 0, 0, 0)
    num_truncated: int = 0
    num_splits: int = 0
    warnings: list[str] = field(default_factory=list)
    sha256: str = ""

    @property
    def num_kept(self) -> int:
        return self.num_rows - self.num_dropped

    def lines(self) -> list[str]:
        """The report for a person, line by line."""
        share = 100 * self.num_learnt / self.num_tokens if self.num_tokens else 0.0
        median, most, nearly_all, longest = self.lengths
        lines = [
            f"{self.num_rows} rows read ({', '.join(self.num_rows_of)}), {self.num_kept} kept, "
            f"{self.num_dropped} dropped, {self.num_examples} examples",
            f"{self.num_tokens} tokens, {self.num_learnt} of them learnt ({share:.1f} %)",
            f"tokens per example: median {median}, 90 % up to {most}, 99 % up to {nearly_all}, longest {longest}; "
            f"limit {self.max_length}",
        ]
        if self.num_truncated:
            lines.append(f"{self.num_truncated} rows cut to {self.max_length} tokens")
        if self.num_dropped:
            lines += ["dropped:", *listed(self.dropped, self.num_dropped)]
        return lines + [f"warning: {warning}" for warning in self.warnings]


def listed(rows: list[tuple[str, str]], num_rows: int) -> list[str]:
    """Lines that name the first of `num_rows` rows and count the others."""
    lines = [f"  {source}: {reason}" for source, reason in rows[:NUM_LISTED]]
    return lines + ([f"  and {num_rows - len(lines)} more"] if num_rows > len(lines) else [])
