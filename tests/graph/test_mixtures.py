"""Mixtures of experts: found in the graphs of architectures that have them, equal to the operations they stand for."""

from pathlib import Path

import pytest
import torch
from dense_models import HEAD, HEADS, QKV, WIDTH, losses_and_gradients, write_two_layers

from pyggtrain.graph.mixtures import Mixture
from pyggtrain.graph.model import ImportedModel
from pyggtrain.ops.fused import Kept

FF, EXPERTS, CHOSEN = 32, 5, 3
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
    keys, inside = LAYERS[architecture]
    experts = {"feed_forward_length": 2 * FF, "expert_count": EXPERTS, "expert_used_count": CHOSEN}
    return write_two_layers(path, architecture, experts | keys, inside)


def mixtures(model: ImportedModel) -> list[Mixture]:
    return [half for layer in model.layers for half in layer.halves if isinstance(half, Mixture)]  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _halves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)


@pytest.fixture(scope="module", params=LAYERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    return write_tiny(tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf", request.param)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU, and this runs on a CPU"
)
def test_fused_experts_give_the_loss_and_gradients_of_the_graph(path: Path) -> None:
    model, found = losses_and_gradients(path, fused=True, kept=[Kept(), Kept(gate_up=True)])
    assert len(mixtures(model)) == 2
    plain, wanted = losses_and_gradients(path, fused=False)
    assert not mixtures(plain)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.abs().max()))
