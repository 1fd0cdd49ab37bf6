"""Text to token ids and back, by llama.cpp itself: the ids that llama-server would use for the same file."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf.file import GGUFFile

_CHECK = "import sys; from pyggtrain import _bridge; _bridge.check_vocabulary(sys.argv[1])"
_TIMEOUT_S = 600


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


def check_vocabulary(path: Path) -> None:
    """Let llama.cpp read a file's metadata and vocabulary in a child process, which it may abort: 0.2 s or so.

    llama.cpp asserts what it expects of a file, and an assertion ends the process that it runs in. Afterwards the same
    file can be given to it here.

    Raises:
        GGUFError: llama.cpp aborted or refused, with its reason.
    """
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    if search_path := environment.get("PYTHONPATH"):
        # The child works elsewhere, so that no folder shadows the package.
        folders = [os.path.abspath(folder) for folder in search_path.split(os.pathsep) if folder]
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _CHECK, os.path.abspath(path)]
        try:
            child = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise GGUFError(f"{path}: llama.cpp was still reading its vocabulary after {_TIMEOUT_S} s.") from None
    if child.returncode:
        reason = " ".join(child.stderr.decode(errors="replace").splitlines()[-3:]).strip()
        how = f"aborts (signal {-child.returncode})" if child.returncode < 0 else "gives up"
        raise GGUFError(
            f"{path}: llama.cpp {how} when it reads this file's metadata and vocabulary: {reason}. "
            "Convert the model again, or take it from another source."
        )


def _id_or_none(id: int) -> int | None:
    return id if id >= 0 else None
