"""Products of two activations, or with a weight that is no plain matrix.

ggml's MUL_MAT(a, b) is b aᵀ over the last two dimensions; the leading ones of a are repeated in runs (grouped heads),
not in turns.
A product with a weight matrix does not come here: `model` gives it to an `nn.QuantLinear`.
"""

import torch

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering


def _mul_mat(graph: Graph, node: Node) -> Kernel:
    def kernel(frame: Frame, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        for dim in (0, 1):
            if a.shape[dim] not in (1, b.shape[dim]):
                a = a.repeat_interleave(b.shape[dim] // a.shape[dim], dim)
        y = b @ a.to(b.dtype).transpose(-1, -2)
        return y if bias is None else y + bias

    return kernel


def _mul_mat_scaled(graph: Graph, node: Node) -> Kernel:
    """(b aᵀ) s: a product and the file's scale of its weight, which `rewrite.take_out_adapter` joins."""
    product = _mul_mat(graph, node)
    return lambda frame, a, b, scale: product(frame, a, b) * scale


LOWERINGS: dict[str, Lowering] = {"MUL_MAT": _mul_mat, "MUL_MAT_SCALED": _mul_mat_scaled}
