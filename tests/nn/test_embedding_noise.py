"""NEFTune's noise: its size for each document, its seed, that it is there in training only, in both kinds of model."""

import math

import pytest
import torch

from pyggtrain import models
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch

DOCUMENTS = [([1, 2, 3, 4], [1, 2, 3, 4]), (list(range(5, 21)), list(range(5, 21)))]


@pytest.fixture(params=["native", "graph"])
def model(request, tiny_llama_path):
    return models.load(GGUFFile.open(tiny_llama_path), implementation=request.param)


@pytest.fixture
def batch():
    return Batch.from_documents(DOCUMENTS)


def test_noise_is_uniform_up_to_alpha_over_root_of_length_times_width(model, batch):
    model.neftune_noise_alpha = 5.0
    model.train()
    torch.manual_seed(1)
    noise = model.with_noise(torch.zeros(20, 64), batch)
    for tokens, length in ((slice(0, 4), 4), (slice(4, 20), 16)):
        largest = 5.0 / math.sqrt(length * 64)
        assert 0.97 * largest < float(noise[tokens].abs().max()) <= largest
        # The variance of a uniform number from ±a is a² / 3.
        assert float(noise[tokens].std()) == pytest.approx(largest / math.sqrt(3), rel=0.1)


def test_noise_reaches_the_loss_in_training_only_and_its_seed_decides(model, batch):
    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return model.loss(batch)[0].item()

    model.eval()
    clean = loss(1)
    model.neftune_noise_alpha = 5.0
    assert loss(1) == clean
    model.train()
    assert loss(1) == loss(1) != clean
    assert loss(1) != loss(2)


def test_both_kinds_of_model_draw_the_same_noise(tiny_llama_path, batch):
    losses = []
    for kind in ("native", "graph"):
        model = models.load(GGUFFile.open(tiny_llama_path), implementation=kind, compute="exact").train()
        model.neftune_noise_alpha = 5.0
        torch.manual_seed(3)
        losses.append(model.loss(batch)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_log_probs_of_both_kinds_sum_up_to_the_loss(model, batch):
    found = model.log_probs(batch)
    assert found.shape == (20,) and found[3] == found[19] == 0
    assert -found.sum().item() == pytest.approx(model.loss(batch)[0].item(), rel=1e-5)
