"""How rows become examples."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from pyggtrain.data.formats import FORMATS
from pyggtrain.errors import ConfigError

TooLong = Literal["error", "drop", "truncate", "split"]
BadRows = Literal["stop", "skip"]
LearntTurns = Literal["all", "last"]


@dataclass(frozen=True)
class DataSettings:
    """How rows become examples.

    Attributes:
        format: name of a format, or None to read it from the keys of the first row.
        max_length: most tokens of one example.
        too_long: what to do with longer ones: `error` stops and names them, `drop` leaves them out, `truncate` cuts
            them off at the end, `split` cuts documents (format `text`) into pieces of `max_length`.
        bad_rows: `stop` reports all rows that cannot be used and stops; `skip` leaves them out and counts them.
        merge_system: put a system message before the first user message if the template has no system role.
        learnt_turns: learn `all` assistant turns of a conversation or only the `last`.
    """

    format: str | None = None
    max_length: int = 2048
    too_long: TooLong = "error"
    bad_rows: BadRows = "stop"
    merge_system: bool = False
    learnt_turns: LearntTurns = "all"

    def __post_init__(self) -> None:
        """Raises ConfigError that names all wrong settings."""
        wrong = [
            f"{name} is {value!r}; it must be one of {', '.join(get_args(allowed))}."
            for name, value, allowed in (
                ("too_long", self.too_long, TooLong),
                ("bad_rows", self.bad_rows, BadRows),
                ("learnt_turns", self.learnt_turns, LearntTurns),
            )
            if value not in get_args(allowed)
        ]
        if self.max_length < 2:
            wrong.append(f"max_length is {self.max_length}; it must be at least 2, one token given and one learnt.")
        if self.format is not None and self.format not in FORMATS:
            near = get_close_matches(self.format, FORMATS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            wrong.append(f"format is {self.format!r}; it must be one of {', '.join(FORMATS)}.{hint}")
        if wrong:
            raise ConfigError("\n".join(wrong))
