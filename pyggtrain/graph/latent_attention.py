"""Multi-head latent attention (DeepSeek-AI 2024, 2405.04434, eq. 9-19) with keys and values of each head again.

All heads share one latent row c of L numbers for each token. llama.cpp serves it absorbed: with W_k, W_v the matrices
that make a head's key and value from c,

    s = (W_kᵀ q) · c + q' · k'        o = W_v Σ_s p_s c_s          q', k' the rotated parts, k' shared by all heads

so that a cache holds c and k' alone. For training that is the long way: every score is a product of L + R numbers. The
same, multiplied the other way round,

    s = q · (W_k c) + q' · k'         o = Σ_s p_s (W_v c_s)

takes products of K + R numbers (192 instead of 576 in DeepSeek-V2), which fit an attention kernel.
"""

from dataclasses import replace

from pyggtrain.graph.ir import Graph, Node

OP = "LATENT_ATTENTION"


class _OtherError(Exception):
    """The structure is another one."""


def unabsorb(graph: Graph) -> Graph:
    """The graph in which W_v Σ p c is one operation "LATENT_ATTENTION.<mask>" with the sources q, q', c, k', W_k, W_v,
    wherever attention is absorbed and nothing else reads it.
    """
    users: list[list[int]] = [[] for _ in graph.nodes]
    for index, node in enumerate(graph.nodes):
        for source in node.sources:
            if source is not None:
                users[source].append(index)
    nodes = list(graph.nodes)
    for index, node in enumerate(graph.nodes):
        if node.op.startswith("FLASH_ATTN_EXT."):
            try:
                place, found = _latent(graph, users, index)
            except _OtherError:
                continue
            nodes[place] = found
    return replace(graph, nodes=tuple(nodes))


def _require(condition: bool) -> None:
    if not condition:
        raise _OtherError


def _latent(graph: Graph, users: list[list[int]], index: int) -> tuple[int, Node]:
    """(the product with W_v, what takes its place) of the attention `index`."""
    attention = graph.nodes[index]
    _require(attention.number(1) == 0 and (len(attention.sources) < 5 or attention.sources[4] is None))
    q, k, v = (_past_views(graph, source) for source in attention.sources[:3])
    # Keys and values are the same memory, of which values are the first L numbers of a row.
    _require(k == v and graph.nodes[k].op == "WRITE" and attention.shape[3] != graph.nodes[q].shape[3])
    written = graph.nodes[k].sources[1]
    _require(written is not None and graph.nodes[written].op == "SET_ROWS")
    assert written is not None
    rows = _past_views(graph, graph.nodes[written].sources[0])
    c, k_rotated = _joined(graph, rows)
    absorbed, q_rotated = _joined(graph, q)
    c, absorbed = (_past_views(graph, part) for part in (c, absorbed))
    product = graph.nodes[absorbed]
    _require(product.op == "MUL_MAT" and len(product.sources) == 2)
    w_k, q_heads = product.sources
    _require(len(users[index]) == 1 and graph.nodes[users[index][0]].op == "PERMUTE")
    (permuted,) = users[index]
    _require(len(users[permuted]) == 1)
    (place,) = users[permuted]
    output = graph.nodes[place]
    _require(output.op == "MUL_MAT" and len(output.sources) == 2 and output.sources[1] == permuted)
    w_v = output.sources[0]
    assert w_k is not None and w_v is not None and q_heads is not None
    latent, width = graph.nodes[c].shape[3], graph.nodes[q_heads].shape[3]
    heads = graph.nodes[q_heads].shape[1]
    _require(graph.nodes[w_k].role == graph.nodes[w_v].role == "weight")
    _require(graph.nodes[w_k].shape == (1, heads, latent, width))
    _require(graph.nodes[w_v].shape == (1, heads, output.shape[3], latent))
    _require(attention.shape[3] == latent and graph.nodes[k_rotated].shape[2] == 1)
    return place, replace(
        output,
        op=attention.op.replace("FLASH_ATTN_EXT", OP),
        params=attention.params,
        sources=(q_heads, q_rotated, c, k_rotated, w_k, w_v),
    )


def _past_views(graph: Graph, index: int | None) -> int:
    """What a chain of views shows."""
    while index is not None and graph.nodes[index].op in ("VIEW", "PERMUTE", "RESHAPE"):
        index = graph.nodes[index].sources[0]
    _require(index is not None)
    assert index is not None
    return index


def _joined(graph: Graph, index: int) -> tuple[int, int]:
    """The two parts of rows [.., a | b]."""
    node = graph.nodes[index]
    _require(node.op == "CONCAT" and node.integer(0) == 3)
    first, second = node.sources
    _require(first is not None and second is not None)
    assert first is not None and second is not None
    return first, second
