"""Token ids of texts, word by word, each word tokenised by llama.cpp once and then remembered.

llama.cpp takes 2 µs for a token, most of it for splitting the text by its regular expressions, and a data set holds the
same words again and again. For the pre-tokenizers listed here a text may be cut at two kinds of places, between
printable ASCII characters:

* before a single space. Whatever is matched before it ends in the character there, whatever follows begins with the
  space, no expression looks back, and what one looks ahead at is the space itself.
* behind a single line break, unless "/" follows (some expressions take that along). The break is matched with what
  stands before it, or by itself, whether a character or the end of the text follows.

So the ids of the parts, one after another, are those of the whole. (SuperBPE's expressions, which do not split at
spaces at all, are why this is a list.)

Special tokens are taken out of a text before it is split. Those that hold a printable character before a blank, or
begin with letters, would reach over a cut; with such ones words are not used. Some take the blanks beside them, so
nothing is cut before a space behind a special token, nor between a line break and one.
"""

import re
from collections.abc import Callable, Iterable

from pyggtrain.gguf.tokenizer import Tokenizer

PRE_TOKENIZERS = frozenset(
    {
        # 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S), some with each digit apart first
        *("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "mellum", "modern-bert"),
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        # (?i:'s|...)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe"),
        *("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "qwen35", "chatglm-bpe", "glm4"),
        # The same with upper and lower case apart.
        *("gpt-4o", "llama4", "tekken"),
    }
)
"""Values of tokenizer.ggml.pre whose expressions were read in llama.cpp's src/llama-vocab.cpp (commit 0c1e57098)."""

_PRINTABLE = "".join(map(chr, range(33, 127)))
_MAX_WORD_CHARS, _MAX_WORDS = 128, 1 << 17


class Words:
    """Encodes texts word by word.

    Args:
        encode: tokenises a text as llama.cpp does, special tokens parsed.
        specials: texts of special tokens.
    """

    def __init__(self, encode: Callable[[str], list[int]], specials: Iterable[str]) -> None:
        self._encode = encode
        first, last = {"/"}, set()
        for text in specials:
            first.add(text[:1])
            last.add(text[-1:])
        before_space, behind_break = (
            re.escape("".join(char for char in _PRINTABLE if char not in some)) for some in (last, first)
        )
        self._split = re.compile(f"(?<=[{before_space}])(?= [!-~])|(?<=[!-~]\n)(?=[{behind_break}])").split
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Words | None":
        """Those of a tokenizer, None if its texts cannot be cut."""
        if tokenizer.model != "gpt2" or tokenizer.pre not in PRE_TOKENIZERS:
            return None
        specials = tokenizer.special_texts
        if any(re.search(r"[!-~]\s", text) or text[:1].isalnum() for text in specials):
            return None
        return cls(lambda text: tokenizer.encode(text, parse_special=True), specials)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, the same as of the whole at once."""
        ids: list[int] = []
        known = self._known
        for word in self._split(text):
            found = known.get(word)
            ids += self._learn(word) if found is None else found
        return ids

    def _learn(self, word: str) -> list[int]:
        ids = self._encode(word)
        if len(word) <= _MAX_WORD_CHARS and len(self._known) < _MAX_WORDS:
            self._known[word] = ids
        return ids
