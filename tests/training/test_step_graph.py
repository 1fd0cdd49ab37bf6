"""Micro-batches brought to few shapes, and the CUDA graphs made for these."""

from pathlib import Path
from typing import Any

import pytest
import torch
from delta_models import TINY, Tiny, batch_of, write_delta
from dense_models import loaded

from pyggtrain import models
from pyggtrain.adapters import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import Batch, Model
from pyggtrain.ops.fused import Kept
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.objectives import Supervised
from pyggtrain.training.optim import Optimizer
from pyggtrain.training.paging import Pages
from pyggtrain.training.step_graph import (
    MAX_TOKENS,
    MAX_TOKENS_OF_DELTA_NETS,
    MAX_TOKENS_OF_EXPERTS,
    TARGET_MULTIPLE,
    TOKEN_MULTIPLE,
    StepGraphs,
    filled_up,
    max_tokens,
    shape_of,
)


def make_batch(lengths: list[int], seed: int, *, learnt_from: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        tokens = torch.randint(0, 96, (length,), generator=generator).tolist()
        documents.append((tokens, [-100] * learnt_from + tokens[learnt_from:]))
    return Batch.from_documents(documents)


def trained(path: Path, device: str, **options: Any) -> tuple[Model, dict[str, torch.Tensor]]:
    model = models.load(GGUFFile.open(path), device=device, **options)
    return model, with_pairs(model)


def with_pairs(model: Model) -> dict[str, torch.Tensor]:
    """Pairs on all linears of a model, none of them zero."""
    rank = min(4, *(size for linear in model.linears.values() for size in linear.shape[-2:]))
    adapter = attach(model, LoraConfig(r=rank), seed=0)
    for index, pair in enumerate(adapter.pairs.values()):
        with torch.no_grad():
            pair.lora_b.copy_(torch.randn(pair.lora_b.shape, generator=torch.Generator().manual_seed(index)) * 0.1)
    return {str(index): parameter for index, parameter in enumerate(adapter.parameters())}


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


def room_of(*lengths: int) -> int | None:
    """What a shape says of the tables of chunks."""
    return shape_of(make_batch(list(lengths), seed=1), reads_chunks=True)[-1]


def test_tables_of_chunks_get_room_for_few_different_numbers_of_documents() -> None:
    assert [room_of(12), room_of(4, 4, 4), room_of(3, 3)] == [1, 3, 2]
    assert {room_of(12, *[3] * others) for others in range(1, 8)} == {8}
    assert room_of(12, *[3] * 8) == 16


def test_shapes_know_of_chunks_only_where_they_are_read() -> None:
    batches = [make_batch(lengths, seed=1, learnt_from=1) for lengths in ([12, 4, 4], [5, 9, 6])]
    assert {shape_of(batch, reads_chunks=False)[:4] for batch in batches} == {(20, None, False, 4)}
    assert {shape_of(batch, reads_chunks=False)[5] for batch in batches} == {None}
    one, other = (shape_of(batch, reads_chunks=True) for batch in batches)
    assert one == other


@pytest.mark.parametrize(
    ("tiny", "limit"), [(TINY[0], MAX_TOKENS_OF_DELTA_NETS), (TINY[2], MAX_TOKENS_OF_EXPERTS)], ids=["dense", "experts"]
)
def test_halves_that_are_slow_to_launch_are_captured_in_longer_batches(
    tiny: Tiny, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)
    assert max_tokens(loaded(write_delta(tiny, tmp_path / "tiny.gguf"), "gpu")) == limit > MAX_TOKENS


class Replay:
    """Stands for a CUDA graph: launches from the places that it was made with, knowing the bounds of documents of the
    batch that it was made from.
    """

    def __init__(self, graphs: StepGraphs, static: Batch) -> None:
        self.graphs, self.static = graphs, static
        self.loss = torch.zeros(())

    def replay(self) -> None:
        self.loss.copy_(self.graphs._run(self.static, self.graphs._scale))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU, this runs on a CPU")
def test_what_a_graph_of_delta_nets_reads_is_refilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(StepGraphs, "_has_room", lambda self, num_tokens: True)
    made: list[Replay] = []

    def record(self: StepGraphs, static: Batch) -> tuple[Replay, torch.Tensor]:
        made.append(Replay(self, static))
        return made[-1], made[-1].loss

    monkeypatch.setattr(StepGraphs, "_record", record)
    model = loaded(write_delta(Tiny("qwen35", (True, False), 1, 1, 16), tmp_path / "tiny.gguf"), "gpu")
    parameters = with_pairs(model)
    assert model.can_capture and model.reads_chunks
    graphs = StepGraphs(model, parameters)
    # A second chunk here and there, and another number of documents.
    for lengths in ([67, 2], [3, 1, 65], [68, 1]):
        batch = batch_of(*lengths)
        rows = torch.cat([batch.supervised, torch.full((67 - batch.num_targets,), 68)])
        batch = batch.with_supervised(rows, batch.num_targets)
        graphs.clear()
        result = graphs.add_gradients(batch, 1 / batch.num_targets)
        found = [parameter.grad.clone() for parameter in parameters.values() if parameter.grad is not None]
        if made:
            loss, expected = gradients_of(model, parameters, batch)
            assert result.item() == pytest.approx(loss, rel=1e-5)
            assert error(found, expected) <= 1e-5
    assert len(made) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
@pytest.mark.parametrize("policy", ["none", "layers", "offload"])
def test_graphs_of_delta_nets_give_the_gradients_of_single_launches(
    tiny: Tiny, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyggtrain.nn.host_stash._MIN_BYTES", 1024)
    path = write_delta(tiny, tmp_path / "tiny.gguf")
    exact, exact_parameters = trained(path, "cuda", dtype=torch.float32, compute="exact")
    model, parameters = trained(path, "cuda")
    assert model.can_capture and model.reads_chunks
    model.checkpoint_policy = policy
    graphs = StepGraphs(model, parameters)
    # Four shapes of 256 tokens: room for 8 documents, for 1, for 4, and for 8 of which the longest has more than 128
    # tokens. Two batches get a filler.
    different = [[100, 90, 66], [65, 127, 62, 2], [70, 2, 3, 64, 63, 54], [64, 128, 64], [100, 127]]
    one, equal, longer = [[256]] * 3, [[64] * 4] * 3, [[129, 127], [2, 190, 64], [200, 31], [254, 2]]
    for seed, lengths in enumerate([*different, *one, *equal, *longer, *different]):
        batch = filled_up(make_batch(lengths, seed, learnt_from=1)).to("cuda")
        assert batch.num_tokens == batch.supervised.shape[0] == 256
        loss, expected = gradients_of(exact, exact_parameters, batch)
        launched_loss, launched = gradients_of(model, parameters, batch)
        graphs.clear()
        result = graphs.add_gradients(batch, 1 / batch.num_targets)
        assert result.item() == pytest.approx(loss, rel=5e-2)
        assert result.item() == pytest.approx(launched_loss, rel=2e-2)
        graphed = [parameter.grad for parameter in parameters.values()]
        # A router's choice that lies on the edge may fall to the other side in either.
        assert error(graphed, expected) <= 1.5 * error(launched, expected) + 1e-2
    assert len(graphs._graphs) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_waits_for_copies_that_nobody_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first layer sends to the host before anything that is trained never comes back."""
    monkeypatch.setattr("pyggtrain.nn.host_stash._MIN_BYTES", 1024)
    tiny = next(one for one in TINY if one.architecture == "qwen35moe")
    path = write_delta(tiny, tmp_path / "tiny.gguf")
    model = models.load(GGUFFile.open(path), device="cuda")
    adapter = attach(model, LoraConfig(r=4, target_modules=("ffn_down_shexp",)), seed=0)
    parameters = {str(index): parameter for index, parameter in enumerate(adapter.parameters())}
    model.checkpoint_policy = "offload"
    graphs = StepGraphs(model, parameters)
    for seed in range(3):
        batch = filled_up(make_batch([128], seed)).to("cuda")
        _, launched = gradients_of(model, parameters, batch)
        graphs.clear()
        graphs.add_gradients(batch, 1 / batch.num_targets)
        assert error([parameter.grad for parameter in parameters.values()], launched) <= 1e-2
    assert len(graphs._graphs) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "kept", [Kept(gate_up=True), Kept(attention=False), Kept(on_host=True), Kept(halves=False, on_host=True)]
)
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
        results = [window.gradients.clone() for window in pages._windows]
        pages.clear()
        for batch in batches:
            (model.loss(batch)[0] / 256).backward()
        pages.join()
        torch.cuda.synchronize()
        assert error(results, [window.gradients for window in pages._windows]) < 2e-2
        assert all(parameter.grad is None for parameter in parameters.values())
    assert len(graphs._graphs) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["native", "graph", "experts"])
@pytest.mark.parametrize("optim", ["paged_adamw", "paged_adamw_8bit"])
def test_an_update_beside_the_next_step_changes_nothing(
    kind: str, optim: str, tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow it is. And it takes the waiting to make it so."""
    if optim == "paged_adamw_8bit":
        pytest.importorskip("bitsandbytes")
    # A window for each pair, each of which takes longer than the whole of a step.
    monkeypatch.setattr("pyggtrain.training.paging._WINDOW_BYTES", 256)
    step_of_window = Pages._step

    def slow(self: Pages, *arguments: Any) -> None:
        torch.cuda._sleep(3_000_000)
        step_of_window(self, *arguments)

    monkeypatch.setattr(Pages, "_step", slow)
    if kind == "experts":
        path = write_delta(next(one for one in TINY if one.architecture == "qwen35moe"), tmp_path / "tiny.gguf")
    else:
        path = tiny_llama_path

    def train() -> tuple[list[float], torch.Tensor]:
        model = models.load(GGUFFile.open(path), device="cuda", implementation="auto" if kind == "experts" else kind)
        model.train()
        adapter = attach(model, LoraConfig(r=4), seed=0)
        parameters: dict[str, torch.Tensor] = {
            f"{name}.{half}": getattr(pair, half)
            for name, pair in adapter.pairs.items()
            for half in ("lora_a", "lora_b")
        }
        settings = TrainConfig(model="m", data=("d",), output="o", optim=optim)  # type: ignore[arg-type]
        optimizer = Optimizer(parameters, settings)
        assert optimizer.pages is not None and len(optimizer.pages._windows) > 5
        graphs = optimizer.graphs = StepGraphs(model, parameters, optimizer.pages)
        objective, losses = Supervised(model), []
        for seed in range(5):
            batch = filled_up(make_batch([128], seed)).to("cuda")
            result = optimizer.step(objective, [batch], num_units=batch.num_targets, learning_rate=2e-2, seeds=[0])
            losses.append(result.loss)
        assert graphs.has_replayed
        optimizer.settle()
        return losses, torch.cat([one.detach().flatten() for one in parameters.values()])

    update = Pages._update

    def late(self: Pages, factor: float | torch.Tensor) -> None:
        """Longer than a step takes, so that only waiting helps."""
        torch.cuda._sleep(200_000_000)
        update(self, factor)

    losses, beside = train()
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "_runs_beside", property(lambda self: False))
        expected_losses, expected = train()
    assert losses == expected_losses and torch.equal(beside, expected)
    with monkeypatch.context() as patch:
        patch.setattr(Pages, "wait_for", lambda self, number: None)
        patch.setattr(Pages, "_update", late)
        careless, _ = train()
    assert careless != expected_losses
