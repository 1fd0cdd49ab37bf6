"""A compute graph as data, with the number of tokens and of output rows symbolic.

llama.cpp gives a graph for one number of tokens T and one of output rows O. Between lengths only numbers change, never
the nodes; each number is a polynomial

    c + t T + t2 T² + o O

(sizes are linear; strides of T x T tensors are square). Four captures give the coefficients and a fifth one checks
them.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.capture import Capture, Captures


class Sizes(NamedTuple):
    """What the symbolic numbers stand for in one run."""

    num_tokens: int
    num_outputs: int


@dataclass(frozen=True)
class Polynomial:
    """(c + t T + t2 T² + o O) / divisor, a whole number at every length that the graph runs at."""

    constant: int
    tokens: int
    tokens_squared: int
    outputs: int
    divisor: int = 1

    def at(self, sizes: Sizes) -> int:
        """Its value.

        Raises:
            UnsupportedError: it is no whole number there: the graph exists only at some lengths.
        """
        num_tokens, num_outputs = sizes
        dividend = (
            self.constant + (self.tokens + self.tokens_squared * num_tokens) * num_tokens + self.outputs * num_outputs
        )
        value, rest = divmod(dividend, self.divisor)
        if rest:
            raise UnsupportedError(
                f"This model's graph does not exist for {num_tokens} tokens: a size would be "
                f"{dividend} / {self.divisor}."
            )
        return value


Number = int | Polynomial


def at(number: Number, sizes: Sizes) -> int:
    """A size, stride, offset or parameter at given lengths."""
    return number if isinstance(number, int) else number.at(sizes)


@dataclass(frozen=True)
class Node:
    """One tensor of a graph: see `capture.CapturedTensor` for the fields, of which numbers may be symbolic here.

    Attributes:
        sources: the nodes that the operation reads, None where it takes none.
        view_parent: the node whose memory this is, or None.
        value: of an input of one document (`fit_document`), what llama.cpp wrote into it.
    """

    name: str
    op: str
    role: str
    type: str
    shape: tuple[Number, ...]
    strides: tuple[Number, ...]
    params: tuple[Number, ...]
    sources: tuple[int | None, ...]
    view_parent: int | None
    view_offset: Number
    value: bytes = b""

    @property
    def is_leaf(self) -> bool:
        return self.role != "node"

    def integer(self, index: int) -> int:
        """Parameter `index`, an int32.

        Raises:
            UnsupportedError: it depends on the number of tokens.
        """
        value = self.params[index]
        if not isinstance(value, int):
            raise UnsupportedError(
                f"Parameter {index} of {self.op} '{self.name}' depends on the number of tokens, "
                "which is not implemented."
            )
        return value

    def number(self, index: int) -> float:
        """Parameter `index`, a float32; raises as `integer`."""
        return struct.unpack("<f", struct.pack("<i", self.integer(index)))[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Ngrams:
    """How a file picks rows of a table by the last tokens (its `ple` keys): one hash for each size of n-gram and head.

    Attributes:
        ngram_size: the longest n-gram; there are sizes 2 to this.
        heads_per_ngram: rows for each size.
        eos_token_id: what lies before it does not count.
        layer_multipliers: of each place in an n-gram, the newest first.
        head_offsets, head_vocab_sizes: of each row's part of the table.
    """

    ngram_size: int
    heads_per_ngram: int
    eos_token_id: int
    layer_multipliers: Sequence[int]
    head_offsets: Sequence[int]
    head_vocab_sizes: Sequence[int]


@dataclass(frozen=True)
class Graph:
    """Nodes in llama.cpp's order of computing, each after those that it reads. For `window` and the like see
    `capture.Captures`.
    """

    nodes: tuple[Node, ...]
    logits: int
    window: int
    window_type: str
    is_causal: bool
    is_diffusion: bool
    uses_alibi: bool
    attn_temperature: tuple[float, float, float]
    ngrams: Ngrams | None = None


def fit(captures: Captures) -> Graph:
    """The graph whose numbers at each captured length are the captured ones.

    Raises:
        UnsupportedError: the captures differ in more than numbers, or a number is no such polynomial.
    """
    return _fit(captures, captures.graphs, _fit_number)


def fit_document(captures: Captures) -> Graph:
    """The graph of one document of one length, whose numbers depend on the number of output rows alone.

    An input keeps the value that llama.cpp wrote into it, unless that was another one for other tokens.

    Args:
        captures: of `capture.capture_document`.

    Raises:
        UnsupportedError: as `fit`.
    """
    few, many, other = captures.graphs
    graph = _fit(captures, (few, many), _fit_in_outputs)
    nodes = tuple(
        replace(node, value=ours.value if ours.value == theirs.value else b"")
        for node, ours, theirs in zip(graph.nodes, few.tensors, other.tensors, strict=True)
    )
    return replace(graph, nodes=nodes)


_Fit = Callable[[Sequence[Capture], Sequence[int], str], Number]


def _fit(captures: Captures, graphs: Sequence[Capture], fit_number: _Fit) -> Graph:
    lengths = {len(graph.tensors) for graph in graphs}
    if len(lengths) != 1:
        raise UnsupportedError(
            f"This model's graph has another number of nodes at each number of tokens ({sorted(lengths)}), "
            "which is not implemented."
        )
    nodes = tuple(_fit_node(graphs, index, fit_number) for index in range(len(graphs[0].tensors)))
    return Graph(
        nodes=nodes,
        logits=len(nodes) - 1,
        window=captures.window,
        window_type=captures.window_type,
        is_causal=captures.is_causal,
        is_diffusion=captures.is_diffusion,
        uses_alibi=captures.uses_alibi,
        attn_temperature=captures.attn_temperature,
    )


def _fit_node(graphs: Sequence[Capture], index: int, fit_number: _Fit) -> Node:
    tensors = [graph.tensors[index] for graph in graphs]
    first = tensors[0]
    for name in ("op", "role", "type", "sources", "view_parent"):
        if any(getattr(tensor, name) != getattr(first, name) for tensor in tensors):
            raise UnsupportedError(
                f"{name} of {first.op} '{first.name}' depends on the number of tokens, which is not implemented."
            )

    def row(field: str) -> tuple[Number, ...]:
        rows: list[tuple[int, ...]] = [getattr(tensor, field) for tensor in tensors]
        # Most are the same at every length.
        if all(row == rows[0] for row in rows):
            return rows[0]
        what = f"{field} of {first.op} '{first.name}'"
        return tuple(fit_number(graphs, values, what) for values in zip(*rows, strict=True))

    return Node(
        name=first.name,
        op=first.op,
        role=first.role,
        type=first.type,
        shape=row("shape"),
        strides=row("strides"),
        params=row("params"),
        sources=tuple(None if source < 0 else source for source in first.sources),
        view_parent=None if first.view_parent < 0 else first.view_parent,
        view_offset=fit_number(
            graphs, [tensor.view_offset for tensor in tensors], f"offset of {first.op} '{first.name}'"
        ),
    )


def _fit_in_outputs(graphs: Sequence[Capture], values: Sequence[int], what: str) -> Number:
    """c + o O from two captures."""
    (few, many), (value_few, value_many) = graphs, values
    if value_few == value_many:
        return value_few
    slope = Fraction(value_many - value_few, many.num_outputs - few.num_outputs)
    constant = value_few - slope * few.num_outputs
    divisor = math.lcm(slope.denominator, constant.denominator)
    return Polynomial(int(constant * divisor), 0, 0, int(slope * divisor), divisor)


def _fit_number(graphs: Sequence[Capture], values: Sequence[int], what: str) -> Number:
    if len(set(values)) == 1:
        return values[0]
    (a, b, c, d, _), (va, vb, vc, vd, _) = graphs, values
    # Newton's divided differences in T, then the slope in O at fixed T.
    slope_ab = Fraction(vb - va, b.num_tokens - a.num_tokens)
    slope_bc = Fraction(vc - vb, c.num_tokens - b.num_tokens)
    squared = (slope_bc - slope_ab) / (c.num_tokens - a.num_tokens)
    tokens = slope_ab - squared * (a.num_tokens + b.num_tokens)
    outputs = Fraction(vd - vc, d.num_outputs - c.num_outputs)
    constant = va - tokens * a.num_tokens - squared * a.num_tokens**2 - outputs * a.num_outputs
    divisor = math.lcm(*(part.denominator for part in (constant, tokens, squared, outputs)))
    found = Polynomial(
        constant=int(constant * divisor),
        tokens=int(tokens * divisor),
        tokens_squared=int(squared * divisor),
        outputs=int(outputs * divisor),
        divisor=divisor,
    )
    lengths = [Sizes(graph.num_tokens, graph.num_outputs) for graph in graphs]
    if any(found.at(sizes) != value for sizes, value in zip(lengths, values, strict=True)):
        raise UnsupportedError(
            f"The {what} is {list(values)} for {[sizes.num_tokens for sizes in lengths]} tokens: "
            "needed a polynomial of degree 2."
        )
    return found
