from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain import models
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch
from pyggtrain.validation.trained_model import TrainedModel

TOKENS = [3, 14, 15, 92, 65]


@pytest.fixture
def trained(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> Any:
    return make_trained(tiny_llama_path)


def test_no_scale_is_the_model_without_its_pairs(trained: Any) -> None:
    bare = models.load(GGUFFile.open(trained.base), compute="exact")
    with torch.no_grad():
        expected = bare.logits(Batch.from_documents([(TOKENS, TOKENS)]))
    assert torch.equal(trained.model.logits(TOKENS, scale=None), expected)
    assert torch.equal(trained.model.logits(TOKENS, scale=0.0), expected)
    assert not torch.allclose(trained.model.logits(TOKENS, scale=1.0), expected, atol=0.1)


def test_scale_multiplies_the_pair_s_own_scale(trained: Any) -> None:
    tripled = trained.model.logits(TOKENS, scale=3.0)
    for pair in trained.pairs.values():
        pair.lora_b.data *= 3
    torch.testing.assert_close(trained.model.logits(TOKENS, scale=1.0), tripled, rtol=1e-4, atol=1e-4)


def test_a_measurement_leaves_the_model_as_it_was(trained: Any, tiny_llama_path: Path) -> None:
    model = trained.model._model
    model.train()
    scales = [pair.scale for pair in trained.pairs.values()]
    for pair in trained.pairs.values():
        pair.dropout = 0.5
    # Dropout off: two measurements agree.
    assert torch.equal(trained.model.logits(TOKENS, scale=2.0), trained.model.logits(TOKENS, scale=2.0))
    trained.model.layer_outputs(TOKENS, scale=None)
    assert model.training
    assert [pair.scale for pair in trained.pairs.values()] == scales
    assert all(model.linears[name].lora is pair for name, pair in trained.pairs.items())
    assert not any(layer._forward_hooks for layer in model.layers)
    with pytest.raises(IndexError):
        trained.model.logits([10**6], scale=None)
    assert all(model.linears[name].lora is pair for name, pair in trained.pairs.items())
    assert model.training


def test_a_model_that_multiplies_in_8_bits_is_measured_without_their_rounding(
    tiny_llama_path: Path, make_trained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = make_trained(tiny_llama_path, compute="auto")
    model = trained.model._model
    linears, logits, seen = list(model.linears.values()), model.logits, []

    def watched(batch: Batch) -> torch.Tensor:
        seen.append({linear.compute for linear in linears})
        return logits(batch)

    monkeypatch.setattr(model, "logits", watched)
    expected = trained.model.logits(TOKENS, scale=1.0)
    for linear in linears:
        linear.compute = "fp8"
    assert torch.equal(trained.model.logits(TOKENS, scale=1.0), expected)
    assert all(linear.compute == "fp8" for linear in linears) and seen == [{"auto"}, {"auto"}]


def test_layer_outputs_carry_llama_cpp_s_names(trained: Any) -> None:
    outputs = trained.model.layer_outputs(TOKENS, scale=1.0)
    assert list(outputs) == ["l_out-0", "l_out-1"]
    assert all(output.shape == (5, 64) for output in outputs.values())


def test_a_model_without_pairs_has_none(tiny_llama_path: Path) -> None:
    assert TrainedModel(models.load(GGUFFile.open(tiny_llama_path)), {}).num_pairs == 0
