"""A model that computes what llama.cpp computes passes; another one is refused, with the first value that differs."""

from pathlib import Path

import pytest
import torch

from pyggtrain.errors import ParityError
from pyggtrain.gguf import GGUFFile
from pyggtrain.gguf.requantize import requantize
from pyggtrain.graph import rewrite
from pyggtrain.graph.model import ImportedModel
from pyggtrain.graph.verify import BOUND_F32, BOUND_QUANTISED, NOISE_FACTOR, bound_of, relative_error, verify


def test_a_float_file_agrees_to_rounding(tiny_llama_path: Path) -> None:
    file = GGUFFile.open(tiny_llama_path)
    found = verify(file, ImportedModel(file, compute="exact"))
    assert found.bound == BOUND_F32 and found.error < 1e-5 and found.kl < 1e-8 and found.num_tokens == 64


def test_half_precision_is_given_the_room_of_a_quantised_file(tiny_llama_path: Path) -> None:
    file = GGUFFile.open(tiny_llama_path)
    assert bound_of(file, torch.float32) == BOUND_F32 and bound_of(file, torch.bfloat16) == BOUND_QUANTISED


def test_a_quantised_file_agrees_to_the_noise_of_8_bit_activations(smollm2_path: Path) -> None:
    file = GGUFFile.open(smollm2_path)
    found = verify(file, ImportedModel(file))
    assert found.bound == BOUND_QUANTISED
    # The bound is no formality: the noise takes up more than a tenth of it.
    assert 0.1 * BOUND_QUANTISED < found.error < 0.8 * BOUND_QUANTISED


@pytest.fixture
def wrong_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer of an imported llama gates by another function."""
    name_masks = rewrite.name_masks

    def wrong(graph: rewrite.Graph) -> rewrite.Graph:
        nodes = tuple(
            rewrite.replace(node, op="GLU.REGLU") if node.name == "ffn_swiglu-1" else node
            for node in name_masks(graph).nodes
        )
        return rewrite.replace(name_masks(graph), nodes=nodes)

    monkeypatch.setattr(rewrite, "name_masks", wrong)


@pytest.mark.usefixtures("wrong_gate")
def test_a_wrong_operation_is_refused_with_the_first_value_that_differs(tiny_llama_path: Path) -> None:
    file = GGUFFile.open(tiny_llama_path)
    with pytest.raises(
        ParityError, match=r"logits that are 0\.\d+ of their size .* first value that differs is 'ffn_swiglu-1'"
    ):
        verify(file, ImportedModel(file, compute="exact"))


@pytest.fixture
def noisy(tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GGUFFile:
    """A file whose rounding moves its logits by more than the bound that suits most files."""
    monkeypatch.setattr("pyggtrain.graph.verify.BOUND_QUANTISED", 2e-3)
    path = tmp_path / "noisy.gguf"
    requantize(GGUFFile.open(tiny_llama_path), path, "Q4_0")
    return GGUFFile.open(path)


@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_more_noise_than_usual_is_measured(noisy: GGUFFile, compute: str) -> None:
    found = verify(noisy, ImportedModel(noisy, compute=compute))
    if compute == "exact":
        # Such a model differs by the noise itself.
        assert found.error == pytest.approx(found.bound / NOISE_FACTOR, rel=1e-2) and found.error > 2e-3
    else:
        assert found.error <= found.bound


@pytest.mark.usefixtures("wrong_gate")
def test_a_wrong_operation_is_refused_in_a_noisy_file_too(noisy: GGUFFile) -> None:
    with pytest.raises(ParityError, match=r"needed: 0\.002\)\. The first value that differs is"):
        verify(noisy, ImportedModel(noisy))


def test_nan_is_a_difference() -> None:
    assert not relative_error(torch.tensor([float("nan"), 1.0]), torch.ones(2)) <= 1.0
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])) == pytest.approx(2**0.5)
