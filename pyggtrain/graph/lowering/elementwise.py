"""Operations on each number by itself: arithmetic with broadcasting, and unary functions."""

from collections.abc import Callable

import torch
from torch.nn import functional

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering


def repeated(b: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """b as ggml broadcasts it: a size that divides the wanted one is repeated, not only a size of 1."""
    if all(have in (1, want) for have, want in zip(b.shape, shape, strict=True)):
        return b
    return b.repeat([want // have for have, want in zip(b.shape, shape, strict=True)])


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Lowering:
    """Of two kinds of float the result is that of the larger operand: a weight or a router's factors that are spread
    over activations do not make them float32.
    """

    def lowering(graph: Graph, node: Node) -> Kernel:
        def kernel(frame: Frame, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            is_spread = b.numel() < a.numel() and b.is_floating_point() and a.is_floating_point()
            b = repeated(b, a.shape)
            return function(a, b.to(a.dtype) if is_spread else b)

        return kernel

    return lowering


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Lowering:
    def lowering(graph: Graph, node: Node) -> Kernel:
        return lambda frame, x: function(x)

    return lowering


def _scale(graph: Graph, node: Node) -> Kernel:
    scale, bias = node.number(0), node.number(1)
    return lambda frame, x: x * scale + bias if bias else x * scale


def _clamp(graph: Graph, node: Node) -> Kernel:
    low, high = node.number(0), node.number(1)
    return lambda frame, x: x.clamp(low, high)


def _add_id(graph: Graph, node: Node) -> Kernel:
    """x[t, k] + bias[ids[t, k]]: biases of the chosen experts."""

    def kernel(frame: Frame, x: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + bias[0, 0].to(x.dtype)[ids[0, 0].long()]

    return kernel


def _xielu(graph: Graph, node: Node) -> Kernel:
    """xIELU (Huang & Schlag 2024): a quadratic above zero, an exponential below."""
    alpha_n, alpha_p, beta, eps = (node.number(index) for index in range(1, 5))
    return lambda frame, x: torch.where(
        x > 0, alpha_p * x * x + beta * x, (torch.expm1(x.clamp(max=eps)) - x) * alpha_n + beta * x
    )


def _fill(graph: Graph, node: Node) -> Kernel:
    value = node.number(0)
    return lambda frame, x: x.new_full(frame.shape(node.shape), value)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    # ggml's CPU reads this from a table with half-precision entries; the function itself is what the table
    # approximates.
    return functional.gelu(x, approximate="tanh")


def _gelu_quick(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return functional.softplus(x, threshold=20)


LOWERINGS: dict[str, Lowering] = {
    "ADD": _binary(torch.add),
    "ADD1": _binary(torch.add),
    "ADD_ID": _add_id,
    "CLAMP": _clamp,
    "COS": _unary(torch.cos),
    "DIV": _binary(torch.div),
    "FILL": _fill,
    "LOG": _unary(torch.log),
    "MUL": _binary(torch.mul),
    "SCALE": _scale,
    "SIN": _unary(torch.sin),
    "SQR": _unary(torch.square),
    "SQRT": _unary(torch.sqrt),
    "SUB": _binary(torch.sub),
    "UNARY.ABS": _unary(torch.abs),
    "UNARY.ELU": _unary(functional.elu),
    "UNARY.EXP": _unary(torch.exp),
    "UNARY.EXPM1": _unary(torch.expm1),
    "UNARY.FLOOR": _unary(torch.floor),
    "UNARY.GELU": _unary(_gelu_tanh),
    "UNARY.GELU_ERF": _unary(functional.gelu),
    "UNARY.GELU_QUICK": _unary(_gelu_quick),
    "UNARY.HARDSIGMOID": _unary(functional.hardsigmoid),
    "UNARY.HARDSWISH": _unary(functional.hardswish),
    "UNARY.NEG": _unary(torch.neg),
    "UNARY.RELU": _unary(torch.relu),
    "UNARY.SGN": _unary(torch.sign),
    "UNARY.SIGMOID": _unary(torch.sigmoid),
    "UNARY.SILU": _unary(functional.silu),
    "UNARY.SOFTPLUS": _unary(_softplus),
    "UNARY.TANH": _unary(torch.tanh),
    "UNARY.XIELU": _xielu,
}
