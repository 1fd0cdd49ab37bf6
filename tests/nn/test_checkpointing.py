"""nn.checkpointing: what is computed twice under each policy. Equal gradients: tests/models/test_llama.py."""

import pytest
import torch

from pyggtrain import adapters, models
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch, run_layer
from pyggtrain.ops import quant_matmul

NUM_LAYERS, LINEARS_PER_LAYER = 2, 7


@pytest.mark.parametrize(
    ("policy", "num_recomputed"),
    # Gate and up under "matmuls"; what ends a half (attn_output, ffn_down) is no half's own business.
    [("none", 0), ("matmuls", NUM_LAYERS * 2), ("layers", NUM_LAYERS * (LINEARS_PER_LAYER - 2))],
)
def test_products_computed_again(tiny_llama_path, monkeypatch, policy, num_recomputed):
    model = models.load(GGUFFile.open(tiny_llama_path))
    adapters.attach(model, adapters.LoraConfig(r=2), seed=0)
    model.checkpoint_policy = policy
    calls = []
    forward = quant_matmul.forward

    def counted(x, blocks, *args, **options):
        calls.append(blocks.shape)
        return forward(x, blocks, *args, **options)

    monkeypatch.setattr(quant_matmul, "forward", counted)
    loss, _ = model.loss(Batch.from_documents([(list(range(20)), list(range(20)))]))
    num_forward = len(calls)
    assert num_forward == NUM_LAYERS * LINEARS_PER_LAYER + 1
    loss.backward()
    assert len(calls) - num_forward == num_recomputed


@pytest.mark.parametrize("policy", ["none", "matmuls", "layers"])
def test_less_is_kept(tiny_llama_path, policy):
    """Bytes that autograd itself holds between forward and backward."""
    model = models.load(GGUFFile.open(tiny_llama_path))
    adapters.attach(model, adapters.LoraConfig(r=2), seed=0)
    model.checkpoint_policy = policy
    held = set()

    def pack(tensor):
        held.add((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(Batch.from_documents([(list(range(96)), list(range(96)))]))
    num_bytes = sum(size for _, size in held)
    one_activation = 96 * 64 * 4
    # Of each layer: inputs of both halves, q k v and attention's output (3 together), gate and up (1.5 each); adapters.
    least, most = {"none": (9, 11), "matmuls": (6, 8), "layers": (2, 4)}[policy]
    assert 2 * least * one_activation < num_bytes < 2 * most * one_activation


def test_nothing_is_kept_without_gradients():
    calls = []

    def layer(x):
        calls.append(torch.is_grad_enabled())
        return x

    with torch.no_grad():
        run_layer(layer, torch.ones(1), policy="layers")
    assert calls == [False]


def test_unknown_policy_lists_the_known_ones():
    with pytest.raises(ValueError, match="needed one of none, matmuls, layers"):
        run_layer(torch.sin, torch.ones(1), policy="some")
