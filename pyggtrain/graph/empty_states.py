"""Recurrences that begin with an empty state know documents, and the state leaves the graph.

llama.cpp hands each recurrence a state from a cache, which in training is empty, and what begins with the last tokens'
state cannot see where a document of the same row ends. So an operation that reads nothing but zeros there becomes one
that reads none, named "<op>.empty", and begins anew with each document (`lowering/scan.py`, `lowering/shape.py`):

    SSM_CONV(CONCAT(0, xᵀ), w)                  SSM_CONV.empty(xᵀ, w)
    GATED_DELTA_NET(q, k, v, g, beta, 0)        GATED_DELTA_NET.empty(q, k, v, g, beta)
    SSM_SCAN(0, x, dt, A, B, C, ids)            SSM_SCAN.empty(x, dt, A, B, C)
    RWKV_WKV6(k, v, r, u, w, 0)                 RWKV_WKV6.empty(k, v, r, u, w)
    RWKV_WKV7(r, w, k, v, a, b, 0)              RWKV_WKV7.empty(r, w, k, v, a, b)
    CONCAT(0, x without its last token)         CONCAT.empty(x without its last token)

Of the results only the outputs are kept: final states would go to the cache. Where anything else reads a state, the
graph keeps it, and with it the input that names it ("s_copy").
"""

import math
from dataclasses import replace

from pyggtrain.graph.ir import Graph, Node, Number, Sizes, at

# The source that holds the state, and those that the operation without it does not read.
_STATES = {
    "GATED_DELTA_NET": (5, (5,)),
    "RWKV_WKV6": (5, (5,)),
    "RWKV_WKV7": (6, (6,)),
    "SSM_SCAN": (0, (0, 6)),
}
# What makes zeros of zeros, whatever else it reads.
_MOVES = frozenset({"CONT", "CPY", "DUP", "GET_ROWS", "PERMUTE", "REPEAT", "RESHAPE", "TRANSPOSE", "VIEW"})
# Two lengths tell apart what depends on the number of tokens.
_LENGTHS = (Sizes(7, 1), Sizes(64, 1))


def drop_empty_states(graph: Graph) -> Graph:
    """The graph whose recurrences begin with no state where they began with an empty one. What is no longer read stays.

    Args:
        graph: pruned: a final state that is written to a cache is read by nobody.
    """
    is_zero: list[bool] = []
    for node in graph.nodes:
        is_zero.append(_is_zero(node, is_zero))
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for source in node.sources:
            if source is not None:
                readers.setdefault(source, []).append(index)
    nodes = list(graph.nodes)
    for index, node in enumerate(graph.nodes):
        reads = [graph.nodes[reader] for reader in readers.get(index, [])]
        if node.op in _STATES:
            state, dropped = _STATES[node.op]
            source = node.sources[state]
            if source is not None and is_zero[source] and _reads_outputs_alone(graph, node, reads):
                kept = tuple(source for place, source in enumerate(node.sources) if place not in dropped)
                nodes[index] = replace(node, op=f"{node.op}.empty", sources=kept, shape=_outputs(graph, node))
        elif node.op == "SSM_CONV":
            first = node.sources[0]
            joined = None if first is None else graph.nodes[first]
            if joined is not None and joined.op == "CONCAT" and _has_history(graph, joined, node, is_zero):
                nodes[index] = replace(node, op="SSM_CONV.empty", sources=(joined.sources[1], node.sources[1]))
        elif node.op == "CONCAT" and _is_shift(graph, node, is_zero):
            nodes[index] = replace(node, op="CONCAT.empty", sources=node.sources[1:2])
    return replace(graph, nodes=tuple(nodes))


def _is_zero(node: Node, is_zero: list[bool]) -> bool:
    """Whether nothing but zeros is in a value, given the same of all before it."""
    if node.is_leaf:
        return node.role == "state"
    sources = [is_zero[source] for source in node.sources if source is not None]
    if node.op == "WRITE":
        return all(sources)
    if node.op == "SCALE":
        return sources[0] and node.number(1) == 0.0
    return node.op in _MOVES and bool(sources) and sources[0]


def _outputs(graph: Graph, node: Node) -> tuple[Number, ...]:
    """Shape of what a recurrence gives for its tokens, without the states behind it."""
    of_values = {"GATED_DELTA_NET": 2, "RWKV_WKV6": 1, "RWKV_WKV7": 2, "SSM_SCAN": 1}[node.op]
    values = node.sources[of_values]
    assert values is not None
    return graph.nodes[values].shape


def _reads_outputs_alone(graph: Graph, node: Node, readers: list[Node]) -> bool:
    """Whether all that reads a result are views of exactly its outputs."""
    outputs = _outputs(graph, node)
    return all(
        reader.op == "VIEW"
        and reader.view_offset == 0
        and all(_count(reader.shape, sizes) == _count(outputs, sizes) for sizes in _LENGTHS)
        for reader in readers
    )


def _has_history(graph: Graph, joined: Node, convolution: Node, is_zero: list[bool]) -> bool:
    """Whether CONCAT puts zeros before the first token that a convolution sees, one for each earlier tap."""
    zeros, tokens = joined.sources
    weight = convolution.sources[1]
    if zeros is None or tokens is None or weight is None or not is_zero[zeros]:
        return False
    width = graph.nodes[weight].shape[-1]
    assert isinstance(width, int)
    return joined.integer(0) in (3, -1) and graph.nodes[zeros].shape[-1] == width - 1


def _is_shift(graph: Graph, node: Node, is_zero: list[bool]) -> bool:
    """Whether CONCAT puts one zero row before all tokens but the last: each token meets the one before it."""
    zeros, tokens = node.sources
    if zeros is None or tokens is None or not is_zero[zeros] or is_zero[tokens]:
        return False
    dim = node.integer(0)
    return graph.nodes[zeros].shape[dim] == 1 and all(
        at(node.shape[dim], sizes) == sizes.num_tokens
        and at(graph.nodes[tokens].shape[dim], sizes) == sizes.num_tokens - 1
        for sizes in _LENGTHS
    )


def _count(shape: tuple[Number, ...], sizes: Sizes) -> int:
    return math.prod(at(number, sizes) for number in shape)
