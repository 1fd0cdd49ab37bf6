"""From text to the ids that llama-server makes of it, and from places in the text to tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pyggtrain.data.chat_template import token_text
from pyggtrain.data.samples import BadRowError
from pyggtrain.data.words import Words
from pyggtrain.gguf.tokenizer import Tokenizer

# What SentencePiece writes for a space; the same character typed by a person comes back as a space.
_SPACE_MARK = "\u2581".encode()
# Texts up to this length are remembered, up to this many.
_SHORT_CHARS, _MOST_SHORT_TEXTS = 64, 4096
# Put before a text to keep the tokenizer from adding its leading space; the first that stays apart from the text is
# taken.
_SEPARATORS = ("\n", "|", "=", "0")


@dataclass(frozen=True)
class Tokens:
    """Ids with the bytes of the text that each stands for.

    Attributes:
        ids: token ids.
        starts, ends: span of the UTF-8 text of each token, in bytes. Both are non-decreasing. Tokens that stand for no
            text (BOS, EOS added by the file's rule) have an empty span.
        num_splits: how many requested boundaries lay inside a token, or changed the tokens before them.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]
    num_splits: int = 0


class _Pieces(dict[int, bytes]):
    """The bytes of tokens, remembered: a data set asks for the same ones again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._tokenizer.piece(token)
        return piece


class TextEncoder:
    """Encodes whole texts as llama-server does: control tokens are parsed, in rendered chats and in plain text alike.

    So a control token typed by a person becomes that token, in training as in serving.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        self._eos = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
        self._bos_text = token_text(tokenizer, tokenizer.bos_id) if self._bos else ""
        self._eos_text = token_text(tokenizer, tokenizer.eos_id) if self._eos else ""
        self._pieces = _Pieces(tokenizer)
        self._short_texts: dict[str, list[int]] = {}
        self._controls: dict[int, bool] = {}

    @cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / longest_piece tokens."""
        return max(len(self.tokenizer.piece(token)) for token in range(self.tokenizer.num_tokens))

    def without_added_tokens(self, text: str) -> tuple[str, int]:
        """Take from the text a BOS and an EOS that the tokenizer adds by itself; llama-server does so
        (common/chat.cpp).

        Returns:
            the text and the number of characters taken from its beginning.
        """
        num_taken = len(self._bos_text) if self._bos_text and text.startswith(self._bos_text) else 0
        text = text[num_taken:]
        if self._eos_text and text.endswith(self._eos_text):
            text = text[: -len(self._eos_text)]
        return text, num_taken

    def prompt(self, text: str) -> list[int]:
        """Ids of a text after which more is to be generated: BOS by the file's rule, never two, and no EOS."""
        text, _ = self.without_added_tokens(text)
        return self._bos + self._encode(text)

    def whole(self, text: str, boundaries: Sequence[int]) -> Tokens:
        """Ids of a rendered conversation, tokenised once, with a token boundary at each place where generation begins.

        Args:
            text: without the special tokens that are added here (`without_added_tokens`).
            boundaries: places in bytes, ascending. Where a token of the one tokenisation reaches over such a place, or
                the tokens before it are not those of the text up to it alone, the text is cut there and the rest
                tokenised by itself: at generation time the prompt's ids are fixed before the first new token.

        Raises:
            BadRowError: the tokens do not reproduce the text.
        """
        data = text.encode()
        ids = self._encode(text)
        starts, ends = self._spans(ids, data)
        # Behind the boundary before: what lies between is settled already.
        settled_byte = settled = num_splits = 0
        for boundary in boundaries:
            index = bisect_left(starts, boundary)
            # A control token ends the text that is tokenised as one, so only what follows the last one can differ.
            first = next((k for k in range(index - 1, settled, -1) if self._is_control(ids[k])), settled)
            before = data[starts[first] if first > settled else settled_byte : boundary].decode()
            fresh = self.continuation(before) if 0 < settled == first else self._encode(before)
            if ids[first:index] != fresh or (index > 0 and ends[index - 1] > boundary):
                num_splits += 1
                ids = ids[:first] + fresh + self.continuation(data[boundary:].decode())
                starts, ends = self._spans(ids, data)
            settled_byte, settled = boundary, first + len(fresh)
        num_bos, num_bytes = len(self._bos), len(data)
        return Tokens(
            self._bos + ids + self._eos,
            [0] * num_bos + starts + [num_bytes] * len(self._eos),
            [0] * num_bos + ends + [num_bytes] * len(self._eos),
            num_splits,
        )

    def continuation(self, text: str) -> list[int]:
        """Ids of a text that follows other text: without BOS and without the space that SentencePiece adds to a
        beginning.

        Raises:
            BadRowError: no ids without an added space were found.
        """
        num_spaces = _num_leading_spaces(text.encode().replace(_SPACE_MARK, b" "))
        ids = self._encode(text)
        if _num_leading_spaces(self._bytes(ids)) <= num_spaces:
            return ids
        if num_spaces and _num_leading_spaces(self._bytes(shorter := self._encode(text[1:]))) == num_spaces:
            # The added space is the text's own first one.
            return shorter
        for separator in _SEPARATORS:
            ids = self._encode(separator + text)
            for count in (1, 2, 3):
                rest = ids[count:]
                stays_apart = self._bytes(ids[:count]) == b" " + separator.encode()
                if stays_apart and _num_leading_spaces(self._bytes(rest)) == num_spaces:
                    return rest
        raise BadRowError(f"the tokenizer adds a space before {text[:20]!r}, which follows other text")

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(map(self._pieces.__getitem__, ids))

    def _is_control(self, token: int) -> bool:
        is_control = self._controls.get(token)
        if is_control is None:
            is_control = self._controls[token] = self.tokenizer.is_control(token)
        return is_control

    @cached_property
    def _words(self) -> Words | None:
        return Words.of(self.tokenizer)

    def _encode(self, text: str) -> list[int]:
        if len(text) > _SHORT_CHARS:
            words = self._words
            return self.tokenizer.encode(text, parse_special=True) if words is None else words.encode(text)
        # What stands between turns is the same in every row.
        ids = self._short_texts.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, parse_special=True)
            if len(self._short_texts) < _MOST_SHORT_TEXTS:
                self._short_texts[text] = ids
        return list(ids)

    def _spans(self, ids: list[int], data: bytes) -> tuple[list[int], list[int]]:
        """Start and end in `data` of each token, verified against the bytes of the tokens."""
        pieces = list(map(self._pieces.__getitem__, ids))
        if b"".join(pieces) == data:
            ends = list(accumulate(map(len, pieces)))
            return [0, *ends[:-1]] if ends else [], ends
        starts: list[int] = []
        ends = []
        position = 0
        for piece in pieces:
            start, end = _match(piece, data, position)
            if end < 0:
                found = data[position : position + 20].decode("utf-8", "replace")
                raise BadRowError(f"the tokenizer does not reproduce the text from {found!r} on (byte {position})")
            starts.append(start)
            ends.append(end)
            position = end
        if data[position:].strip():
            found = data[position : position + 20].decode("utf-8", "replace")
            raise BadRowError(f"the tokenizer leaves out the text from {found!r} on (byte {position})")
        return starts, ends


def _match(piece: bytes, data: bytes, position: int) -> tuple[int, int]:
    """Span of a token's bytes in the text from `position` on, or (-1, -1).

    Allowed differences, both of SentencePiece vocabularies: a space added before a text that begins or follows a
    special token, and blanks left out beside a special token.
    """
    skipped = position
    while True:
        for added in (0, 1) if piece.startswith(b" ") else (0,):
            if (end := _match_spaces(piece[added:], data, skipped)) >= 0:
                return skipped, end
        if data[skipped : skipped + 1] not in (b" ", b"\n", b"\t", b"\r"):
            return -1, -1
        skipped += 1


def _match_spaces(piece: bytes, data: bytes, position: int) -> int:
    """End of `piece` in the text, where a space may also stand for U+2581; -1 if it is not there."""
    for index, byte in enumerate(piece):
        if data.startswith(piece[index : index + 1], position):
            position += 1
        elif byte == ord(" ") and data.startswith(_SPACE_MARK, position):
            position += len(_SPACE_MARK)
        else:
            return -1
    return position


def _num_leading_spaces(data: bytes) -> int:
    return len(data) - len(data.lstrip(b" "))
