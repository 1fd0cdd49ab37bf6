"""Tiny models whose layers are the two halves that `ops.fused` knows, without what llama.cpp's fixture adds to all of
its models (a scale of its own for each matrix).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.gguf import GGUFFile, QuantTensor, quantize_tensor, write_gguf
from pyggtrain.graph import model as graph_model
from pyggtrain.graph.half import Half
from pyggtrain.graph.halves import find_halves
from pyggtrain.graph.importer import import_steps
from pyggtrain.graph.ir import Graph
from pyggtrain.graph.model import ImportedModel, training_graph
from pyggtrain.graph.weights import Weights
from pyggtrain.nn import Batch
from pyggtrain.ops.fused import Kept

WIDTH, HEADS, KV_HEADS, HEAD, FF, VOCAB = 64, 4, 2, 16, 96, 96
QKV = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
COMMON = {
    "attn_norm.weight": (WIDTH,),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
    "ffn_norm.weight": (WIDTH,),
    "ffn_down.weight": (WIDTH, FF),
}
DENSE = {
    **COMMON,
    **{f"{name}.weight": (size, WIDTH) for name, size in QKV.items()},
    "ffn_gate.weight": (FF, WIDTH),
    "ffn_up.weight": (FF, WIDTH),
}
BIASES = {f"{name}.bias": (size,) for name, size in QKV.items()}
HEAD_NORMS = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
# Architecture -> (metadata, tensors of each layer).
LAYERS: dict[str, tuple[dict[str, object], dict[str, tuple[int, ...]]]] = {
    "llama": ({}, DENSE),
    "qwen2": ({}, DENSE | BIASES),
    "qwen3": ({"attention.key_length": HEAD, "attention.value_length": HEAD}, DENSE | HEAD_NORMS),
    # One matrix for q, k and v, and one for gate and up.
    "phi3": (
        {"attention.sliding_window": 0},
        COMMON | {"attn_qkv.weight": (sum(QKV.values()), WIDTH), "ffn_up.weight": (2 * FF, WIDTH)},
    ),
}


def write_dense(path: Path, architecture: str) -> Path:
    """Two of these layers."""
    return write_two_layers(path, architecture, *LAYERS[architecture])


def write_two_layers(
    path: Path, architecture: str, keys: Mapping[str, object], inside: Mapping[str, tuple[int, ...]]
) -> Path:
    """Two layers with random weights near real scale, all F32.

    Args:
        path: file to write.
        architecture: `general.architecture`.
        keys: metadata besides what all have, or instead of it; without the architecture's name before it.
        inside: tensors of each layer.
    """
    generator = torch.Generator().manual_seed(1)

    def tensor(name: str, shape: tuple[int, ...]) -> QuantTensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name != "token_embd.weight" and not name.endswith("bias"):
            values = 1.2 * values / shape[-1] ** 0.5
        return quantize_tensor(name, values, "F32")

    outside = {"token_embd.weight": (VOCAB, WIDTH), "output.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes = outside | {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in inside.items()}
    metadata = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
        **keys,
    }
    typed = {f"{architecture}.{key}": value for key, value in metadata.items()}
    write_gguf(
        path,
        {"general.architecture": architecture, **typed, "tokenizer.ggml.model": "no_vocab"},
        [tensor(name, shape) for name, shape in shapes.items()],
    )
    return path


def halves_in(path: Path, change: Callable[[Graph], Graph] = lambda graph: graph) -> list[Half]:
    """The halves of a file's graph, changed first."""
    file = GGUFFile.open(path)
    graph, reach = training_graph(file)
    weights = Weights(nn.Module(), file, device="cpu", compute="auto")
    import_steps(graph, reach, weights, compute="auto")
    return find_halves(change(graph), weights)


def loaded(path: Path, halves_of: str | None) -> ImportedModel:
    """A file's graph as a model that runs the halves of a "gpu" (in Triton's interpreter), of a "cpu", or none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_model, "can_run_fused", lambda dtype, device: halves_of == "gpu")
        if halves_of is None:
            patch.setattr(graph_model, "find_halves", lambda graph, weights: [])
        return ImportedModel(GGUFFile.open(path))


def trained(
    model: ImportedModel,
    *,
    kept: list[Kept] | None = None,
    policy: str = "none",
    dropout: float = 0.0,
    batch: Batch | None = None,
) -> list[torch.Tensor]:
    """The loss of a batch (two documents of 24 tokens), and the gradients of pairs on all linears."""
    adapter = attach(model, LoraConfig(r=2, lora_alpha=3.0, lora_dropout=dropout), seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.lora_b.data = torch.randn(pair.lora_b.shape, generator=generator) * 0.2
    model.kept, model.checkpoint_policy = kept, policy
    if batch is None:
        tokens = torch.randint(1, VOCAB, (24,), generator=generator).tolist()
        labels = [-100 if place % 3 == 0 else token for place, token in enumerate(tokens)]
        batch = Batch.from_documents([(tokens[:15], labels[:15]), (tokens[15:], labels[15:])])
    torch.manual_seed(2)
    loss, num_targets = model.loss(batch)
    assert num_targets == batch.num_targets
    return [loss.detach(), *torch.autograd.grad(loss, adapter.parameters())]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Losses and gradients that differ by rounding alone."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.abs().max()))
