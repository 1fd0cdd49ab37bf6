from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggtrain.data.samples import BadRowError
from pyggtrain.data.tokens import TextEncoder
from pyggtrain.errors import BridgeError
from pyggtrain.gguf import GGUFFile, Tokenizer, typed_metadata, write_gguf

VOCABULARIES = ["llama-bpe", "llama-spm", "gemma-4", "phi-3", "qwen2", "command-r", "deepseek-llm", "gpt-2"]
TEXTS = [
    "",
    " ",
    "plain",
    " two  spaces and\ttab \n\n\n",
    "naïve façade 👩🏽\u200d🔬 日本語 12345",
    "\u2581 typed by a person",
    "NUL \0 inside",
    "<s>[INST] hi [/INST] b</s> \n x<|im_end|>\n<|end|> \n y<|eot_id|>",
]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_token_is_mapped_to_its_bytes(vocabulary: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = vocabulary(name)
    encoder = TextEncoder(tokenizer)
    for text in TEXTS:
        tokens = encoder.whole(text, [])
        data = text.encode()
        assert tokens.ids == tokenizer.encode(text, add_special=True, parse_special=True)
        assert tokens.starts == sorted(tokens.starts)
        assert tokens.ends == sorted(tokens.ends)
        covered = bytearray(len(data))
        for token, start, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True):
            piece = tokenizer.piece(token).replace(b" ", b"")
            assert data[start:end].replace(b"\xe2\x96\x81", b" ").replace(b" ", b"") in (piece, b"")
            covered[start:end] = b"x" * (end - start)
        missed = bytes(byte for byte, seen in zip(data, covered, strict=True) if not seen)
        assert missed.strip() == b""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])), name=st.sampled_from(["llama-spm", "qwen2", "gemma-4"]))
def test_any_text_is_mapped(vocabulary: Callable[[str], Tokenizer], text: str, name: str) -> None:
    tokens = TextEncoder(vocabulary(name)).whole(text, [])
    assert tokens.ends[-1:] in ([len(text.encode())], [])


@pytest.mark.parametrize(("name", "num_bos"), [("llama-bpe", 1), ("qwen2", 0), ("gemma-4", 1), ("llama-spm", 1)])
def test_bos_is_there_once_or_not_at_all(vocabulary: Callable[[str], Tokenizer], name: str, num_bos: int) -> None:
    tokenizer = vocabulary(name)
    assert tokenizer.bos_id is not None
    encoder = TextEncoder(tokenizer)
    bos = tokenizer.piece(tokenizer.bos_id).decode()
    assert encoder.prompt("hello").count(tokenizer.bos_id) == num_bos
    # A text that itself begins with the BOS string: one where the file adds one, and the text's own where it does not.
    assert encoder.prompt(bos + "hello").count(tokenizer.bos_id) == 1
    assert encoder.prompt(bos + "hello")[-1] == encoder.prompt("hello")[-1]


def test_control_tokens_in_a_text_become_those_tokens_and_unknown_ones_do_not(
    vocabulary: Callable[[str], Tokenizer],
) -> None:
    """As in llama-server, which parses them in prompts; a token that the file lacks is ordinary text."""
    tokenizer = vocabulary("qwen2")
    ids = TextEncoder(tokenizer).prompt("a<|im_end|><|my_tool|>")
    assert tokenizer.eot_id in ids
    assert len(ids) > 4
    assert b"".join(tokenizer.piece(token) for token in ids) == b"a<|im_end|><|my_tool|>"


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("text", ["count()", " b", "  b", "\nb", "中文", "<|im_end|>", "0", "=x", "|"])
def test_continuation_has_no_added_space(vocabulary: Callable[[str], Tokenizer], name: str, text: str) -> None:
    tokenizer = vocabulary(name)
    encoder = TextEncoder(tokenizer)
    written = b"".join(tokenizer.piece(token) for token in encoder.continuation(text))
    assert written == text.encode()


def test_text_is_cut_where_a_token_reaches_over_a_boundary(vocabulary: Callable[[str], Tokenizer]) -> None:
    tokenizer = vocabulary("qwen2")
    encoder = TextEncoder(tokenizer)
    text = "assistant\n\nHello"
    boundary = len("assistant\n")
    assert tokenizer.encode(text)[: len(tokenizer.encode("assistant\n"))] != tokenizer.encode("assistant\n")
    tokens = encoder.whole(text, [boundary])
    assert tokens.num_splits == 1
    assert tokens.ids == tokenizer.encode("assistant\n") + tokenizer.encode("\nHello")
    assert boundary in tokens.starts


@pytest.mark.parametrize("name", VOCABULARIES)
def test_each_of_several_boundaries_is_a_token_boundary(vocabulary: Callable[[str], Tokenizer], name: str) -> None:
    encoder = TextEncoder(vocabulary(name))
    text = "user  \n\n unbelievable 123456 \n\n\n  再见 done"
    for step in (2, 3, 5):
        places = [len(text[:place].encode()) for place in range(step, len(text), step)]
        tokens = encoder.whole(text, places)
        assert tokens.num_splits > 0
        assert set(places) <= {*tokens.starts, *tokens.ends}
        assert tokens.ends[-1] == len(text.encode())


def test_boundaries_that_tokens_respect_change_nothing(vocabulary: Callable[[str], Tokenizer]) -> None:
    tokenizer = vocabulary("qwen2")
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    tokens = TextEncoder(tokenizer).whole(text, [text.index("hello")])
    assert (tokens.num_splits, tokens.ids) == (0, tokenizer.encode(text, parse_special=True))


def test_tokenizer_that_changes_the_text_is_refused(vocabulary: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(BadRowError, match="does not reproduce the text from 'Hello"):
        TextEncoder(vocabulary("bert-bge")).whole("Hello World", [])


def test_unknown_pre_tokenizer_stops_and_is_named(smollm2: GGUFFile, tmp_path: Path) -> None:
    """Another one would give other ids, which no loss could show."""
    path = tmp_path / "vocabulary.gguf"
    write_gguf(path, {**typed_metadata(smollm2), "tokenizer.ggml.pre": "of-tomorrow"}, [])
    with pytest.raises(BridgeError, match="of-tomorrow"):
        Tokenizer.from_gguf(path)
