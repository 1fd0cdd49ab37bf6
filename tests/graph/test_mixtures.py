"""Mixtures of experts: found in the graphs of architectures that have them, equal to the operations they stand for."""

from pathlib import Path

import pytest
import torch
from tiny_layers import MIXTURES, VOCAB, write_layers

from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph import model as graph_model
from pyggtrain.graph.mixtures import Mixture
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import AttentionHalf, Batch
from pyggtrain.ops.fused import Kept


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


@pytest.fixture(scope="module", params=MIXTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    return write_layers(file, request.param, MIXTURES[request.param])


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
