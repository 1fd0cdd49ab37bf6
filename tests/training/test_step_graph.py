"""Micro-batches brought to few shapes, and the CUDA graphs made for these."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain import models
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch, Model
from pyggtrain.ops.fused import Kept
from pyggtrain.training.paging import Pages
from pyggtrain.training.step_graph import TARGET_MULTIPLE, TOKEN_MULTIPLE, StepGraphs, filled_up


def make_batch(lengths: list[int], seed: int, *, learnt_from: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        tokens = torch.randint(0, 96, (length,), generator=generator).tolist()
        documents.append((tokens, [-100] * learnt_from + tokens[learnt_from:]))
    return Batch.from_documents(documents)


def trained(path: Path, device: str, **options: Any) -> tuple[Model, dict[str, torch.Tensor]]:
    model = models.load(GGUFFile.open(path), device=device, **options)
    adapter = attach(model, LoraConfig(r=4), seed=0)
    for index, pair in enumerate(adapter.pairs.values()):
        with torch.no_grad():
            pair.lora_b.copy_(torch.randn(pair.lora_b.shape, generator=torch.Generator().manual_seed(index)) * 0.1)
    return model, {str(index): parameter for index, parameter in enumerate(adapter.parameters())}


def gradients_of(model: Model, parameters: dict[str, torch.Tensor], batch: Batch) -> tuple[float, list[torch.Tensor]]:
    loss_sum, num_targets = model.loss(batch)
    loss = loss_sum / num_targets
    return loss.item(), list(torch.autograd.grad(loss, list(parameters.values())))


def error(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    flat, wanted = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (gradients, expected))
    return ((flat - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("lengths", [[5, 9], [TOKEN_MULTIPLE], [200, 31, 2]])
def test_filling_up_changes_neither_loss_nor_gradients(tiny_llama_path: Path, lengths: list[int]) -> None:
    model, parameters = trained(tiny_llama_path, "cpu")
    batch = make_batch(lengths, seed=1)
    filled = filled_up(batch)
    assert filled.num_tokens % TOKEN_MULTIPLE == filled.supervised.shape[0] % TARGET_MULTIPLE == 0
    assert filled.num_targets == batch.num_targets
    loss, gradients = gradients_of(model, parameters, batch)
    filled_loss, filled_gradients = gradients_of(model, parameters, filled)
    assert filled_loss == pytest.approx(loss, rel=1e-6)
    for result, expected in zip(filled_gradients, gradients, strict=True):
        assert (result - expected).norm() <= 1e-5 * expected.norm()


def test_a_batch_of_that_shape_stays_as_it_is() -> None:
    batch = make_batch([TOKEN_MULTIPLE], seed=1, learnt_from=TOKEN_MULTIPLE - TARGET_MULTIPLE)
    assert filled_up(batch) is batch


def test_a_last_token_with_a_target_gets_a_filler_beside_it() -> None:
    tokens = torch.arange(TOKEN_MULTIPLE) % 96
    batch = Batch(tokens, tokens, torch.where(tokens < 3, -100, tokens), torch.tensor([0, TOKEN_MULTIPLE]).int())
    filled = filled_up(batch)
    assert filled.num_tokens == 2 * TOKEN_MULTIPLE
    assert (filled.targets_T[filled.supervised[batch.num_targets :]] == -100).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kept", [Kept(gate_up=True), Kept(attention=False), Kept(on_host=True)])
def test_graphs_give_the_gradients_of_single_launches(
    tiny_llama_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyggtrain.nn.host_stash._MIN_BYTES", 1024)
    exact, exact_parameters = trained(tiny_llama_path, "cuda", dtype=torch.float32, compute="exact")
    model, parameters = trained(tiny_llama_path, "cuda")
    model.kept = [kept] * len(model.layers)
    graphs = StepGraphs(model, parameters)
    shapes = [[100, 28], [128], [90, 38], [64, 64], [100, 28], [64, 64], [128], [10, 118], [300, 20], [300, 20], [128]]
    for seed, lengths in enumerate(shapes):
        batch = filled_up(make_batch(lengths, seed)).to("cuda")
        loss, expected = gradients_of(exact, exact_parameters, batch)
        _, launched = gradients_of(model, parameters, batch)
        graphs.clear()
        result = graphs.add_gradients(batch, 1 / batch.num_targets)
        assert result.item() == pytest.approx(loss, rel=2e-2)
        graphed = [parameter.grad for parameter in parameters.values()]
        # bfloat16, and the library may take another kernel for a graph: as near to float32 as single launches are
        assert error(graphed, expected) <= 1.5 * error(launched, expected) + 1e-3
    assert len(graphs._graphs) >= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_send_gradients_to_the_host(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of two micro-batches: the second adds to what the first has sent, launched or captured."""
    monkeypatch.setattr("pyggtrain.training.paging._MAX_BEHIND_BYTES", 10_000)
    model, parameters = trained(tiny_llama_path, "cuda")
    pages = Pages(list(parameters.values()), torch.optim.AdamW(parameters.values()))
    graphs = StepGraphs(model, parameters, pages)
    for seed in range(4):
        batches = [filled_up(make_batch([128], 2 * seed + part)).to("cuda") for part in range(2)]
        pages.clear()
        for batch in batches:
            graphs.add_gradients(batch, 1 / 256)
        torch.cuda.synchronize()
        results = [place.clone() for place in pages._gradients]
        pages.clear()
        for batch in batches:
            (model.loss(batch)[0] / 256).backward()
        pages.join()
        torch.cuda.synchronize()
        assert error(results, pages._gradients) < 2e-2
        assert all(parameter.grad is None for parameter in parameters.values())
    assert len(graphs._graphs) == 2
