"""Mixtures of experts: found in the graphs of architectures that have them, equal to the operations they stand for."""

from pathlib import Path

import pytest
import torch

from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.gguf import GGUFFile, QuantTensor, quantize_tensor, write_gguf
from pyggtrain.graph import model as graph_model
from pyggtrain.graph.mixtures import Mixture
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import AttentionHalf, Batch
from pyggtrain.ops.fused import Kept

WIDTH, HEADS, KV_HEADS, HEAD, FF, EXPERTS, CHOSEN, VOCAB = 64, 4, 2, 16, 32, 5, 3, 96
QKV = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
MIXTURE = {
    **{f"{name}.weight": (size, WIDTH) for name, size in QKV.items()},
    "attn_norm.weight": (WIDTH,),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
    "ffn_norm.weight": (WIDTH,),
    "ffn_gate_inp.weight": (EXPERTS, WIDTH),
    "ffn_gate_exps.weight": (EXPERTS, FF, WIDTH),
    "ffn_up_exps.weight": (EXPERTS, FF, WIDTH),
    "ffn_down_exps.weight": (EXPERTS, WIDTH, FF),
}
SHARED = {
    "ffn_gate_inp_shexp.weight": (WIDTH,),
    "ffn_gate_shexp.weight": (FF, WIDTH),
    "ffn_up_shexp.weight": (FF, WIDTH),
    "ffn_down_shexp.weight": (WIDTH, FF),
}
BIASES = {
    **{f"{name}.bias": (size,) for name, size in QKV.items()},
    "attn_output.bias": (WIDTH,),
    "attn_sinks.weight": (HEADS,),
    "ffn_gate_inp.bias": (EXPERTS,),
    "ffn_gate_exps.bias": (EXPERTS, FF),
    "ffn_up_exps.bias": (EXPERTS, FF),
    "ffn_down_exps.bias": (EXPERTS, WIDTH),
}
HEAD_SIZES = {"attention.key_length": HEAD, "attention.value_length": HEAD}
# Architecture -> (metadata, tensors of each layer).
LAYERS: dict[str, tuple[dict[str, object], dict[str, tuple[int, ...]]]] = {
    "llama": ({"feed_forward_length": FF}, MIXTURE),
    "gpt-oss": (
        {"expert_feed_forward_length": FF, "attention.sliding_window": 8, **HEAD_SIZES},
        {name.replace("ffn_norm", "post_attention_norm"): shape for name, shape in MIXTURE.items()} | BIASES,
    ),
    "qwen2moe": ({"expert_feed_forward_length": FF, "expert_shared_feed_forward_length": FF}, MIXTURE | SHARED),
    "qwen3moe": (
        {"expert_feed_forward_length": FF, **HEAD_SIZES},
        MIXTURE | {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)},
    ),
}


def write_tiny(path: Path, architecture: str) -> Path:
    """Two layers with random weights near real scale, all F32."""
    keys, inside = LAYERS[architecture]
    generator = torch.Generator().manual_seed(1)

    def tensor(name: str, shape: tuple[int, ...]) -> QuantTensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name != "token_embd.weight":
            values = 1.2 * values / shape[-1] ** 0.5
        return quantize_tensor(name, values, "F32")

    outside = {"token_embd.weight": (VOCAB, WIDTH), "output.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes = outside | {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in inside.items()}
    metadata = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD,
        "expert_count": EXPERTS,
        "expert_used_count": CHOSEN,
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


def trained(
    path: Path, *, fused: str | None, kept: list[Kept] | None = None
) -> tuple[ImportedModel, list[torch.Tensor]]:
    """The model, its loss, and the gradients of pairs on all its linears.

    Args:
        path: of the file.
        fused: what runs fused as on a "gpu" (in Triton's interpreter), as on a "cpu", or None.
        kept: of each layer.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_model, "can_run_fused", lambda dtype, device: fused == "gpu")
        if fused is None:
            patch.setattr(graph_model, "find_halves", lambda graph, weights: [])
        model = ImportedModel(GGUFFile.open(path))
    adapter = attach(model, LoraConfig(r=2, lora_alpha=3.0), seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.lora_b.data = torch.randn(pair.lora_b.shape, generator=generator) * 0.2
    model.kept = kept
    tokens = torch.randint(1, VOCAB, (16,), generator=generator).tolist()
    labels = [-100 if place % 3 == 0 else token for place, token in enumerate(tokens)]
    batch = Batch.from_documents([(tokens[:9], labels[:9]), (tokens[9:], labels[9:])])
    loss, _ = model.loss(batch)
    return model, [loss.detach(), *torch.autograd.grad(loss, adapter.parameters())]


def mixtures(model: ImportedModel) -> list[Mixture]:
    return [half for layer in model.layers for half in layer.halves if isinstance(half, Mixture)]  # type: ignore[union-attr]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.abs().max()))


@pytest.fixture(scope="module", params=LAYERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf", request.param)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU, and this runs on a CPU"
)
def test_fused_experts_give_the_loss_and_gradients_of_the_graph(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)
    model, found = trained(path, fused="gpu", kept=[Kept(), Kept(gate_up=True)])
    assert len(mixtures(model)) == 2
    plain, wanted = trained(path, fused=None)
    assert not mixtures(plain)
    assert_equal(found, wanted)


def test_a_cpu_fuses_attention_where_it_is_plain_and_leaves_experts(path: Path) -> None:
    model, found = trained(path, fused="cpu")
    # gpt-oss has sinks.
    has_half = model.architecture != "gpt-oss"
    halves = [[half.modules for half in layer.halves if half is not None] for layer in model.layers]  # type: ignore[union-attr]
    assert [[type(modules) for modules in layer] for layer in halves] == [[AttentionHalf] if has_half else []] * 2
    assert_equal(found, trained(path, fused=None)[1])
