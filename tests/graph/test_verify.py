"""A model that computes what llama.cpp computes passes; another one is refused, with the first value that differs."""

from pathlib import Path

import pytest
import torch

from pyggtrain.errors import ParityError
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph import rewrite
from pyggtrain.graph.model import ImportedModel
from pyggtrain.graph.verify import BOUND_F32, BOUND_QUANTISED, relative_error, verify


def test_a_float_file_agrees_to_rounding(tiny_llama_path: Path) -> None:
    file = GGUFFile.open(tiny_llama_path)
    found = verify(file, ImportedModel(file, compute="exact"))
    assert found.bound == BOUND_F32 and found.error < 1e-5 and found.kl < 1e-8 and found.num_tokens == 64


def test_a_quantised_file_agrees_to_the_noise_of_8_bit_activations(smollm2_path: Path) -> None:
    file = GGUFFile.open(smollm2_path)
    found = verify(file, ImportedModel(file))
    assert found.bound == BOUND_QUANTISED
    # The bound is no formality: the noise takes up more than a tenth of it.
    assert 0.1 * BOUND_QUANTISED < found.error < 0.8 * BOUND_QUANTISED


def test_a_wrong_operation_is_refused_with_the_first_value_that_differs(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GGUFFile.open(tiny_llama_path)
    name_masks = rewrite.name_masks

    def wrong(graph: rewrite.Graph) -> rewrite.Graph:
        """The second layer gates by another function."""
        nodes = tuple(
            rewrite.replace(node, op="GLU.REGLU") if node.name == "ffn_swiglu-1" else node
            for node in name_masks(graph).nodes
        )
        return rewrite.replace(name_masks(graph), nodes=nodes)

    monkeypatch.setattr(rewrite, "name_masks", wrong)
    with pytest.raises(
        ParityError, match=r"logits that are 0\.\d+ of their size .* first value that differs is 'ffn_swiglu-1'"
    ):
        verify(file, ImportedModel(file, compute="exact"))


def test_nan_is_a_difference() -> None:
    assert not relative_error(torch.tensor([float("nan"), 1.0]), torch.ones(2)) <= 1.0
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])) == pytest.approx(2**0.5)
