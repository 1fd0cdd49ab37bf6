"""Halves of layers: found where the structure is theirs and nowhere else, equal to the operations they stand for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_models import BIASES, DENSE, LAYERS, assert_equal, halves_in, loaded, trained, write_dense, write_two_layers

from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.graph.halves import Half
from pyggtrain.graph.ir import Graph
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import POLICIES, AttentionHalf, FeedForwardHalf, HostStash, pinned_bytes
from pyggtrain.ops.fused import Kept, cpu_attention_block, cpu_feed_forward


def parts_of(model: ImportedModel) -> list[list[type | None]]:
    """What each part of each layer is."""
    return [[None if half is None else type(half.modules) for half in layer.halves] for layer in model.layers]  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=LAYERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    return write_dense(file, request.param)


@pytest.fixture
def _halves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and this runs on a CPU")
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)


@pytest.mark.usefixtures("_halves_of_a_gpu")
@pytest.mark.parametrize(
    "kept", [Kept(), Kept(attention=False), Kept(gate_up=True, weights=True), Kept(halves=False)], ids=str
)
def test_a_gpus_layers_give_the_loss_and_gradients_of_the_graph(path: Path, kept: Kept) -> None:
    model, plain = loaded(path, "gpu"), loaded(path, None)
    found = trained(model, kept=[kept, Kept()])
    assert model.is_fused and len(model.fused_layers) == 2
    wanted = trained(plain)
    assert not plain.is_fused and not plain.fused_layers
    assert_equal(found, wanted)


@pytest.mark.usefixtures("_halves_of_a_gpu")
def test_of_a_whole_layer_its_input_alone_goes_to_the_host(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyggtrain.nn.host_stash._MIN_BYTES", 1)
    sent: list[torch.Tensor] = []
    send = HostStash._send

    def noted(self: HostStash, tensor: torch.Tensor, memory: Any) -> Any:
        sent.append(tensor)
        return send(self, tensor, memory)

    monkeypatch.setattr(HostStash, "_send", noted)
    model = loaded(path, "gpu")
    found = trained(model, kept=[Kept(on_host=True, halves=False)] * 2)
    assert_equal(found, trained(loaded(path, None)))
    width = model.fused_layers[0].attention.output.shape[0]
    assert [tuple(x.shape) for x in sent] == [(24, width)] * 2
    assert all(not part.entries or part.is_half for part in model._stash._parts)  # type: ignore[union-attr]
    assert model.stashed_bytes == sum(pinned_bytes(x.numel() * x.itemsize) for x in sent)
    model.release_stash()
    assert model.stashed_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cpus_layers_give_the_loss_and_gradients_of_the_graph(
    path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = loaded(path, "cpu"), loaded(path, None)
    assert parts_of(model) == [[AttentionHalf, FeedForwardHalf]] * 2 and parts_of(plain) == [[None]] * 2
    # What the word means is for a GPU: its plan of memory, and CUDA graphs.
    assert not model.is_fused and not model.can_capture
    calls = []

    def counted(half: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, **options: calls.append(half) or half(*arguments, **options)

    for half in (cpu_attention_block, cpu_feed_forward):
        monkeypatch.setattr(f"pyggtrain.nn.fused_layer.{half.__name__}", counted(half))
    assert_equal(trained(model, policy=policy), trained(plain))
    assert calls == [cpu_attention_block, cpu_feed_forward] * 2


def test_attention_to_later_tokens_is_no_half(tmp_path: Path) -> None:
    model = loaded(write_two_layers(tmp_path / "dream.gguf", "dream", {}, DENSE | BIASES), "cpu")
    assert model.diffusion is not None and parts_of(model) == [[None]] * 2


def test_dropout_runs_through_single_operations_on_a_cpu(path: Path) -> None:
    model, plain = loaded(path, "cpu"), loaded(path, None)
    assert_equal(trained(model, policy="layers", dropout=0.5), trained(plain, dropout=0.5))


def changed(graph: Graph, place: int, **fields: object) -> Graph:
    nodes = list(graph.nodes)
    nodes[place] = replace(nodes[place], **fields)  # type: ignore[arg-type]
    return replace(graph, nodes=tuple(nodes))


def of_kind(halves: list[Half], kind: type) -> list[Half]:
    return [half for half in halves if isinstance(half.modules, kind)]


def test_halves_are_in_the_order_of_the_layers_and_the_last_attention_takes_the_wanted_rows(path: Path) -> None:
    halves = halves_in(path)
    assert [type(half.modules) for half in halves] == [AttentionHalf, FeedForwardHalf] * 2
    assert [half.selects_rows for half in halves] == [False, False, True, False]
    assert all(one.result == other.sources[0] for one, other in pairwise(halves))


def test_another_residual_another_function_or_another_reader_is_no_half(path: Path) -> None:
    halves = halves_in(path)
    attention, feed_forward = halves[:2]

    def other_residual(graph: Graph) -> Graph:
        sources = graph.nodes[attention.result].sources
        embedding = attention.sources[0]
        other = max(attention.nodes - {attention.result})
        return changed(graph, attention.result, sources=tuple(other if one == embedding else one for one in sources))

    def other_function(graph: Graph) -> Graph:
        (swiglu,) = (index for index in feed_forward.nodes if graph.nodes[index].op == "GLU.SWIGLU")
        return changed(graph, swiglu, op="GLU.GEGLU")

    def other_reader(graph: Graph) -> Graph:
        inside = max(feed_forward.nodes - {feed_forward.result})
        return changed(graph, len(graph.nodes) - 1, sources=(*graph.nodes[-1].sources, inside))

    assert len(of_kind(halves_in(path, other_residual), AttentionHalf)) == 1
    assert len(of_kind(halves_in(path, other_function), FeedForwardHalf)) == 1
    assert len(of_kind(halves_in(path, other_reader), FeedForwardHalf)) == 1
    assert len(halves_in(path, other_reader)) == 3


@pytest.mark.usefixtures("_halves_of_a_gpu")
def test_dropout_leaves_the_fused_way(path: Path) -> None:
    model = loaded(path, "gpu")
    attach(model, LoraConfig(r=2, lora_alpha=2.0, lora_dropout=0.5), seed=0)
    model.eval()
    assert model.is_fused and model.can_capture
    model.train()
    assert not model.is_fused and not model.can_capture
