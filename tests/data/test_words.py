"""A text tokenised word by word has llama.cpp's ids of the whole."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggtrain.data.tokens import TextEncoder
from pyggtrain.data.words import PRE_TOKENIZERS, Words
from pyggtrain.gguf import Tokenizer

VOCABULARIES = ["llama-bpe", "qwen2", "qwen35", "gpt-2", "mpt", "command-r", "starcoder", "refact"]
OTHERS = ["llama-spm", "gemma-4", "phi-3", "deepseek-llm", "deepseek-coder", "falcon"]

# Pieces that expressions treat in different ways, glued together with and without spaces.
PIECES = [
    *("word", "Word", "WORDS", "don't", "We'LL", "'s", "naïve", "日本", "ﬁ", "e\u0301", "5", "12345", "3.14", "1,000"),
    *(".", "...", "!?", "(", ")", '"', "`", "/", "//", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"),
    *(
        "\n",
        "\r\n",
        "\n\n",
        "\t",
        " ",
        "  ",
        "   ",
        "\u00a0",
        "\u3000",
        "\u200d",
        "👩🏽\u200d🔬",
        "\0",
        "a" * 50,
        "_",
        "{",
        "}:",
    ),
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from([" ", " a", "a "]), st.text(max_size=4))).map(
    "".join
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, name=st.sampled_from(VOCABULARIES))
def test_any_text_has_the_ids_of_the_whole(vocabulary: Callable[[str], Tokenizer], text: str, name: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = vocabulary(name)
    words = Words.of(tokenizer)
    assert words is not None
    wanted = tokenizer.encode(text, parse_special=True)
    assert words.encode(text) == wanted
    # Once more, from what is remembered.
    assert words.encode(text) == wanted


@pytest.mark.parametrize("name", VOCABULARIES)
def test_pages_have_the_ids_of_the_whole(vocabulary: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = vocabulary(name)
    encoder = TextEncoder(tokenizer)
    for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert encoder._encode(text) == tokenizer.encode(text, parse_special=True)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_line_of_llama_cpp_s_own_tests_has_its_ids(
    vocabulary: Callable[[str], Tokenizer], llama_cpp_models: Path, name: str
) -> None:
    lines = (llama_cpp_models / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8")
    tokenizer = vocabulary(name)
    words = Words.of(tokenizer)
    for text in lines.split("\n__ggml_vocab_test__\n"):
        for padded in (text, f"one two {text} three four"):
            assert words.encode(padded) == tokenizer.encode(padded, parse_special=True)


@pytest.mark.parametrize("name", OTHERS)
def test_other_tokenizers_encode_the_whole(vocabulary: Callable[[str], Tokenizer], name: str) -> None:
    assert Words.of(vocabulary(name)) is None


def test_special_tokens_that_reach_over_a_cut_forbid_words(vocabulary: Callable[[str], Tokenizer], monkeypatch) -> None:
    tokenizer = vocabulary("gpt-2")
    for text in ("[A B]", "END", "<x> ", "<y>\n"):
        monkeypatch.setattr(Tokenizer, "special_texts", [text])
        assert Words.of(tokenizer) is None
    monkeypatch.setattr(Tokenizer, "special_texts", ["<a>", "[b]"])
    asked = []
    words = Words(lambda text: asked.append(text) or [len(asked)], ["<a>", "[b]"])
    assert words.encode("one <a> two] three. four") == [1, 2, 3]
    assert asked == ["one", " <a> two] three.", " four"]
    asked.clear()
    words.encode("end<a>\nbegin\n<a>\n/x\n\ny")
    assert asked == ["end<a>\n", "begin\n<a>\n/x\n\ny"]


def test_words_are_asked_for_once_and_long_ones_are_not_kept() -> None:
    asked: list[str] = []
    words = Words(lambda text: asked.append(text) or [len(text)], [])
    for _ in range(3):
        words.encode("say it again and say it " + "x" * 200)
    assert asked.count(" say") == asked.count(" it") == asked.count("say") == 1
    assert asked.count(" " + "x" * 200) == 3


def test_every_pre_tokenizer_named_is_one_that_llama_cpp_knows(llama_cpp_models: Path) -> None:
    source = (llama_cpp_models.parent / "src" / "llama-vocab.cpp").read_text(encoding="utf-8")
    assert set(re.findall(r'tokenizer_pre == "([^"]+)"', source)) >= PRE_TOKENIZERS
