"""Mixtures of experts in a graph, found by their structure: what `ops.fused.expert_feed_forward` computes at once.

    residual + Σ_j w[t, j] W_down (silu(W_gate z[t]) ∘ W_up z[t]),  all W of expert ids[t, j]

Each product may have a bias, and SwiGLU may be limited as in gpt-oss and deepseek4. A mixture is found from its gated
unit outwards and taken only if nobody else reads what lies between. How ids and weights
are chosen is not looked at: norm and router before it run as the graph has them, so every architecture whose experts
are such is served.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.search import NoMatchError, Search, matches, require
from pyggtrain.graph.weights import FrozenTensor, Weights
from pyggtrain.nn import ExpertHalf, ExpertLinear, HostStash
from pyggtrain.ops.fused import Kept


@dataclass(frozen=True, eq=False)
class Mixture:
    """Experts of a layer.

    Attributes:
        nodes: all that it stands for; `result` is the last of them.
        sources: the nodes that it reads: z, ids, w and, unless it is None, the residual.
        modules: its weights.
    """

    nodes: frozenset[int]
    sources: tuple[int | None, ...]
    result: int
    modules: ExpertHalf

    @property
    def probs(self) -> int | None:
        """The node of w."""
        return self.sources[2]

    def __call__(
        self, frame: Frame, values: Sequence[torch.Tensor | None], kept: Kept, stash: HostStash | None
    ) -> torch.Tensor:
        """The result [1, 1, T, D], fused.

        Args:
            values: of `self.sources`: z [1, 1, T, D], ids [1, 1, T, J], w [1, T, J, 1], residual [1, 1, T, D].
            kept, stash: see `nn.ExpertHalf`.
        """
        z, ids, probs, residual = values
        assert z is not None and ids is not None and probs is not None
        ids_TJ = ids[0, 0]
        residual_TD = None if residual is None else frame.rounded(residual).flatten(0, 2)
        y_TD = self.modules(
            frame.rounded(z).flatten(0, 2).contiguous(), ids_TJ, probs.reshape(ids_TJ.shape), residual_TD, kept, stash
        )
        return y_TD[None, None]


# Gated unit -> (alpha, offset, limit) of `kernels.expert_swiglu` from its node.
_UNITS: dict[str, Callable[[Node], tuple[float, float, float | None]]] = {
    "GLU.SWIGLU": lambda node: (1.0, 0.0, None),
    "GLU.SWIGLU_OAI": lambda node: (node.number(2), 1.0, node.number(3)),
    "GLU.SWIGLU_CLAMP": lambda node: (1.0, 0.0, node.number(3)),
}


def find_mixtures(graph: Graph, weights: Weights) -> list[Mixture]:
    """All mixtures of experts of a graph, in its order.

    Args:
        graph: after all passes of `rewrite`.
        weights: with the modules of its steps.
    """
    units = [index for index, node in enumerate(graph.nodes) if node.op in _UNITS]
    return matches(units, _Search(graph, weights).mixture)


class _Search(Search):
    def mixture(self, index: int) -> Mixture:
        """The mixture around the SwiGLU `index`."""
        glu = self.graph.nodes[index]
        require(len(glu.sources) == 2 and not glu.integer(1))
        nodes = {index}
        (gate, gate_bias), (up, up_bias) = (self._product(source, nodes) for source in glu.sources)
        down = self.only_user(index)
        last, down_bias = self._with_bias(down, nodes)
        read = {self.graph.nodes[product].sources[1:] for product in (gate, up)}
        require(len(read) == 1)
        spread, ids = read.pop()
        require(self._node(down, "MUL_MAT_ID").sources[1:] == (index, ids))
        node = self._node(spread, "RESHAPE")
        require(node.shape[2] == 1)
        z = node.sources[0]
        weighted = self.only_user(last)
        node = self._node(weighted, "MUL")
        require(node.sources[0] == last)
        probs = node.sources[1]
        assert spread is not None and ids is not None and z is not None and probs is not None
        require(self.graph.nodes[probs].shape[3] == 1)
        nodes |= {spread, weighted}
        result = self._sum(weighted, nodes)
        # A residual that is there already and added right away is part of the last pass over the sum. What shared
        # experts give comes later.
        residual = None
        if len(self.users[result]) == 1:
            user = self.users[result][0]
            node = self.graph.nodes[user]
            others = [source for source in node.sources if source != result]
            if node.op == "ADD" and len(others) == 1 and self._is_value(others[0], node, before=spread):
                residual, result = others[0], user
                nodes.add(user)
        self.require_closed(nodes, result)
        biases = (gate_bias, up_bias, down_bias)
        gate_linear, up_linear, down_linear = (self._module(product) for product in (gate, up, down))
        alpha, offset, limit = _UNITS[glu.op](glu)
        modules = ExpertHalf(gate_linear, up_linear, down_linear, biases, alpha, offset, limit)
        return Mixture(frozenset(nodes), (z, ids, probs, residual), result, modules)

    def _sum(self, weighted: int, nodes: set[int]) -> int:
        """The sum over a token's experts: views of each, added one after the other."""
        node = self.graph.nodes[weighted]
        count, width = node.shape[2:]
        assert isinstance(count, int) and isinstance(width, int)
        views = self.users[weighted]
        require(len(views) == count > 1)
        for place, view in enumerate(views):
            part = self._node(view, "VIEW")
            require(part.view_offset == 4 * width * place and part.strides[2:] == (node.strides[1], 4))
            require(part.shape == (1, 1, node.shape[1], width))
        nodes |= set(views)
        result = views[0]
        for view in views[1:]:
            total = self.only_user(view)
            node = self._node(total, "ADD")
            require(set(node.sources) == {result, view} and self.only_user(result) == total)
            result = total
            nodes.add(result)
        return result

    def _is_value(self, index: int | None, like: Node, *, before: int) -> bool:
        """Whether a node is an activation of the shape of `like` that is computed before another."""
        return index is not None and index < before and self.graph.nodes[index].shape == like.shape

    def _node(self, index: int | None, op: str) -> Node:
        require(index is not None and self.graph.nodes[index].op == op)
        assert index is not None
        return self.graph.nodes[index]

    def _product(self, index: int | None, nodes: set[int]) -> tuple[int, torch.Tensor | None]:
        """A product that the gated unit reads, behind its bias if it has one."""
        assert index is not None
        node = self.graph.nodes[index]
        product = node.sources[0] if node.op == "ADD_ID" else index
        require(len(self._node(product, "MUL_MAT_ID").sources) == 3)
        assert product is not None
        last, bias = self._with_bias(product, nodes)
        require(last == index)
        return product, bias

    def _with_bias(self, product: int, nodes: set[int]) -> tuple[int, torch.Tensor | None]:
        """The node that adds a product's bias, and the bias [E, N]; the product itself and None if it has none."""
        nodes.add(product)
        user = self.only_user(product)
        node = self.graph.nodes[user]
        if node.op != "ADD_ID":
            return product, None
        require(node.sources[0] == product and node.sources[2] == self.graph.nodes[product].sources[2])
        assert node.sources[1] is not None
        module = self.weights.modules.get(self.graph.nodes[node.sources[1]].name)
        if not isinstance(module, FrozenTensor):
            raise NoMatchError
        nodes.add(user)
        return user, module.values().flatten(0, -2)

    def _module(self, product: int) -> ExpertLinear:
        first = self.graph.nodes[product].sources[0]
        assert first is not None
        module = self.weights.modules.get(self.graph.nodes[first].name)
        if not isinstance(module, ExpertLinear):
            raise NoMatchError
        return module
