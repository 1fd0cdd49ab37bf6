"""Several residual streams that are mixed for each token (manifold-constrained hyper-connections, Xie et al. 2025), M
streams.

In a graph the streams x are [1, T, M, D], what a layer reads and writes is [1, 1, T, D].
"""

import torch

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering

# ggml's operation is written for four streams.
_NUM_STREAMS = 4


def _pre(graph: Graph, node: Node) -> Kernel:
    """scale Σ_m w_m x_m: what a layer reads. Weights are [1, 1, T, M], or gates [1, T, M, D] that pass a sigmoid
    first.
    """
    scale, is_gated = node.number(0), bool(node.integer(1))

    def kernel(frame: Frame, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        factors = torch.sigmoid(weights) if is_gated else weights.squeeze(0).unsqueeze(-1)
        return (x * factors).sum(2).unsqueeze(1) * scale

    return kernel


def _post(graph: Graph, node: Node) -> Kernel:
    """post_m y + Σ_s comb[s, m] x_s: the streams after a layer gave y. Without comb each stream keeps its own."""

    def kernel(
        frame: Frame, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor | None = None
    ) -> torch.Tensor:
        added = y.squeeze(0).unsqueeze(2) * post.squeeze(0).unsqueeze(-1)
        return added + (x if comb is None else comb.to(x.dtype).transpose(-1, -2) @ x)

    return kernel


def _comb(graph: Graph, node: Node) -> Kernel:
    """The mixing matrix [1, T, M, M] of each token, made nearly doubly stochastic by Sinkhorn's iteration."""
    eps, num_iterations = node.number(0), node.integer(1)

    def kernel(frame: Frame, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        first = 2 * _NUM_STREAMS
        logits = mixes[0, 0, :, first:] * scale.flatten()[2] + base.flatten()[first:]
        comb = logits.reshape(-1, _NUM_STREAMS, _NUM_STREAMS).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(num_iterations - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return comb.unsqueeze(0)

    return kernel


LOWERINGS: dict[str, Lowering] = {"DSV4_HC_COMB": _comb, "DSV4_HC_POST": _post, "DSV4_HC_PRE": _pre}
