"""Recurrences of hand-made graphs lose a state that is empty, and keep one that is not known to be."""

import struct

import pytest

from pyggtrain.graph.empty_states import drop_empty_states
from pyggtrain.graph.ir import Graph, Node, Number, Polynomial
from pyggtrain.graph.rewrite import prune

TOKENS = Polynomial(0, 1, 0, 0)
EARLIER = Polynomial(-1, 1, 0, 0)
VALUES = (1, TOKENS, 2, 4)


class Sketch:
    """A graph written line by line; each line returns the node's number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def leaf(self, name: str, role: str, shape: tuple[Number, ...]) -> int:
        return self.op("NONE", name=name, role=role, shape=shape)

    def op(
        self,
        op: str,
        *sources: int | None,
        shape: tuple[Number, ...] = VALUES,
        name: str = "",
        role: str = "node",
        params: tuple[int, ...] = (),
        offset: int = 0,
    ) -> int:
        params = params + (0,) * (16 - len(params))
        self.nodes.append(Node(name, op, role, "f32", shape, (4,) * 4, params, sources, None, offset))
        return len(self.nodes) - 1

    def state(self, shape: tuple[Number, ...]) -> int:
        """What llama.cpp reads from a cache for one sequence."""
        cache = self.leaf("cache", "state", (1, 1, 1, 32))
        cleared = self.op("SCALE", self.op("VIEW", cache, shape=(1, 1, 1, 32)), shape=(1, 1, 1, 32))
        written = self.op("WRITE", cache, cleared, shape=(1, 1, 1, 32))
        rows = self.op("GET_ROWS", written, self.leaf("s_copy", "input", (1, 1, 1, 1)), shape=(1, 1, 1, 32))
        return self.op("RESHAPE", rows, shape=shape)

    def dropped(self) -> Graph:
        """The graph for its last node, without empty states."""
        graph = Graph(
            tuple(self.nodes),
            len(self.nodes) - 1,
            window=0,
            window_type="none",
            is_causal=True,
            is_diffusion=False,
            uses_alibi=False,
            attn_temperature=(0, 0, 0),
        )
        return prune(drop_empty_states(prune(graph)))


def values_of(sketch: Sketch, count: int) -> list[int]:
    return [sketch.leaf(f"x{index}", "input", VALUES) for index in range(count)]


@pytest.mark.parametrize(
    ("op", "count", "place"), [("GATED_DELTA_NET", 5, 5), ("RWKV_WKV6", 5, 5), ("RWKV_WKV7", 6, 6), ("SSM_SCAN", 5, 0)]
)
def test_a_recurrence_reads_no_empty_state_and_gives_its_outputs_alone(op: str, count: int, place: int) -> None:
    sketch = Sketch()
    values = values_of(sketch, count)
    sources = [*values[:place], sketch.state((1, 2, 4, 4)), *values[place:]]
    if op == "SSM_SCAN":
        sources.append(sketch.leaf("s_copy", "input", (1, 1, 1, 1)))
    result = sketch.op(op, *sources, shape=(1, 1, Polynomial(4, 1, 0, 0), 8))
    outputs = sketch.op("VIEW", result)
    # The final state goes to the cache, which nobody reads.
    sketch.op("WRITE", sketch.leaf("cache", "state", VALUES), sketch.op("VIEW", result, offset=64))
    sketch.op("UNARY.SILU", outputs)
    graph = sketch.dropped()
    assert [node.op for node in graph.nodes if not node.is_leaf] == [f"{op}.empty", "VIEW", "UNARY.SILU"]
    assert {node.name for node in graph.nodes if node.is_leaf} == {f"x{index}" for index in range(count)}
    (found,) = (node for node in graph.nodes if node.op == f"{op}.empty")
    assert found.shape == VALUES and len(found.sources) == count


def test_a_state_that_something_fills_or_reads_otherwise_stays() -> None:
    bias = struct.unpack("<i", struct.pack("<f", 1.0))[0]
    for kind in ("filled", "biased", "read", "last state read"):
        sketch = Sketch()
        values, state = values_of(sketch, 5), sketch.state((1, 2, 4, 4))
        if kind == "filled":
            state = sketch.op("WRITE", state, values[0], shape=(1, 2, 4, 4))
        elif kind == "biased":
            state = sketch.op("SCALE", state, shape=(1, 2, 4, 4), params=(0, bias))
        result = sketch.op("GATED_DELTA_NET", *values, state, shape=(1, 1, Polynomial(4, 1, 0, 0), 8))
        last = sketch.op("VIEW", result, offset=64 if kind == "last state read" else 0)
        if kind == "read":
            sketch.op("ADD", last, state)
        graph = sketch.dropped()
        assert any(node.name == "s_copy" for node in graph.nodes), kind


@pytest.mark.parametrize(("width", "is_dropped"), [(4, True), (3, False)])
def test_a_convolution_sees_the_zeros_before_a_document_itself(width: int, is_dropped: bool) -> None:
    sketch = Sketch()
    x = sketch.leaf("x", "input", (1, 1, 8, TOKENS))
    joined = sketch.op("CONCAT", sketch.state((1, 1, 8, 3)), x, params=(3,), shape=(1, 1, 8, Polynomial(3, 1, 0, 0)))
    sketch.op("SSM_CONV", joined, sketch.leaf("w", "weight", (1, 1, 8, width)), shape=(1, 1, TOKENS, 8))
    graph = sketch.dropped()
    assert any(node.name == "s_copy" for node in graph.nodes) != is_dropped
    assert (graph.nodes[-1].op == "SSM_CONV.empty") == is_dropped


@pytest.mark.parametrize(("tokens", "is_dropped"), [(EARLIER, True), (TOKENS, False)])
def test_a_shift_by_one_token_knows_documents(tokens: Number, is_dropped: bool) -> None:
    sketch = Sketch()
    x = sketch.leaf("x", "input", (1, 1, tokens, 8))
    sketch.op("CONCAT", sketch.state((1, 1, 1, 8)), x, params=(2,), shape=(1, 1, TOKENS, 8))
    graph = sketch.dropped()
    assert (graph.nodes[-1].op == "CONCAT.empty") == is_dropped
