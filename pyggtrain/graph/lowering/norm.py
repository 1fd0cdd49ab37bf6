"""Norms, sums, means and the largest over rows or boxes."""

from collections.abc import Callable

import torch

from pyggtrain import ops
from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame, in_full
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering


def _rms_norm(graph: Graph, node: Node) -> Kernel:
    """x / sqrt(mean(x²) + eps), times the weight that `rewrite.join` gave it."""
    eps = node.number(0)

    def kernel(frame: Frame, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        if weight is not None and (x.dtype == torch.float32 or x.is_cuda):
            return ops.rms_norm(x, weight.reshape(-1), eps=eps)
        y: torch.Tensor = in_full(x) * torch.rsqrt(in_full(x).square().mean(-1, keepdim=True) + eps)
        return (y if weight is None else y * weight).to(x.dtype)

    return kernel


def _norm(graph: Graph, node: Node) -> Kernel:
    """Layer norm without weight."""
    eps = node.number(0)
    return lambda frame, x: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def _l2_norm(graph: Graph, node: Node) -> Kernel:
    """x / max(|x|, eps)."""
    eps = node.number(0)

    def kernel(frame: Frame, x: torch.Tensor) -> torch.Tensor:
        numbers = in_full(x)
        length: torch.Tensor = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
        return (numbers / length.clamp(min=eps)).to(x.dtype)

    return kernel


def _group_norm(graph: Graph, node: Node) -> Kernel:
    """Layer norm over each of several groups of channels."""
    num_groups, eps = node.integer(0), node.number(1)

    def kernel(frame: Frame, x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(x.shape[0], num_groups, -1)
        return torch.nn.functional.layer_norm(groups, groups.shape[-1:], eps=eps).reshape(x.shape)

    return kernel


def _sum_rows(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x: x.sum(-1, keepdim=True)


def _sum(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x: x.sum().reshape(1, 1, 1, 1)


def _mean(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x: x.mean(-1, keepdim=True)


def _cumsum(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x: in_full(x).cumsum(-1)


def _pool_2d(graph: Graph, node: Node) -> Kernel:
    """The largest number or the mean of each box over the last two dimensions."""
    op, width, height, step_x, step_y, pad_x, pad_y = (node.integer(index) for index in range(7))
    if op not in _POOLS or pad_x or pad_y:
        raise UnsupportedError(
            f"{node.op} '{node.name}' pools in way {op} with padding {pad_x}, {pad_y}: needed 0 or 1"
        )
    pool = _POOLS[op]
    return lambda frame, x: pool(x, (height, width), stride=(step_y, step_x))


# ggml.h: GGML_OP_POOL_MAX, GGML_OP_POOL_AVG.
_POOLS: dict[int, Callable[..., torch.Tensor]] = {0: torch.nn.functional.max_pool2d, 1: torch.nn.functional.avg_pool2d}

LOWERINGS: dict[str, Lowering] = {
    "CUMSUM": _cumsum,
    "GROUP_NORM": _group_norm,
    "L2_NORM": _l2_norm,
    "MEAN": _mean,
    "NORM": _norm,
    "POOL_2D": _pool_2d,
    "RMS_NORM": _rms_norm,
    "SUM": _sum,
    "SUM_ROWS": _sum_rows,
}
