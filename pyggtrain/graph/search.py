"""Finding parts of a graph by their structure: what `halves`, `delta_halves` and `mixtures` share."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import torch

from pyggtrain.graph.ir import Graph, Node, Number
from pyggtrain.graph.weights import FrozenTensor, Weights
from pyggtrain.nn import QuantLinear

_Part = TypeVar("_Part")


class NoMatchError(Exception):
    """The structure is another one."""


def require(condition: bool) -> None:
    """Raise NoMatchError unless the structure is as a search wants it."""
    if not condition:
        raise NoMatchError


def fixed(number: Number) -> int:
    """A number that must not depend on the batch."""
    if not isinstance(number, int):
        raise NoMatchError
    return number


def matches(indices: Sequence[int], part_at: Callable[[int], _Part]) -> list[_Part]:
    """What `part_at` finds at these nodes, without those where it raises NoMatchError."""
    found = []
    for index in indices:
        try:
            found.append(part_at(index))
        except NoMatchError:
            continue
    return found


class Search:
    """A graph whose nodes know who reads them.

    Args:
        graph: after all passes of `rewrite`.
        weights: with the modules of its steps.
    """

    def __init__(self, graph: Graph, weights: Weights) -> None:
        self.graph, self.weights = graph, weights
        self.users: list[list[int]] = [[] for _ in graph.nodes]
        for index, node in enumerate(graph.nodes):
            for source in node.sources:
                if source is not None:
                    self.users[source].append(index)

    def only_user(self, index: int) -> int:
        """The one node that reads `index`."""
        require(len(self.users[index]) == 1)
        return self.users[index][0]

    def require_closed(self, nodes: Set[int], result: int) -> None:
        """Nothing outside of a part reads what is inside, but for its result."""
        require(all(user in nodes for index in nodes - {result} for user in self.users[index]))


@dataclass(frozen=True, eq=False)
class NormWeight:
    """Weight and eps of a norm.

    Attributes:
        weight: float32 [D].
        eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float


class HalfSearch(Search):
    """Looks for a layer's half: it grows a set of nodes from the middle outwards, to x and to the sum with x."""

    def enter(self, index: int | None, nodes: set[int]) -> Node:
        """A node that belongs to the half."""
        require(index is not None and not self.graph.nodes[index].is_leaf)
        assert index is not None
        nodes.add(index)
        return self.graph.nodes[index]

    def product(self, index: int, nodes: set[int]) -> int:
        """What a product with a trainable weight reads."""
        node = self.enter(index, nodes)
        require(node.op == "MUL_MAT" and len(node.sources) >= 2 and node.sources[1] is not None)
        self.linear(index)
        assert node.sources[1] is not None
        return node.sources[1]

    def linear(self, product: int) -> QuantLinear:
        weight = self.graph.nodes[first_source(self.graph.nodes[product])]
        module = self.weights.modules.get(weight.name) if weight.role == "weight" else None
        if not isinstance(module, QuantLinear):
            raise NoMatchError
        return module

    def norm(self, index: int, nodes: set[int]) -> tuple[NormWeight, int]:
        """A norm with weight, and the node that it reads."""
        node = self.enter(index, nodes)
        require(node.op == "RMS_NORM" and len(node.sources) == 2)
        return self.norm_weight(index), first_source(node)

    def norm_weight(self, index: int) -> NormWeight:
        node = self.graph.nodes[index]
        require(node.op == "RMS_NORM" and len(node.sources) == 2 and node.sources[1] is not None)
        assert node.sources[1] is not None
        return NormWeight(self.numbers(node.sources[1]), node.number(0))

    def numbers(self, index: int) -> torch.Tensor:
        """A weight that is read as numbers, float32, as a vector."""
        node = self.graph.nodes[index]
        module = self.weights.modules.get(node.name) if node.role == "weight" else None
        if not isinstance(module, FrozenTensor):
            raise NoMatchError
        return module.values().flatten()

    def residual_sum(self, product: int, x: int, nodes: set[int]) -> tuple[int, bool]:
        """The node that adds x to a product, and whether it does so for the wanted rows alone."""
        index, others, selects_rows = product, {x}, False
        node = self.graph.nodes[self.only_user(index)]
        if node.op == "RESHAPE" and node.shape == self.graph.nodes[index].shape:
            index = self.only_user(index)
            nodes.add(index)
            node = self.graph.nodes[self.only_user(index)]
        if node.op == "GET_ROWS":
            rows = self.graph.nodes[node.sources[1]] if node.sources[1] is not None else None
            require(rows is not None and rows.role == "input" and rows.name == "out_ids")
            index, selects_rows = self.only_user(index), True
            others = {
                user
                for user in self.users[x]
                if self.graph.nodes[user].op == "GET_ROWS" and self.graph.nodes[user].sources == (x, node.sources[1])
            }
            nodes |= {index, *others}
        result = self.only_user(index)
        node = self.graph.nodes[result]
        require(node.op == "ADD" and len(node.sources) == 2)
        first, second = node.sources
        require((first == index and second in others) or (second == index and first in others))
        nodes.add(result)
        return result, selects_rows


def first_source(node: Node) -> int:
    require(bool(node.sources) and node.sources[0] is not None)
    assert node.sources[0] is not None
    return node.sources[0]
