"""From rows to token ids with labels, and a report of everything that happened on the way.

A conversation is rendered once by the model's chat template and tokenised once, so its ids are those that llama-server
gives for the same messages; labels cover what the assistant wrote and the token that ends its turn. A prompt and its
completion are tokenised apart, as at generation time. A document is learnt whole. No example is ever padded: a
micro-batch lays its examples one after another.
"""

import hashlib
import os
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from pyggtrain.data.chat_template import ChatTemplate, merge_system
from pyggtrain.data.formats import FORMATS, matching_formats
from pyggtrain.data.rows import DataSource, Row, read_rows
from pyggtrain.data.samples import BadRowError, Conversation, Document, PromptCompletion, Sample
from pyggtrain.data.tokens import TextEncoder
from pyggtrain.data.turns import Turn, render_turns
from pyggtrain.errors import ConfigError, DataError
from pyggtrain.gguf.tokenizer import Tokenizer

NOT_LEARNT = -100

TooLong = Literal["error", "drop", "truncate", "split"]
BadRows = Literal["stop", "skip"]
LearntTurns = Literal["all", "last"]

_NUM_LISTED = 20
_NUM_SOURCES = 3


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


@dataclass
class EncodeReport:
    """What happened to the rows.

    Attributes:
        max_length: the limit in force, in tokens.
        num_rows: rows read.
        num_rows_of: the same by name of the format.
        num_examples: examples kept; more than rows kept only if documents were split.
        dropped: source and reason of each row left out.
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
    num_tokens: int = 0
    num_learnt: int = 0
    lengths: tuple[int, int, int, int] = (0, 0, 0, 0)
    num_truncated: int = 0
    num_splits: int = 0
    warnings: list[str] = field(default_factory=list)
    sha256: str = ""

    @property
    def num_kept(self) -> int:
        return self.num_rows - len(self.dropped)

    def lines(self) -> list[str]:
        """The report for a person, line by line."""
        share = 100 * self.num_learnt / self.num_tokens if self.num_tokens else 0.0
        median, most, nearly_all, longest = self.lengths
        lines = [
            f"{self.num_rows} rows read ({', '.join(self.num_rows_of)}), {self.num_kept} kept, "
            f"{len(self.dropped)} dropped, {self.num_examples} examples",
            f"{self.num_tokens} tokens, {self.num_learnt} of them learnt ({share:.1f} %)",
            f"tokens per example: median {median}, 90 % up to {most}, 99 % up to {nearly_all}, longest {longest}; "
            f"limit {self.max_length}",
        ]
        if self.num_truncated:
            lines.append(f"{self.num_truncated} rows cut to {self.max_length} tokens")
        if self.dropped:
            lines += ["dropped:", *_listed(self.dropped)]
        return lines + [f"warning: {warning}" for warning in self.warnings]


def load_examples(
    source: DataSource | Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    settings: DataSettings,
    *,
    chat_template: ChatTemplate | None = None,
) -> tuple[list[Example], EncodeReport]:
    """Read a file, several files, or an iterable of dicts, and make examples of their rows, in order.

    Args:
        source: each file may have its own format; all rows of one file have the same.
        chat_template: instead of the one in the model's file; used for conversations only.

    Raises:
        DataError: a file or row cannot be used, rows are too long, or nothing is left to learn. All rows concerned are
            named.
    """
    encoder = _RowEncoder(tokenizer, settings, chat_template)
    report = EncodeReport(max_length=settings.max_length)
    examples: list[Example] = []
    bad: list[tuple[str, str]] = []
    too_long: list[tuple[str, str]] = []
    for row, format in _rows_with_format(source, settings.format):
        report.num_rows += 1
        report.num_rows_of[format] = report.num_rows_of.get(format, 0) + 1
        try:
            examples += encoder.encode(row, format)
        except _TooLongError as error:
            too_long.append((row.source, str(error)))
        except BadRowError as error:
            bad.append((row.source, str(error)))
    if bad and settings.bad_rows == "stop":
        _stop(bad, report.num_rows, "cannot be used", "Repair them, or set bad_rows to 'skip' to leave them out.")
    if too_long and settings.too_long != "drop":
        advice = "Raise max_length, or set too_long to 'drop' or 'truncate'"
        advice += ", or to 'split' to cut documents into pieces." if "text" in report.num_rows_of else "."
        _stop(too_long, report.num_rows, f"are longer than {settings.max_length} tokens", advice)
    report.dropped = bad + too_long
    if not examples:
        found = "no rows were found" if not report.num_rows else f"all {report.num_rows} rows were dropped"
        raise DataError("\n".join([f"Nothing is left to train on: {found}.", *_listed(report.dropped)]))
    _summarise(report, examples, encoder)
    return examples, report


def _rows_with_format(
    source: DataSource | Sequence[str | os.PathLike[str]], format: str | None
) -> Iterator[tuple[Row, str]]:
    """All rows, each with the name of its file's format: the one that is set, or that of the file's first row."""
    several = isinstance(source, Sequence) and all(isinstance(part, (str, os.PathLike)) for part in source)
    parts: Sequence[Any] = list(source) if several and not isinstance(source, str) else [source]  # type: ignore[arg-type]
    for part in parts:
        found = format
        for row in read_rows(part):
            found = found or _detect_format(row)
            yield row, found


class _TooLongError(Exception):
    """A row has more tokens than allowed."""


class _RowEncoder:
    """Encodes rows one by one and keeps count of what it had to decide."""

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._template = chat_template
        self._encoder = TextEncoder(tokenizer)
        # Warning -> rows concerned, and the first of them.
        self.warnings: Counter[str] = Counter()
        self.first_sources: dict[str, list[str]] = {}
        self.num_splits = self.num_truncated = 0
        # Of the row in hand, counted once it is kept; a dict keeps the order in which they came up.
        self._row_warnings: dict[str, None] = {}
        self._row_splits = 0

    def encode(self, row: Row, format: str) -> list[Example]:
        """Examples of one row: one, or several if a document is split.

        Raises:
            BadRowError: the row cannot be used.
            _TooLongError: it is too long and not to be cut.
        """
        self._row_warnings.clear()
        self._row_splits = 0
        sample = self._parse(row.value, format)
        if isinstance(sample, Conversation):
            ids, labels = self._conversation(sample)
        elif isinstance(sample, PromptCompletion):
            ids, labels = self._completion(sample)
        else:
            ids, labels = self._document(sample)
        pieces = self._fitted(array("i", ids), array("i", labels), is_document=isinstance(sample, Document))
        for warning in self._row_warnings:
            self.warnings[warning] += 1
            if self.warnings[warning] <= _NUM_SOURCES:
                self.first_sources.setdefault(warning, []).append(row.source)
        self.num_splits += self._row_splits
        self.num_truncated += len(pieces) == 1 and len(pieces[0][0]) < len(ids)
        return [Example(piece_ids, piece_labels, row.source) for piece_ids, piece_labels in pieces]

    def _parse(self, value: dict[str, Any], format: str) -> Sample:
        module = FORMATS[format]
        if missing := [key for key in module.KEYS if key not in value]:
            found = ", ".join(matching_formats(value)) or f"none; its keys are {', '.join(value) or 'none'}"
            raise BadRowError(
                f"{' and '.join(missing)} missing; the file is read as '{format}', this row looks like {found}"
            )
        if unused := sorted(value.keys() - {*module.KEYS, *module.OPTIONAL_KEYS}):
            self._warn(f"keys not used by format '{format}': {', '.join(unused)}")
        return module.parse(value)

    def _refuse_hopeless(self, num_chars: int) -> None:
        """Refuse a text of many megabytes before it is tokenised, if it is too long whatever its tokens are."""
        limit = self._settings.max_length
        if self._settings.too_long in ("error", "drop") and num_chars > 64 * limit:
            least = num_chars // self._encoder.longest_piece
            if least > limit:
                raise _TooLongError(f"at least {least} tokens, limit {limit}")

    def _conversation(self, chat: Conversation) -> tuple[list[int], list[int]]:
        for note in chat.notes:
            self._warn(note)
        template = self._template
        if template is None:
            template = self._template = ChatTemplate.of_model(self._tokenizer)
        chat = self._with_system(chat, template)
        if self._settings.learnt_turns == "last":
            last = max(index for index, learnt in enumerate(chat.learnt) if learnt)
            chat = replace(chat, learnt=tuple(index == last for index in range(len(chat.learnt))))
        text, turns, lost = render_turns(template, chat)
        self._warn_about(turns, lost, template)
        self._refuse_hopeless(len(text))
        text, num_taken = self._encoder.without_added_tokens(text)
        places = _to_bytes(text)
        turns = [
            replace(
                turn,
                start=places(turn.start - num_taken),
                end=places(turn.end - num_taken),
                limit=places(turn.limit - num_taken),
            )
            for turn in turns
        ]
        tokens = self._encoder.whole(text, [turn.start for turn in turns if turn.follows_prompt])
        self._row_splits = tokens.num_splits
        labels = [NOT_LEARNT] * len(tokens.ids)
        for turn in turns:
            first, stop = self._learnt_tokens(turn, tokens.ids, tokens.starts, tokens.ends)
            labels[first:stop] = tokens.ids[first:stop]
        return tokens.ids, labels

    def _with_system(self, chat: Conversation, template: ChatTemplate) -> Conversation:
        if chat.messages[0]["role"] not in ("system", "developer"):
            return chat
        if template.has_system_role:
            if self._settings.merge_system:
                self._warn("merge_system has no effect, since the template has a system role")
            return chat
        if not self._settings.merge_system:
            # Raises with the template's own words where it refuses; a template may also drop the text without a word.
            template.render(chat.messages, tools=chat.tools)
            raise BadRowError(
                f"{template.name} leaves out the system message; set merge_system to put it before the first user "
                "message, as llama-server does"
            )
        messages = merge_system(chat.messages)
        if len(messages) < len(chat.messages):
            self._warn("system message merged into the next message, since the template has no system role")
        return replace(chat, messages=messages, learnt=chat.learnt[len(chat.messages) - len(messages) :])

    def _learnt_tokens(self, turn: Turn, ids: list[int], starts: list[int], ends: list[int]) -> tuple[int, int]:
        """First token of a turn, and the one behind its last; the token that ends the turn belongs to it."""
        # The first that begins here (it may stand for no byte, as an added space does), or reaches over the place.
        first = min(bisect_left(starts, turn.start), bisect_right(ends, turn.start))
        stop = bisect_left(starts, turn.end, first)
        is_end = self._tokenizer.is_end_of_generation
        # A template that marks what is generated includes the end of the turn, and some the line break behind it.
        if turn.limit == turn.end:
            for index in range(stop - 1, first - 1, -1):
                if is_end(ids[index]):
                    return first, index + 1
        for index in range(stop, len(ids)):
            if starts[index] > turn.limit or (starts[index] == turn.limit and ends[index] > turn.limit):
                break
            if is_end(ids[index]):
                return first, index + 1
        self._warn(
            "no end-of-generation token follows an assistant turn, so stopping is not taught there: llama.cpp does not "
            "stop on what the template writes"
        )
        return first, stop

    def _warn_about(self, turns: list[Turn], lost: list[str], template: ChatTemplate) -> None:
        if not all(turn.follows_prompt for turn in turns):
            self._warn(
                "before an assistant turn the rendering differs from the prompt that llama-server sends: the template "
                "writes earlier turns, or the beginning of an answer, differently when it generates"
            )
        if not all(turn.is_whole for turn in turns) or "assistant" in lost:
            self._warn("the template drops part of an assistant turn (reasoning of earlier turns, for example)")
        for role in sorted(set(lost) - {"assistant"}):
            self._warn(f"the template drops or changes the text of a {role} message")
        if template.uses_date:
            self._warn(
                f"the template writes a date, here {template.now:%Y-%m-%d}; llama-server will write that of the day"
            )

    def _completion(self, sample: PromptCompletion) -> tuple[list[int], list[int]]:
        self._refuse_hopeless(len(sample.prompt) + len(sample.completion))
        prompt = self._encoder.prompt(sample.prompt)
        completion = self._ended(self._encoder.continuation(sample.completion))
        return prompt + completion, [NOT_LEARNT] * len(prompt) + completion

    def _document(self, sample: Document) -> tuple[list[int], list[int]]:
        self._refuse_hopeless(len(sample.text))
        ids = self._ended(self._encoder.prompt(sample.text))
        return ids, list(ids)

    def _ended(self, ids: list[int]) -> list[int]:
        """The ids with the end token behind them, once."""
        end = self._tokenizer.eos_id
        if end is None:
            self._warn("the model's file has no end-of-sequence token, so stopping is not taught")
        elif not ids or ids[-1] != end:
            ids.append(end)
        return ids

    def _fitted(
        self, ids: "array[int]", labels: "array[int]", *, is_document: bool
    ) -> list[tuple["array[int]", "array[int]"]]:
        """Ids and labels brought under the limit by the policy for long rows; pieces with nothing to learn left out."""
        limit, policy = self._settings.max_length, self._settings.too_long
        if len(ids) <= limit:
            stops = [len(ids)]
        elif policy == "truncate":
            stops = [limit]
        elif policy == "split" and is_document:
            stops = [*range(limit, len(ids), limit), len(ids)]
        else:
            raise _TooLongError(f"{len(ids)} tokens, limit {limit}")
        pieces = []
        for start, stop in zip([0, *stops], stops, strict=False):
            # Nothing predicts the first token of a piece.
            piece_labels = array("i", [NOT_LEARNT]) + labels[start + 1 : stop]
            if piece_labels.count(NOT_LEARNT) < len(piece_labels):
                pieces.append((ids[start:stop], piece_labels))
        if not pieces:
            first = next((index for index, label in enumerate(labels) if label != NOT_LEARNT), None)
            if first is None:
                raise BadRowError("the chat template writes nothing of what is to be learnt")
            raise BadRowError(f"no learnt token is left: {first} tokens come before the first one, limit {limit}")
        return pieces

    def _warn(self, text: str) -> None:
        self._row_warnings[text] = None


def _detect_format(row: Row) -> str:
    found = matching_formats(row.value)
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{row.source} fits several formats: {', '.join(found)}. Set format to one of them.")
    near = [
        match
        for key in row.value
        for match in get_close_matches(key, [k for f in FORMATS.values() for k in f.KEYS], n=1)
    ]
    hint = f" Did you mean {near[0]}?" if near else ""
    forms = "; ".join(f"{name} ({', '.join(format.KEYS)})" for name, format in FORMATS.items())
    raise DataError(
        f"{row.source} has the keys {', '.join(row.value) or 'none'}, which fit no format.{hint} Known: {forms}."
    )


def _stop(rows: list[tuple[str, str]], num_rows: int, problem: str, advice: str) -> None:
    raise DataError("\n".join([f"{len(rows)} of {num_rows} rows {problem}:", *_listed(rows), advice]))


def _listed(rows: list[tuple[str, str]]) -> list[str]:
    lines = [f"  {source}: {reason}" for source, reason in rows[:_NUM_LISTED]]
    return lines + ([f"  and {len(rows) - _NUM_LISTED} more"] if len(rows) > _NUM_LISTED else [])


def _to_bytes(text: str) -> Callable[[int], int]:
    """From places in characters to places in UTF-8 bytes; places outside the text go to its ends."""
    if text.isascii():
        return lambda place: min(max(place, 0), len(text))
    return lambda place: len(text[: max(place, 0)].encode())


def _summarise(report: EncodeReport, examples: list[Example], encoder: _RowEncoder) -> None:
    lengths = sorted(example.num_tokens for example in examples)
    median, most, nearly_all = (lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.9, 0.99))
    report.lengths = (median, most, nearly_all, lengths[-1])
    report.num_examples = len(examples)
    report.num_tokens = sum(lengths)
    report.num_learnt = sum(example.num_learnt for example in examples)
    report.num_truncated, report.num_splits = encoder.num_truncated, encoder.num_splits
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.input_ids).to_bytes(8, "little"))
        digest.update(example.input_ids.tobytes())
        digest.update(example.labels.tobytes())
    report.sha256 = digest.hexdigest()
    if report.num_splits:
        report.warnings.append(
            "answers that begin inside a token of the whole text, which is cut there as in generation: "
            f"{report.num_splits}"
        )
    for text, count in encoder.warnings.items():
        shown = ", ".join(encoder.first_sources[text]) + (", ..." if count > _NUM_SOURCES else "")
        report.warnings.append(f"{text}: {count} rows ({shown})")
