"""Imported models on a GPU against the CPU: one tiny model of each kind; `tests/tiny_models/on_gpu.py` takes all."""

from pathlib import Path

import pytest
import torch
from on_gpu import compare
from tiny_layers import LAYERS, write_layers
from tiny_models import generate

KINDS = [
    *("llama-dense", "gemma3-dense", "gpt-oss-moe", "qwen3moe-moe", "deepseek2-moe", "mamba2-dense"),
    *("falcon-h1-dense", "qwen3next-moe", "rwkv6-dense", "mpt-dense"),
]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", KINDS)
def test_a_gpu_gives_logits_and_gradients_of_the_cpu(name: str, tmp_path: Path) -> None:
    found = compare(generate(*name.rsplit("-", 1), tmp_path))
    assert found.is_small, found


@pytest.mark.parametrize("architecture", LAYERS)
def test_fused_layers_give_logits_and_gradients_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    found = compare(write_layers(tmp_path / f"{architecture}.gguf", architecture, LAYERS[architecture]))
    assert found.is_small and found.is_fused, found
