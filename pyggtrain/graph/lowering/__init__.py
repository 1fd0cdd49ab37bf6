"""One torch function for each ggml operation: the table that `model` builds a module from.

A lowering takes the node and gives its kernel, a function of the frame and the sources' values. Values have four
dimensions in torch order, as in the graph; sources that an operation does not take are None. Everything is plain
differentiable torch, except where the project has its own operation; what llama.cpp selects (ARGSORT, TOP_K, row
numbers) has no gradient, as selection has none.

To add an operation: one function in the file of its family, one line in that file's table, one line in
    tests/graph/test_lowering.py.
"""

from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering import (
    attention,
    elementwise,
    glu,
    hyper_connections,
    matmul,
    norm,
    rope,
    rows,
    scan,
    shape,
)
from pyggtrain.graph.lowering.kernel import Kernel, Lowering

LOWERINGS: dict[str, Lowering] = {
    **attention.LOWERINGS,
    **elementwise.LOWERINGS,
    **glu.LOWERINGS,
    **hyper_connections.LOWERINGS,
    **matmul.LOWERINGS,
    **norm.LOWERINGS,
    **rope.LOWERINGS,
    **rows.LOWERINGS,
    **scan.LOWERINGS,
    **shape.LOWERINGS,
}


def lower(graph: Graph, node: Node) -> Kernel:
    """The kernel of a node that is no leaf.

    Raises:
        UnsupportedError: no lowering for this operation, or not for these settings of it.
    """
    lowering = LOWERINGS.get(node.op)
    if lowering is None:
        raise UnsupportedError(
            f"llama.cpp's graph of this model holds {node.op} ('{node.name}'), which has no lowering yet "
            f"(pyggtrain.graph.lowering knows {len(LOWERINGS)} operations). Use another model, or add it there."
        )
    return lowering(graph, node)


__all__ = ["LOWERINGS", "Kernel", "lower"]
