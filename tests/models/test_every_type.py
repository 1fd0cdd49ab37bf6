"""One file with all tensor types in it: computed as llama.cpp computes it, and trained."""

from itertools import product
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge, models
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.gguf import GGUFFile, QuantTensor, TypedValue, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.nn import Batch
from pyggtrain.validation.difference import compare_logits
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings

TYPES = sorted(_bridge.quant_types())
WIDTH, VOCAB, LAYERS = 256, 96, 4
KINDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TOKENS = [1, 5, 9, 70, 3, 95, 0, 44, 21, 8]


@pytest.fixture(scope="module")
def path(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `llama` of 4 layers whose 28 linears have the 28 types, under a name and a file type that lie."""
    generator = torch.Generator().manual_seed(0)

    def matrix(name: str, rows: int, type: str) -> QuantTensor:
        imatrix = torch.ones(WIDTH) if _bridge.quant_types()[type].needs_imatrix else None
        return quantize_tensor(name, torch.randn(rows, WIDTH, generator=generator) / 16, type, imatrix=imatrix)

    names = [f"blk.{layer}.{kind}.weight" for layer, kind in product(range(LAYERS), KINDS)]
    assert len(names) == len(TYPES)
    norms = [f"blk.{layer}.{kind}_norm.weight" for layer, kind in product(range(LAYERS), ("attn", "ffn"))]
    tensors = [
        matrix("token_embd.weight", VOCAB, "Q6_K"),
        *(quantize_tensor(name, torch.ones(WIDTH), "F32") for name in ("output_norm.weight", *norms)),
        *(matrix(name, WIDTH, type) for name, type in zip(names, TYPES, strict=True)),
    ]
    numbers = {
        "block_count": LAYERS,
        "embedding_length": WIDTH,
        "feed_forward_length": WIDTH,
        "attention.head_count_kv": 4,
        "rope.dimension_count": WIDTH // 4,
    }
    metadata = typed_metadata(GGUFFile(tiny_llama_path)) | {
        "general.file_type": TypedValue("u32", 7),
        **{f"llama.{key}": TypedValue("u32", value) for key, value in numbers.items()},
    }
    path = tmp_path_factory.mktemp("types") / "model-Q8_0.gguf"
    write_gguf(path, metadata, tensors)
    return path


@pytest.mark.parametrize("implementation", ["native", "graph"])
def test_logits_are_llama_cpp_s_without_the_rounding_of_activations(path: Path, implementation: str) -> None:
    model = models.load(GGUFFile(path), implementation=implementation, compute="exact")
    with torch.no_grad():
        ours = model.logits(Batch.from_documents([(TOKENS, TOKENS)]))
    settings = RuntimeSettings(num_ctx=32, num_ubatch=32, exact_products=True)
    difference = compare_logits(BridgeRuntime(path, settings).logits(TOKENS), ours)
    assert difference.max_abs < 1e-3 * difference.reference_rms and difference.mean_kl < 1e-6


@pytest.mark.parametrize("compute", ["exact", "auto"])
def test_training_moves_a_pair_on_every_type(path: Path, compute: str) -> None:
    file = GGUFFile(path)
    model = models.load(file, compute=compute)
    adapter = attach(model, LoraConfig(r=4, lora_alpha=8.0), seed=0)
    assert {file.tensor_infos[name].type for name in adapter.pairs} == set(TYPES)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss, num_targets = model.loss(Batch.from_documents([(TOKENS, TOKENS)]))
        losses.append(loss.item() / num_targets)
        loss.div(num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1
    assert all(bool(pair.lora_b.any()) and bool(pair.lora_b.isfinite().all()) for pair in adapter.pairs.values())
