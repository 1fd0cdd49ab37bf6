"""Metadata that llama.cpp aborts on is an error here: it is tried in a child process first."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import generate

from pyggtrain import models
from pyggtrain.errors import BridgeError, GGUFError, PyggtrainError
from pyggtrain.gguf import GGUFFile, Tokenizer, TypedValue, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.gguf.readable import check_readable
from pyggtrain.model_info import info

TOKENS = ["a", "b", "ab", "Ġ", "Ċ", "c", "d", "e"]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TypedValue("arr[i32]", [1] * len(TOKENS)),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def write(path: Path, tiny_llama_path: Path, **changes: Any) -> Path:
    metadata = {**typed_metadata(GGUFFile(tiny_llama_path)), **VOCABULARY}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = dict(GGUFFile(tiny_llama_path).tensors)
    tensors["token_embd.weight"] = quantize_tensor("token_embd.weight", torch.randn(len(TOKENS), 64), "F32")
    write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors.values())
    return path


def test_a_good_file_passes(tiny_llama_path: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "good é.gguf", tiny_llama_path)
    check_readable(path)
    assert Tokenizer(path).encode("ab", add_special=False) == [2]


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a token stands twice": ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "a"]}, r"aborts \(signal 6\).*token_to_id"),
    "tokens are numbers": ({"tokenizer__ggml__tokens": [1, 2]}, "cannot read.*invalid gguf type"),
    "fewer types than tokens": (
        {"tokenizer__ggml__token_type": TypedValue("arr[i32]", [1])},
        "cannot read.*Index out of array bounds",
    ),
    "unknown tokenizer": ({"tokenizer__ggml__model": "abacus"}, "cannot read.*unknown tokenizer"),
    "a model name that is a number": ({"tokenizer__ggml__model": 7}, "cannot read"),
    "more experts than llama.cpp has room for": ({"llama__expert_count": 1 << 20}, r"aborts \(signal 6\).*expert"),
    "more layers than there are": ({"llama__block_count": 3}, "cannot read.*not found"),
    "heads that the keys do not fit": ({"llama__attention__head_count": 3}, "aborts|cannot read"),
    "no merges": ({"tokenizer__ggml__merges": None}, "cannot read.*merges"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_llama_cpp_aborts_on_or_refuses_is_an_error(case: str, tiny_llama_path: Path, tmp_path: Path) -> None:
    changes, said = CASES[case]
    path = write(tmp_path / "bad.gguf", tiny_llama_path, **changes)
    with pytest.raises(GGUFError, match=said) as caught:
        check_readable(path)
    assert str(path) in str(caught.value)


# Keys without which llama.cpp refuses a model of experts, or aborts: when it reads the header, or builds the graph.
MISSING = {
    ("qwen3moe", "expert_count"): r"aborts \(signal 6\).*n_expert",
    ("qwen3moe", "expert_used_count"): r"aborts \(signal 6\).*n_expert_used",
    ("qwen3moe", "expert_feed_forward_length"): "cannot read.*tensor",
    ("gpt-oss", "expert_count"): r"aborts \(signal 6\).*n_expert",
    ("gpt-oss", "attention.sliding_window"): "cannot read.*attention.sliding_window",
    ("deepseek2", "rope.dimension_count"): r"aborts \(signal 6\).*n_",
    ("deepseek2", "attention.key_length"): r"llama.cpp aborted while it built the graph \(signal 6\)",
    ("deepseek2", "expert_shared_count"): "cannot read.*expert_shared_count",
}


@pytest.mark.parametrize(("architecture", "key"), MISSING)
def test_a_model_of_experts_without_a_key_is_an_error(architecture: str, key: str, tmp_path: Path) -> None:
    file = GGUFFile.open(generate(architecture, "moe", tmp_path))
    path = tmp_path / "bad.gguf"
    metadata = typed_metadata(file)
    del metadata[f"{architecture}.{key}"]
    write_gguf(path, metadata, file.tensors.values())

    def load() -> None:
        check_readable(path)
        models.load(GGUFFile.open(path))

    with pytest.raises(PyggtrainError, match=f"(?s){MISSING[architecture, key]}") as caught:
        load()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("which", ["bos", "eos"])
def test_a_token_that_shall_be_added_and_is_not_there_is_an_error(
    which: str, tiny_llama_path: Path, tmp_path: Path
) -> None:
    # gpt2's default is token 11, which a vocabulary of eight does not have.
    changes = {f"tokenizer__ggml__{which}_token_id": None, f"tokenizer__ggml__add_{which}_token": True}
    path = write(tmp_path / "bad.gguf", tiny_llama_path, **changes)
    check_readable(path)
    # In a child: without the check in csrc/tokenizer.cpp llama.cpp would end this process.
    code = f"""
from pyggtrain.gguf import Tokenizer
tokenizer = Tokenizer({str(path)!r})
assert tokenizer.encode("ab") == [2]
tokenizer.encode("ab", add_special=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{BridgeError.__name__}: tokenizer.ggml.add_{which}_token is true in a file without" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_a_small_file_that_asks_for_much_memory_is_refused(tiny_llama_path: Path, tmp_path: Path) -> None:
    file = GGUFFile(tiny_llama_path)
    # 5.6 GiB of empty tokens.
    metadata = typed_metadata(file) | {"llama.vocab_size": TypedValue("u32", 150_000_000)}
    write_gguf(tmp_path / "m.gguf", metadata, file.tensors.values())
    with pytest.raises(GGUFError, match=r"cannot read.*std::bad_alloc"):
        check_readable(tmp_path / "m.gguf")
    assert "bad_alloc" in (info(tmp_path / "m.gguf").why_no_graph or "")
