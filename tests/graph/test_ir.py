"""Symbolic sizes: found from captures, evaluated at any length, refused where they are no polynomial."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.capture import LENGTHS, Capture, CapturedTensor, Captures
from pyggtrain.graph.ir import Node, Polynomial, Sizes, at, fit


def captures_of(*rows: tuple[int, ...]) -> Captures:
    """One leaf whose first parameters are `rows`, each with a value for each captured length."""
    graphs = []
    for position, (num_tokens, num_outputs) in enumerate(LENGTHS):
        params = tuple(row[position] for row in rows) + (0,) * (16 - len(rows))
        leaf = CapturedTensor("x", "NONE", "input", "f32", (1, 1, 1, 1), (4, 4, 4, 4), params, (), -1, 0)
        graphs.append(Capture(num_tokens, num_outputs, (leaf,)))
    return Captures(0, "none", True, False, False, (0, 0, 0), tuple(graphs))


@given(st.integers(-(10**6), 10**6), st.integers(-(10**4), 10**4), st.integers(-100, 100), st.integers(-(10**4), 10**4))
def test_a_polynomial_is_found_and_holds_between_the_captured_lengths(c: int, t: int, t2: int, o: int) -> None:
    row = tuple(c + t * tokens + t2 * tokens**2 + o * outputs for tokens, outputs in LENGTHS)
    (node,) = fit(captures_of(row)).nodes
    assert at(node.params[0], Sizes(37, 5)) == c + t * 37 + t2 * 37**2 + o * 5


def test_what_does_not_change_stays_a_number() -> None:
    (node,) = fit(captures_of((7, 7, 7, 7, 7))).nodes
    assert node.params[0] == 7 and node.integer(0) == 7


@pytest.mark.parametrize("row", [(1, 2, 4, 4, 9), (1, 1, 1, 1, 2), (256, 512, 1024, 1024, 2048)])
def test_other_functions_of_the_length_are_refused_by_name(row: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="params of NONE 'x'"):
        fit(captures_of(row))


def test_a_graph_with_other_nodes_at_other_lengths_is_refused() -> None:
    captures = captures_of()
    first = captures.graphs[0]
    longer = Capture(first.num_tokens, first.num_outputs, first.tensors * 2)
    with pytest.raises(UnsupportedError, match="another number of nodes"):
        fit(Captures(0, "none", True, False, False, (0, 0, 0), (longer, *captures.graphs[1:])))


def test_a_size_that_is_no_whole_number_is_refused() -> None:
    blocks_of_4 = Polynomial(constant=0, tokens=1, tokens_squared=0, outputs=0, divisor=4)
    assert blocks_of_4.at(Sizes(12, 1)) == 3
    with pytest.raises(UnsupportedError, match="does not exist for 13 tokens"):
        blocks_of_4.at(Sizes(13, 1))


def test_parameters_read_as_the_bits_of_a_float_and_must_not_depend_on_the_length() -> None:
    bits = struct.unpack("<i", struct.pack("<f", -1.5))[0]
    symbolic = Polynomial(0, 1, 0, 0)
    node = Node("y", "SCALE", "node", "f32", (1,) * 4, (4,) * 4, (bits, symbolic), (), None, 0)
    assert node.number(0) == -1.5
    with pytest.raises(UnsupportedError, match="Parameter 1 of SCALE 'y'"):
        node.integer(1)
