"""DPO and ORPO on a tiny model against plain float64 formulas, with the base model itself as the reference."""

import math
import random
from array import array

import pytest
import torch
from tiny_trainer import Pair

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, adapter_off, attach
from pyggtrain.data.encode import Example
from pyggtrain.errors import ConfigError
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch
from pyggtrain.training.objectives import DPO, ORPO, Supervised


def make_pairs(count: int, seed: int = 5) -> list[Pair]:
    rng = random.Random(seed)

    def answer(prompt: list[int], source: str) -> Example:
        ids = prompt + [rng.randrange(96) for _ in range(rng.randrange(1, 7))]
        return Example(array("i", ids), array("i", [-100] * len(prompt) + ids[len(prompt) :]), source)

    pairs = []
    for index in range(count):
        prompt = [rng.randrange(96) for _ in range(rng.randrange(2, 6))]
        pairs.append(Pair(answer(prompt, f"row {index}"), answer(prompt, f"row {index}")))
    return pairs


PAIRS = make_pairs(5)


@pytest.fixture
def model(tiny_llama_path):
    """A tiny model whose adapter already does something."""
    model = models.load(GGUFFile.open(tiny_llama_path), compute="exact")
    adapter = attach(model, LoraConfig(r=4), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for pair in adapter.pairs.values():
            pair.lora_b.copy_(torch.randn(pair.lora_b.shape, generator=generator) * 0.2)
    return model.train()


def batch_of(objective, pairs) -> Batch:
    return Batch.from_documents([document for pair in pairs for document in objective.documents(pair)])


def dense_log_probs(model, example: Example) -> torch.Tensor:
    """Log-probabilities of the answer's tokens from all logits, float64, with gradient."""
    batch = Batch.from_documents([(example.input_ids, example.labels)])
    found = torch.log_softmax(model.logits(batch).double(), dim=1)
    supervised = batch.targets_T >= 0
    return found[supervised].gather(1, batch.targets_T[supervised].unsqueeze(1)).squeeze(1)


def gradients(model, loss) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [parameter for parameter in model.parameters() if parameter.requires_grad]))


@pytest.mark.parametrize("loss_chunk", [None, 2])
def test_dpo_is_the_papers_formula(model, loss_chunk):
    objective = DPO(model, beta=0.3)
    model.loss_chunk = loss_chunk
    loss, values = objective.loss(batch_of(objective, PAIRS))
    found = gradients(model, loss)
    expected, rewards = torch.zeros((), dtype=torch.float64), []
    for pair in PAIRS:
        policy = [dense_log_probs(model, answer).sum() for answer in (pair.chosen, pair.rejected)]
        with torch.no_grad(), adapter_off(model):
            base = [dense_log_probs(model, answer).sum() for answer in (pair.chosen, pair.rejected)]
        chosen, rejected = (0.3 * (now - then) for now, then in zip(policy, base, strict=True))
        expected = expected - torch.nn.functional.logsigmoid(chosen - rejected)
        rewards.append([chosen.item(), rejected.item(), (chosen - rejected).item(), float(chosen > rejected)])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values, torch.tensor(rewards, dtype=torch.float64).sum(0), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found, gradients(model, expected), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_orpo_is_the_papers_formula(model):
    objective = ORPO(model, beta=0.3)
    loss, values = objective.loss(batch_of(objective, PAIRS))
    found = gradients(model, loss)
    expected, correct = torch.zeros((), dtype=torch.float64), 0
    for pair in PAIRS:
        chosen, rejected = (dense_log_probs(model, answer).mean() for answer in (pair.chosen, pair.rejected))
        odds = [mean.exp() / (1 - mean.exp()) for mean in (chosen, rejected)]
        expected = expected - chosen - 0.3 * torch.nn.functional.logsigmoid(torch.log(odds[0] / odds[1]))
        correct += int(odds[0] > odds[1])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert float(values[2]) == correct
    for ours, theirs in zip(found, gradients(model, expected), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_orpo_of_a_model_that_is_certain_is_finite(model):
    class Certain:
        training = True

        def log_probs(self, batch):
            return torch.zeros(batch.num_tokens, requires_grad=True)

    objective = ORPO(Certain(), beta=0.3)
    loss, _ = objective.loss(batch_of(objective, PAIRS))
    assert math.isfinite(loss.item())


def test_an_untouched_adapter_gives_log_2_and_no_reward(tiny_llama_path):
    model = models.load(GGUFFile.open(tiny_llama_path))
    attach(model, LoraConfig(r=4), seed=1)
    objective = DPO(model, beta=0.3)
    loss, values = objective.loss(batch_of(objective, PAIRS))
    assert float(loss) == pytest.approx(5 * math.log(2), rel=1e-12)
    assert values.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_the_reference_is_the_base_model_bit_for_bit(model, tiny_llama_path):
    base = models.load(GGUFFile.open(tiny_llama_path), compute="exact")
    batch = batch_of(DPO(model, beta=0.1), PAIRS)
    with torch.no_grad():
        with adapter_off(model):
            off = model.log_probs(batch)
        expected = base.log_probs(batch)
        assert torch.equal(off, expected)
        assert not torch.equal(model.log_probs(batch), expected), "the adapter is not back"


def test_the_reference_knows_neither_dropout_nor_noise_nor_gradients(model, monkeypatch):
    model.neftune_noise_alpha = 5.0
    modes = []
    compute = model.log_probs
    monkeypatch.setattr(
        model,
        "log_probs",
        lambda batch: (
            modes.append((model.training, torch.is_grad_enabled(), model.linears["blk.0.attn_q.weight"].lora))
            or compute(batch)
        ),
    )
    objective = DPO(model, beta=0.1)
    objective.loss(batch_of(objective, PAIRS))
    assert modes[0] == (False, False, None) and modes[1][:2] == (True, True) and modes[1][2] is not None


def test_the_adapter_comes_back_after_an_error(model):
    with pytest.raises(RuntimeError, match="inside"), adapter_off(model):
        raise RuntimeError("inside")
    assert all(linear.lora is not None for name, linear in model.linears.items())


@pytest.mark.parametrize("kind", [DPO, ORPO])
def test_the_loss_is_a_sum_over_pairs_however_they_are_cut(model, kind):
    objective = kind(model, beta=0.3)
    whole, values = objective.loss(batch_of(objective, PAIRS))
    parts = [objective.loss(batch_of(objective, part)) for part in (PAIRS[:2], PAIRS[2:])]
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0])
    torch.testing.assert_close(values, parts[0][1] + parts[1][1], rtol=1e-4, atol=1e-5)
    assert objective.num_units(PAIRS) == 5


def test_rows_of_the_other_kind_are_refused_by_name(model):
    example = PAIRS[0].chosen
    with pytest.raises(ConfigError, match="row 0 holds a chosen and a rejected"):
        Supervised(model).check(PAIRS)
    with pytest.raises(ConfigError, match="row 0 has none"):
        ORPO(model, beta=0.1).check([example])
    Supervised(model).check([example])
    ORPO(model, beta=0.1).check(PAIRS)
