"""Halves of gated delta net hybrids: found in every pattern of layers and nowhere else, equal to the operations they
stand for.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from delta_models import TINY, Tiny, batch_of, write_delta
from dense_models import assert_equal, halves_in, loaded, trained
from on_gpu import compare as compare_with_cpu

from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.graph.ir import Graph
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import AttentionHalf, DeltaHalf, ExpertHalf, FeedForwardHalf
from pyggtrain.ops.fused import Kept

# What Triton's interpreter can compute in seconds: the smallest heads that the kernels take. The last two differ in
# whether qwen3next repeats its key heads.
SMALL = (
    Tiny("qwen35", (True, False), 1, 2, 16),
    Tiny("qwen35", (False, True), 1, 3, 16, taps=3, has_list=True),
    Tiny("qwen35moe", (True, False), 2, 4, 16),
    Tiny("qwen3next", (True, False), 2, 4, 16),
    Tiny("qwen3next", (True, False), 2, 2, 16),
)
# Of both layers of each.
LEAST, USUAL, MOST = Kept(attention=False), Kept(), Kept(gate_up=True, weights=True)
KEPT = ([USUAL, LEAST], [MOST, USUAL], [LEAST, MOST], [USUAL, USUAL], [LEAST, LEAST])


@pytest.fixture(autouse=True)
def _halves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the fused operations are Triton's")
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)


def num_halves(model: ImportedModel, kind: type) -> int:
    """Halves of layers of a kind."""
    halves = [half for layer in model.layers for half in layer.halves]  # type: ignore[union-attr]
    return sum(half is not None and isinstance(half.modules, kind) for half in halves)


def compare(tiny: Tiny, lengths: tuple[int, ...], kept: list[Kept], folder: Path) -> None:
    """Loss and gradients of fused layers and of the graph."""
    path = write_delta(tiny, folder / "tiny.gguf")
    model, plain = loaded(path, "gpu"), loaded(path, None)
    assert num_halves(model, DeltaHalf) == num_halves(model, AttentionHalf) == 1
    assert not num_halves(plain, object)
    batch = batch_of(*lengths)
    assert_equal(trained(model, kept=kept, batch=batch), trained(plain, batch=batch))


not_compiled = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU, and this runs on a CPU"
)


@not_compiled
@pytest.mark.parametrize(("tiny", "kept"), list(zip(SMALL, KEPT, strict=True)), ids=[tiny.id for tiny in SMALL])
def test_fused_layers_give_the_loss_and_gradients_of_the_graph(tiny: Tiny, kept: list[Kept], tmp_path: Path) -> None:
    compare(tiny, (3, 9), kept, tmp_path)


@not_compiled
@pytest.mark.slow
def test_documents_of_every_length_around_a_chunks_lie_in_one_batch(tmp_path: Path) -> None:
    compare(SMALL[0], (1, 63, 64, 65), [LEAST, USUAL], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
def test_a_gpu_gives_logits_and_gradients_of_the_cpu(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    found = compare_with_cpu(write_delta(tiny, tmp_path / "tiny.gguf"))
    # Feed-forward halves or mixtures are the second ones; experts with gate and up in one matrix are none.
    num_kinds = 1 if tiny.has_fused_experts else 2
    assert found.is_small and found.num_halves == num_kinds * len(tiny.is_recurrent), found


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
def test_each_layer_has_the_half_of_its_kind(tiny: Tiny, tmp_path: Path) -> None:
    halves = halves_in(write_delta(tiny, tmp_path / "tiny.gguf"))
    kinds = [type(half.modules) for half in halves]
    first = [DeltaHalf if is_recurrent else AttentionHalf for is_recurrent in tiny.is_recurrent]
    if tiny.architecture == "qwen35":
        assert kinds == [kind for one in first for kind in (one, FeedForwardHalf)]
        assert all(one.result == other.sources[0] for one, other in pairwise(halves))
    else:
        assert kinds == first
    for half in halves:
        if isinstance(half.modules, DeltaHalf):
            assert (half.modules.num_key_heads, half.modules.num_heads) == (tiny.key_heads, tiny.value_heads)
            assert half.modules.is_grouped == (tiny.architecture == "qwen3next")
        elif isinstance(half.modules, AttentionHalf):
            assert half.modules.is_gated


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_delta(SMALL[2], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def changed(graph: Graph, inside: frozenset[int], kind: str, **fields: object) -> Graph:
    """The graph with other fields of the first node of a kind inside a half."""
    place = min(index for index in inside if graph.nodes[index].op == kind)
    nodes = list(graph.nodes)
    nodes[place] = replace(nodes[place], **fields)  # type: ignore[arg-type]
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("GATED_DELTA_NET.empty", {"op": "GATED_DELTA_NET"}),
        ("UNARY.SOFTPLUS", {"op": "UNARY.RELU"}),
        ("UNARY.SIGMOID", {"op": "UNARY.TANH"}),
        ("UNARY.SILU", {"op": "UNARY.GELU"}),
        ("SSM_CONV.empty", {"op": "SSM_CONV"}),
        ("SCALE", {"params": (0,) * 16}),
        ("VIEW", {"view_offset": 4}),
        ("RESHAPE", {"op": "PERMUTE"}),
    ],
)
def test_another_function_is_no_delta_net(path: Path, op: str, fields: dict[str, object]) -> None:
    delta, attention = halves_in(path)
    assert isinstance(delta.modules, DeltaHalf)
    left = halves_in(path, lambda graph: changed(graph, delta.nodes, op, **fields))
    assert [half.result for half in left] == [attention.result]


@pytest.mark.parametrize(
    ("op", "fields"), [("UNARY.SIGMOID", {"op": "UNARY.TANH"}), ("CONT", {"op": "RESHAPE"}), ("MUL", {"op": "ADD"})]
)
def test_another_gate_is_no_gated_attention(path: Path, op: str, fields: dict[str, object]) -> None:
    delta, attention = halves_in(path)
    left = halves_in(path, lambda graph: changed(graph, attention.nodes, op, **fields))
    assert [half.result for half in left] == [delta.result]


def test_another_reader_is_no_half(path: Path) -> None:
    def other_reader(graph: Graph) -> Graph:
        inside = max(delta.nodes - {delta.result})
        last = graph.nodes[-1]
        return replace(graph, nodes=(*graph.nodes[:-1], replace(last, sources=(*last.sources, inside))))

    delta, attention = halves_in(path)
    assert [half.result for half in halves_in(path, other_reader)] == [attention.result]


def test_documents_run_together_and_memory_is_measured(path: Path) -> None:
    model = loaded(path, "gpu")
    assert [num_halves(model, kind) for kind in (DeltaHalf, AttentionHalf, ExpertHalf)] == [1, 1, 2]
    assert not model.takes_one_document
    # No formula knows these layers.
    assert not model.is_fused


def test_what_is_launched_depends_on_shapes_where_delta_nets_run_fused(path: Path) -> None:
    model = loaded(path, "gpu")
    assert model.can_capture and model.reads_chunks
    attach(model, LoraConfig(r=1, lora_dropout=0.5), seed=0)
    assert not model.can_capture
    plain = loaded(path, None)
    assert not plain._program.is_capturable and not plain.reads_chunks


def test_dropout_in_a_pair_and_heads_that_no_kernel_takes_leave_the_fused_way(path: Path) -> None:
    model = loaded(path, "gpu")
    half = model.layers[0].halves[0].modules  # type: ignore[union-attr]
    assert isinstance(half, DeltaHalf) and half.can_fuse(torch.float32, torch.device("cpu"))
    assert not replace(half, head_size=24).can_fuse(torch.float32, torch.device("cpu"))
    attach(model, LoraConfig(r=2, lora_alpha=2.0, lora_dropout=0.5), seed=0)
    model.eval()
    assert half.can_fuse(torch.float32, torch.device("cpu"))
    model.train()
    assert not half.can_fuse(torch.float32, torch.device("cpu"))
