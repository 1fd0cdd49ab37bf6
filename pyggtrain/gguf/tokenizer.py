"""Text to token ids and back, by llama.cpp itself: the ids that llama-server would use for the same file."""

import os
from collections.abc import Sequence

from pyggtrain import _bridge
from pyggtrain.gguf.file import GGUFFile

# llama_token_type: unknown, control, user-defined.
_SPECIAL_TYPES = (2, 3, 4)


class Tokenizer:
    """The tokenizer of one GGUF file. Reads no weights. Safe to share between threads.

    Args:
        path: the GGUF file.

    Attributes:
        bos_id, eos_id, eot_id: ids of the begin-of-sequence, end-of-sequence and end-of-turn tokens, or None where
            the file has none.
        add_bos, add_eos: whether the file asks for them around plain text (``add_special=True`` follows this).
        chat_template: the file's default jinja template, or None.
        chat_templates: its further templates by name (tool_use, rag, ...).

    Raises:
        GGUFError: not a readable GGUF file.
        BridgeError: llama.cpp does not know this tokenizer; the message holds its reason.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = GGUFFile(path)
        self.chat_template = self._file.chat_template
        self.chat_templates = self._file.chat_templates
        self._tokenizer = _bridge.Tokenizer(os.fspath(self._file.path))
        self.num_tokens = self._tokenizer.num_tokens
        self.bos_id = _id_or_none(self._tokenizer.bos_id)
        self.eos_id = _id_or_none(self._tokenizer.eos_id)
        self.eot_id = _id_or_none(self._tokenizer.eot_id)
        self.add_bos = self._tokenizer.add_bos
        self.add_eos = self._tokenizer.add_eos

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Same as the constructor; reads better at call sites."""
        return cls(path)

    @property
    def model(self) -> str:
        """Kind of the tokenizer (tokenizer.ggml.model): gpt2, llama, ..."""
        return str(self._file.metadata.get("tokenizer.ggml.model", ""))

    @property
    def pre(self) -> str:
        """How texts are split before (tokenizer.ggml.pre); empty where the file does not say."""
        return str(self._file.metadata.get("tokenizer.ggml.pre", ""))

    @property
    def special_texts(self) -> list[str]:
        """Texts of the tokens that are taken out of a text before it is split: all but normal, unused and byte ones."""
        tokens, types = (self._file.metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
        assert isinstance(tokens, list) and isinstance(types, list), "llama.cpp has read them"
        return [str(text) for text, type in zip(tokens, types, strict=False) if type in _SPECIAL_TYPES]

    @property
    def end_of_turn_id(self) -> int | None:
        """The token with which the model ends a turn, by the file's own word: its eot_token_id where it names one, else
        its EOS. `eot_id` is llama.cpp's guess where the file is silent."""
        return self.eot_id if "tokenizer.ggml.eot_token_id" in self._file.metadata else self.eos_id

    @property
    def header_sha256(self) -> str:
        """SHA-256 (hex) of the file's header, which holds tokenizer and templates."""
        return self._file.header_sha256

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: add BOS / EOS where the file's own settings ask for it.
            parse_special: read the text of control tokens (``<|im_end|>``) as those tokens; otherwise it is ordinary
                text.
        """
        return self._tokenizer.encode(text.encode("utf-8"), add_special, parse_special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`; control tokens appear only with ``special=True``. Bytes that form no character become
        U+FFFD.
        """
        return self._tokenizer.decode(ids, False, special).decode("utf-8", "replace")

    def piece(self, id: int, *, special: bool = True) -> bytes:
        """The bytes that one token stands for; a control token's text, or nothing with ``special=False``."""
        return self._tokenizer.piece(id, special)

    def is_end_of_generation(self, id: int) -> bool:
        """Whether llama.cpp stops when it generates this token."""
        return self._tokenizer.is_end_of_generation(id)

    def is_control(self, id: int) -> bool:
        return self._tokenizer.is_control(id)


def _id_or_none(id: int) -> int | None:
    return id if id >= 0 else None
