"""A small model that can chat, and chats to train it on."""

import json
from pathlib import Path

import pytest
import torch

from pyggtrain.gguf import GGUFFile, quantize_tensor, typed_metadata, write_gguf

FOLDER_NAME = "тест 日本 é"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory, tiny_llama_path, smollm2) -> Path:
    """The tiny random llama with SmolLM2's tokenizer, template and an embedding of that size."""
    path = tmp_path_factory.mktemp(FOLDER_NAME) / "модель 模型.gguf"
    tiny = GGUFFile.open(tiny_llama_path)
    metadata = {name: value for name, value in typed_metadata(tiny).items() if not name.startswith("tokenizer.")}
    metadata |= {name: value for name, value in typed_metadata(smollm2).items() if name.startswith("tokenizer.")}
    metadata["llama.vocab_size"] = smollm2.metadata["llama.vocab_size"]
    embedding = torch.randn(metadata["llama.vocab_size"], 64, generator=torch.Generator().manual_seed(3))
    tensors = [tensor for tensor in tiny.tensors.values() if tensor.name != "token_embd.weight"]
    write_gguf(path, metadata, [quantize_tensor("token_embd.weight", embedding, "F32"), *tensors])
    return path


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(FOLDER_NAME) / "чат.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {number}."},
                {"role": "assistant", "content": " ".join("one" for _ in range(number))},
            ]
        }
        for number in range(1, 25)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
