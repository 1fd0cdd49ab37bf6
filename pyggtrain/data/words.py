"""Token ids of texts, word by word, each word tokenised by llama.cpp once and then remembered.

llama.cpp takes 2 µs for a token, most of it for splitting the text by its regular expressions, and a data set holds the
same words again and again. For the pre-tokenizers listed here a text may be cut before a single space between two
printable ASCII characters: none of their expressions matches over such a place. Whatever is matched before it ends in
the character there, whatever follows begins with the space at the latest, no expression looks back, and what they look
ahead at is the space itself. So the ids of the parts, one after another, are those of the whole. (An expression such as
SuperBPE's, which does not split at spaces at all, is why this is a list.)

Special tokens are taken out of a text before it is split. Those that hold a printable character before a space, or
begin with letters, would reach over a cut; with such ones words are not used. After the last character of a special
token nothing is cut: some of them take the spaces that follow.
"""

import re
from collections.abc import Callable

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

_MAX_WORD_CHARS, _MAX_WORDS = 40, 1 << 17


class Words:
    """Encodes texts word by word.

    Args:
        encode: tokenises a text as llama.cpp does, special tokens parsed.
        endings: characters that special tokens end with.
    """

    def __init__(self, encode: Callable[[str], list[int]], endings: str) -> None:
        self._encode = encode
        left = "".join(char for char in map(chr, range(33, 127)) if char not in endings)
        self._split = re.compile(f"(?<=[{re.escape(left)}]) (?=[!-~])").split
        self._known: dict[str, list[int]] = {}
        self._known_first: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Words | None":
        """Those of a tokenizer, None if its texts cannot be cut."""
        if tokenizer.model != "gpt2" or tokenizer.pre not in PRE_TOKENIZERS:
            return None
        specials = tokenizer.special_texts
        if any(re.search("[!-~] ", text) or text[:1].isalnum() for text in specials):
            return None
        return cls(lambda text: tokenizer.encode(text, parse_special=True), "".join({text[-1:] for text in specials}))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, the same as of the whole at once."""
        first, *rest = self._split(text)
        found = self._known_first.get(first)
        ids = list(self._learn(first, first, self._known_first) if found is None else found)
        known = self._known
        for word in rest:
            found = known.get(word)
            ids += self._learn(word, " " + word, known) if found is None else found
        return ids

    def _learn(self, word: str, text: str, known: dict[str, list[int]]) -> list[int]:
        ids = self._encode(text)
        if len(word) <= _MAX_WORD_CHARS and len(known) < _MAX_WORDS:
            known[word] = ids
        return ids
