"""One row to token ids with labels.

A conversation is rendered once by the model's chat template and tokenised once, so its ids are those that llama-server
gives for the same messages; labels cover what the assistant wrote and the token that ends its turn. A prompt and its
completion are tokenised apart, as at generation time. A document is learnt whole.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pyggtrain.data.chat_template import ChatTemplate, merge_system, token_text
from pyggtrain.data.examples import NOT_LEARNT, Example, ExamplePair
from pyggtrain.data.formats import FORMATS, matching_formats
from pyggtrain.data.report import RowCounts
from pyggtrain.data.rows import Row
from pyggtrain.data.samples import BadRowError, Conversation, Document, Preference, PromptCompletion, Sample
from pyggtrain.data.settings import DataSettings
from pyggtrain.data.tokens import TextEncoder
from pyggtrain.data.turns import Turn, render_turns
from pyggtrain.gguf.tokenizer import Tokenizer

_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")


class TooLongError(Exception):
    """A row has more tokens than allowed."""


class RowEncoder:
    """Encodes rows one by one and keeps count of what it had to decide.

    Args:
        tokenizer: of the model.
        settings: how rows become examples.
        chat_template: instead of the one in the model's file; used for conversations only.
        as_pairs: rows are preferences, and each gives two examples.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: DataSettings,
        chat_template: ChatTemplate | None = None,
        *,
        as_pairs: bool = False,
    ) -> None:
        self.settings = settings
        self._tokenizer = tokenizer
        self._template = chat_template
        self._as_pairs = as_pairs
        self._encoder = TextEncoder(tokenizer)
        self._counts = RowCounts()
        # Of the row in hand, counted once it is kept; a dict keeps the order in which they came up.
        self._row_warnings: dict[str, None] = {}
        self._row_splits = self._row_truncated = 0

    def encode_chunk(self, rows: Sequence[tuple[Row, str]]) -> tuple[list[Example], RowCounts]:
        """Encode rows, each with the name of its format. A preference gives two examples, chosen before rejected."""
        examples: list[Example] = []
        counts = self._counts = RowCounts()
        for row, format in rows:
            counts.num_rows += 1
            counts.num_rows_of[format] += 1
            try:
                examples += self.encode(row, format)
            except TooLongError as error:
                counts.too_long.append((row.source, str(error)))
            except BadRowError as error:
                counts.bad.append((row.source, str(error)))
        counts.num_bad, counts.num_too_long = len(counts.bad), len(counts.too_long)
        return examples, counts

    def encode(self, row: Row, format: str) -> list[Example]:
        """Examples of one row: one, several if a document is split, or the two of a preference.

        Raises:
            BadRowError: the row cannot be used.
            TooLongError: it is too long and not to be cut.
        """
        if self._as_pairs:
            pair = self.encode_pair(row, format)
            return [pair.chosen, pair.rejected]
        self._begin_row()
        sample = self._parse(row.value, format)
        if isinstance(sample, Preference):
            raise BadRowError(
                "the row is a preference pair (chosen, rejected), which only a preference loss such as DPO or ORPO "
                "learns from"
            )
        examples = self._examples(sample, row)
        self._count_row(row)
        return examples

    def encode_pair(self, row: Row, format: str) -> ExamplePair:
        """The two examples of a row of preferences; both have the same prompt.

        Raises:
            BadRowError: the row cannot be used.
            TooLongError: one of the two is too long and not to be cut.
        """
        self._begin_row()
        sample = self._parse(row.value, format)
        if not isinstance(sample, Preference):
            raise BadRowError(f"a preference loss needs rows with 'chosen' and 'rejected'; this one is {format}")
        chosen, rejected = (self._examples(answer, row)[0] for answer in (sample.chosen, sample.rejected))
        if chosen.input_ids == rejected.input_ids:
            raise BadRowError("'chosen' and 'rejected' have the same tokens, so there is nothing to prefer")
        if _prompt_ids(chosen) != _prompt_ids(rejected):
            self._warn("the prompt's tokens differ before the chosen and the rejected answer")
        self._count_row(row)
        return ExamplePair(chosen, rejected)

    def _begin_row(self) -> None:
        self._row_warnings.clear()
        self._row_splits = self._row_truncated = 0

    def _count_row(self, row: Row) -> None:
        """Count what was decided about a row that is kept."""
        for warning in self._row_warnings:
            self._counts.add_warning(warning, row.source)
        self._counts.num_splits += self._row_splits
        self._counts.num_truncated += self._row_truncated

    def whole(self, row: Row, format: str) -> list[Example]:
        """One row as it is before the policy for long rows: one example, or two of a preference.

        Raises:
            BadRowError: the row cannot be used.
        """
        sample = self._parse(row.value, format)
        answers = (sample.chosen, sample.rejected) if isinstance(sample, Preference) else (sample,)
        return [Example(*self._ids_and_labels(answer), row.source) for answer in answers]

    def _examples(self, sample: Conversation | PromptCompletion | Document, row: Row) -> list[Example]:
        ids, labels = self._ids_and_labels(sample)
        pieces = self._fitted(ids, labels, is_document=isinstance(sample, Document))
        self._row_truncated |= len(pieces) == 1 and len(pieces[0][0]) < len(ids)
        return [Example(piece_ids, piece_labels, row.source) for piece_ids, piece_labels in pieces]

    def _ids_and_labels(self, sample: Conversation | PromptCompletion | Document) -> tuple["array[int]", "array[int]"]:
        if isinstance(sample, Conversation):
            ids, labels = self._conversation(sample)
        elif isinstance(sample, PromptCompletion):
            ids, labels = self._completion(sample)
        else:
            ids, labels = self._document(sample)
        return array("i", ids), array("i", labels)

    def _parse(self, value: dict[str, Any], format: str) -> Sample:
        module = FORMATS[format]
        if missing := [key for key in module.KEYS if key not in value]:
            found = ", ".join(matching_formats(value)) or f"none; its keys are {', '.join(value) or 'none'}"
            raise BadRowError(
                f"{' and '.join(missing)} missing; the file is read as '{format}', this row looks like {found}"
            )
        if media := [key for key in _MEDIA_KEYS if value.get(key)]:
            raise BadRowError(
                f"the row holds {' and '.join(media)}; pyggtrain trains on text only. Leave out such rows"
            )
        if unused := sorted(value.keys() - {*module.KEYS, *module.OPTIONAL_KEYS}):
            self._warn(f"keys not used by format '{format}': {', '.join(unused)}")
        return module.parse(value)

    def _refuse_hopeless(self, num_chars: int) -> None:
        """Refuse a text of many megabytes before it is tokenised, if it is too long whatever its tokens are."""
        limit = self.settings.max_length
        if self.settings.too_long in ("error", "drop") and num_chars > 64 * limit:
            least = num_chars // self._encoder.longest_piece
            if least > limit:
                raise TooLongError(f"at least {least} tokens, limit {limit}")

    def _conversation(self, chat: Conversation) -> tuple[list[int], list[int]]:
        for note in chat.notes:
            self._warn(note)
        template = self._template
        if template is None:
            template = self._template = ChatTemplate.of_model(self._tokenizer)
        if chat.tools and template.for_tools is not None:
            template = template.for_tools
        chat = self._with_system(chat, template)
        if self.settings.learnt_turns == "last":
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
        self._row_splits += tokens.num_splits
        labels = [NOT_LEARNT] * len(tokens.ids)
        for turn in turns:
            first, stop, has_end = self._learnt_tokens(turn, tokens.ids, tokens.starts, tokens.ends)
            labels[first:stop] = tokens.ids[first:stop]
            if has_end:
                continue
            end = self._tokenizer.end_of_turn_id
            if end is not None and turn is turns[-1] and stop == len(tokens.ids):
                self._warn(
                    f"the template writes no end behind the last answer; {token_text(self._tokenizer, end)}, on which "
                    "llama.cpp stops, is put there"
                )
                tokens.ids.append(end)
                labels.append(end)
            else:
                self._warn(
                    "no end-of-generation token follows an assistant turn, so stopping is not taught there: llama.cpp "
                    "does not stop on what the template writes"
                )
        return tokens.ids, labels

    def _with_system(self, chat: Conversation, template: ChatTemplate) -> Conversation:
        if chat.messages[0]["role"] not in ("system", "developer"):
            return chat
        if template.has_system_role:
            if self.settings.merge_system:
                self._warn("merge_system has no effect, since the template has a system role")
            return chat
        if not self.settings.merge_system:
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

    def _learnt_tokens(self, turn: Turn, ids: list[int], starts: list[int], ends: list[int]) -> tuple[int, int, bool]:
        """First token of a turn, the one behind its last, and whether the last one ends generation; the token that ends
        the turn belongs to it."""
        # The first that begins here (it may stand for no byte, as an added space does), or reaches over the place.
        first = min(bisect_left(starts, turn.start), bisect_right(ends, turn.start))
        stop = bisect_left(starts, turn.end, first)
        is_end = self._tokenizer.is_end_of_generation
        # A template that marks what is generated includes the end of the turn, and some the line break behind it.
        if turn.limit == turn.end:
            for index in range(stop - 1, first - 1, -1):
                if is_end(ids[index]):
                    return first, index + 1, True
        for index in range(stop, len(ids)):
            if starts[index] > turn.limit or (starts[index] == turn.limit and ends[index] > turn.limit):
                break
            if is_end(ids[index]):
                return first, index + 1, True
        return first, stop, False

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
        limit, policy = self.settings.max_length, self.settings.too_long
        if len(ids) <= limit:
            stops = [len(ids)]
        elif policy == "truncate":
            stops = [limit]
        elif policy == "split" and is_document:
            stops = [*range(limit, len(ids), limit), len(ids)]
        else:
            raise TooLongError(f"{len(ids)} tokens, limit {limit}")
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


def _to_bytes(text: str) -> Callable[[int], int]:
    """From places in characters to places in UTF-8 bytes; places outside the text go to its ends."""
    if text.isascii():
        return lambda place: min(max(place, 0), len(text))
    return lambda place: len(text[: max(place, 0)].encode())


def _prompt_ids(example: Example) -> "array[int]":
    """The tokens before the first learnt one."""
    first = next(index for index, label in enumerate(example.labels) if label != NOT_LEARNT)
    return example.input_ids[:first]
