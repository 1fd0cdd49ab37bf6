"""Mixtures of experts: found in the graphs of architectures that have them, equal to the operations they stand for."""

from pathlib import Path

import pytest
import torch
from dense_models import losses_and_gradients
from expert_models import ARCHITECTURES, write_mixture

from pyggtrain.graph.mixtures import Mixture
from pyggtrain.graph.model import ImportedModel
from pyggtrain.ops.fused import Kept


def mixtures(model: ImportedModel) -> list[Mixture]:
    return [half for layer in model.layers for half in layer.halves if isinstance(half, Mixture)]  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _halves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    return write_mixture(path, request.param, num_ff=32, num_experts=5, num_chosen=3)


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
