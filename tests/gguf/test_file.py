"""What a file tells about itself."""

import hashlib
import json

from pyggtrain.gguf import GGUFFile, TypedValue, file, write_gguf


def test_the_hash_of_a_tokenizer_is_that_of_its_keys_as_json(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "_HASHED_AT_A_TIME", 3)
    keys = {
        "tokenizer.b": ["a", '"quoted"', "é\n", "日本", "\x00", "😀", ""],
        "tokenizer.a": 'line\n"é日😀\\ and more',
        "tokenizer.c": TypedValue("arr[f32]", [0.5, -1.0, 3.0, 1e9]),
        "tokenizer.d": True,
        "tokenizer.e": TypedValue("arr[str]", []),
        "tokenizer.f": "",
        "tokenizer.chat_template": "left out",
        "general.name": "left out",
    }
    write_gguf(tmp_path / "m.gguf", keys, [])
    found = GGUFFile.open(tmp_path / "m.gguf")
    hashed = {f"tokenizer.{letter}": found.metadata[f"tokenizer.{letter}"] for letter in "abcdef"}
    expected = hashlib.sha256(json.dumps(hashed, ensure_ascii=False).encode()).hexdigest()
    assert found.tokenizer_sha256 == expected


def test_sample_hash_sees_weights_that_the_header_does_not(tiny_llama_path, tmp_path):
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(tiny_llama_path.read_bytes())
    base, other = GGUFFile.open(tiny_llama_path), GGUFFile.open(changed)
    assert base.sample_sha256 == other.sample_sha256
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    assert GGUFFile.open(changed).header_sha256 == base.header_sha256
    assert GGUFFile.open(changed).sample_sha256 != base.sample_sha256
