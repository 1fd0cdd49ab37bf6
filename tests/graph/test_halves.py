"""Halves of layers: found where the structure is theirs and nowhere else, equal to the operations they stand for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from dense_models import LAYERS, losses_and_gradients, write_dense
from torch import nn

from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph import model as graph_model
from pyggtrain.graph.halves import Half, find_halves
from pyggtrain.graph.importer import import_steps
from pyggtrain.graph.ir import Graph
from pyggtrain.graph.model import ImportedModel, training_graph
from pyggtrain.graph.weights import Weights
from pyggtrain.nn import AttentionHalf, FeedForwardHalf
from pyggtrain.ops.fused import Kept


@pytest.fixture(autouse=True)
def _halves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)


@pytest.fixture(scope="module", params=LAYERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    return write_dense(tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf", request.param)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU, and this runs on a CPU"
)
@pytest.mark.parametrize("kept", [Kept(), Kept(attention=False), Kept(gate_up=True, weights=True)], ids=str)
def test_fused_layers_give_the_loss_and_gradients_of_the_graph(path: Path, kept: Kept) -> None:
    model, found = losses_and_gradients(path, fused=True, kept=[kept, Kept()])
    assert model.is_fused and len(model.fused_layers) == 2
    plain, wanted = losses_and_gradients(path, fused=False)
    assert not plain.is_fused
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.abs().max()))


def halves_of(path: Path, change: Callable[[Graph], Graph] = lambda graph: graph) -> list[Half]:
    """The halves of a file's graph, changed first."""
    file = GGUFFile.open(path)
    graph, reach = training_graph(file)
    weights = Weights(nn.Module(), file, device="cpu", compute="auto")
    import_steps(graph, reach, weights, compute="auto")
    return find_halves(change(graph), weights)


def changed(graph: Graph, place: int, **fields: object) -> Graph:
    nodes = list(graph.nodes)
    nodes[place] = replace(nodes[place], **fields)  # type: ignore[arg-type]
    return replace(graph, nodes=tuple(nodes))


def of_kind(halves: list[Half], kind: type) -> list[Half]:
    return [half for half in halves if isinstance(half.modules, kind)]


def test_halves_are_in_the_order_of_the_layers_and_the_last_attention_takes_the_wanted_rows(path: Path) -> None:
    halves = halves_of(path)
    assert [type(half.modules) for half in halves] == [AttentionHalf, FeedForwardHalf] * 2
    assert [half.selects_rows for half in halves] == [False, False, True, False]
    assert all(one.result == other.sources[0] for one, other in pairwise(halves))


def test_another_residual_another_function_or_another_reader_is_no_half(path: Path) -> None:
    halves = halves_of(path)
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

    assert len(of_kind(halves_of(path, other_residual), AttentionHalf)) == 1
    assert len(of_kind(halves_of(path, other_function), FeedForwardHalf)) == 1
    assert len(of_kind(halves_of(path, other_reader), FeedForwardHalf)) == 1
    assert len(halves_of(path, other_reader)) == 3


def test_dropout_leaves_the_fused_way(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_model, "can_run_fused", lambda dtype, device: True)
        model = ImportedModel(GGUFFile.open(path))
    attach(model, LoraConfig(r=2, lora_alpha=2.0, lora_dropout=0.5), seed=0)
    model.eval()
    assert model.is_fused and model.can_capture
    model.train()
    assert not model.is_fused and not model.can_capture
