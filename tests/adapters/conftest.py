"""Small models with and without a tied head."""

from pathlib import Path

import pytest
import torch

from pyggtrain.gguf import GGUFFile, quantize_tensor, typed_metadata, write_gguf


@pytest.fixture(scope="session")
def tied(tiny_llama_path: Path) -> GGUFFile:
    return GGUFFile.open(tiny_llama_path)


@pytest.fixture(scope="session")
def untied(tied: GGUFFile, tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    """The tiny model with an output head of its own, and rotation factors."""
    path = tmp_path_factory.mktemp("untied") / "untied.gguf"
    extra = [
        quantize_tensor("output.weight", torch.randn(96, 64, generator=torch.Generator().manual_seed(3)), "F32"),
        quantize_tensor("rope_freqs.weight", torch.linspace(1, 8, 8), "F32"),
    ]
    write_gguf(path, typed_metadata(tied), [*tied.tensors.values(), *extra])
    return GGUFFile.open(path)
