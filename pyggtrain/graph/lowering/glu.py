"""Gated linear units: act(gate) ∘ up, of two tensors or of the halves of one.

Parameters of a node: 1 says that the halves are swapped, 2 and 3 are alpha and limit of the clamped kinds.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from pyggtrain import ops
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering


def _gated(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Lowering:
    def lowering(graph: Graph, node: Node) -> Kernel:
        return _on_gate_and_up(node, function)

    return lowering


def _on_gate_and_up(node: Node, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Kernel:
    is_swapped = bool(node.integer(1))

    def kernel(frame: Frame, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        if up is None:
            gate, up = reversed(gate.chunk(2, -1)) if is_swapped else gate.chunk(2, -1)
        return function(gate, up)

    return kernel


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.dtype == up.dtype and (gate.dtype == torch.float32 or gate.is_cuda):
        return ops.swiglu(gate, up)
    return functional.silu(gate) * up


def _swiglu_oai(graph: Graph, node: Node) -> Kernel:
    """gpt-oss: x sigmoid(alpha x) (y + 1), x = min(gate, limit), y = clamp(up, -limit, limit)."""
    alpha, limit = node.number(2), node.number(3)

    def function(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        x = gate.clamp(max=limit)
        return x * torch.sigmoid(alpha * x) * (up.clamp(-limit, limit) + 1)

    return _on_gate_and_up(node, function)


def _swiglu_clamp(graph: Graph, node: Node) -> Kernel:
    limit = node.number(3)
    return _on_gate_and_up(node, lambda gate, up: functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


LOWERINGS: dict[str, Lowering] = {
    "GLU.GEGLU": _gated(lambda gate, up: functional.gelu(gate, approximate="tanh") * up),
    "GLU.GEGLU_ERF": _gated(lambda gate, up: functional.gelu(gate) * up),
    "GLU.GEGLU_QUICK": _gated(lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up),
    "GLU.REGLU": _gated(lambda gate, up: torch.relu(gate) * up),
    "GLU.SWIGLU": _gated(_swiglu),
    "GLU.SWIGLU_CLAMP": _swiglu_clamp,
    "GLU.SWIGLU_OAI": _swiglu_oai,
}
