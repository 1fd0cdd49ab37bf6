"""Finding parts of a graph by their structure: what `halves` and `mixtures` share."""

from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from pyggtrain.graph.ir import Graph
from pyggtrain.graph.weights import Weights

_Part = TypeVar("_Part")


class NoMatchError(Exception):
    """The structure is another one."""


def require(condition: bool) -> None:
    """Raise NoMatchError unless the structure is as a search wants it."""
    if not condition:
        raise NoMatchError


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
