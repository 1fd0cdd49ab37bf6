"""Mixtures of experts: found in the graphs of architectures that have them, equal to the operations they stand for."""

from pathlib import Path

import pytest
import torch
from dense_models import assert_equal, loaded, trained
from expert_models import ARCHITECTURES, write_mixture

from pyggtrain.graph.mixtures import Mixture
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import AttentionHalf
from pyggtrain.ops.fused import Kept


def mixtures(model: ImportedModel) -> list[Mixture]:
    return [half for layer in model.layers for half in layer.halves if isinstance(half, Mixture)]  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    return write_mixture(path, request.param, num_ff=32, num_experts=5, num_chosen=3)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU, and this runs on a CPU"
)
def test_fused_experts_give_the_loss_and_gradients_of_the_graph(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)
    model, plain = loaded(path, "gpu"), loaded(path, None)
    found = trained(model, kept=[Kept(), Kept(gate_up=True)])
    assert len(mixtures(model)) == 2 and not mixtures(plain)
    assert_equal(found, trained(plain))


def test_a_cpu_fuses_attention_where_it_is_plain_and_leaves_experts(path: Path) -> None:
    model = loaded(path, "cpu")
    found = trained(model)
    # gpt-oss has sinks.
    has_half = model.architecture != "gpt-oss"
    halves = [[half.modules for half in layer.halves if half is not None] for layer in model.layers]  # type: ignore[union-attr]
    assert [[type(modules) for modules in layer] for layer in halves] == [[AttentionHalf] if has_half else []] * 2
    assert_equal(found, trained(loaded(path, None)))
