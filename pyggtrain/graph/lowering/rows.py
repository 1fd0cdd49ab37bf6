"""Taking, setting and choosing rows."""

import torch

from pyggtrain import ops
from pyggtrain.graph.frame import Frame, in_full
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering


def _get_rows(graph: Graph, node: Node) -> Kernel:
    """a [.., m, n] by ids [.., r] -> [.., r, n]. Rows of a weight do not come here: `model` gives them to
    `ops.embedding`.
    """

    def kernel(frame: Frame, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        index = ids[0].long()
        if a.shape[0] == a.shape[1] == 1:
            return a[0, 0][index]
        return torch.gather(a.expand(*index.shape[:2], -1, -1), 2, index[..., None].expand(*index.shape, a.shape[-1]))

    return kernel


def _set_rows(graph: Graph, node: Node) -> Kernel:
    """dst with dst[.., ids[r], :] = rows[.., r, :]."""

    def kernel(frame: Frame, rows: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        index = ids[0].long().expand(*dst.shape[:2], rows.shape[2])
        source = rows.to(dst.dtype).expand(*dst.shape[:2], *rows.shape[2:])
        return dst.scatter(2, index[..., None].expand(source.shape), source)

    return kernel


def _argsort(graph: Graph, node: Node) -> Kernel:
    is_descending = bool(node.integer(0))
    return lambda frame, x: torch.argsort(x.detach(), dim=-1, descending=is_descending, stable=True).int()


def _argsort_top_k(graph: Graph, node: Node) -> Kernel:
    """The first columns of a descending ARGSORT: see `rewrite.shorten_sorts`."""
    return lambda frame, x: ops.top_k(x, frame.shape(node.shape)[-1])


def _top_k(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x: torch.topk(x.detach(), frame.shape(node.shape)[-1], dim=-1).indices.int()


def _lightning_indexer(graph: Graph, node: Node) -> Kernel:
    """Σ_h w[t, h] max(0, q[t, h]·k[s]) + mask[t, s]: how much token t wants to see key s (DeepSeek-V3.2, eq. 1).

    q [Q, T, H, K], k [Q, S, 1, K], w [Q, 1, T, H], mask [Q, 1, T, S] -> [Q, 1, T, S]. Only a selection follows, so
    training leaves the indexer as it is.
    """

    def kernel(frame: Frame, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.relu(in_full(q).transpose(1, 2) @ in_full(k).to(in_full(q).dtype).permute(0, 2, 3, 1))
        return (w.permute(0, 3, 2, 1) * scores).sum(1, keepdim=True) + mask.to(scores.dtype)

    return kernel


def _arange(graph: Graph, node: Node) -> Kernel:
    start, step = node.number(0), node.number(2)

    def kernel(frame: Frame) -> torch.Tensor:
        shape = frame.shape(node.shape)
        return (start + step * torch.arange(shape[-1], dtype=torch.float32, device=frame.rows.device)).reshape(shape)

    return kernel


LOWERINGS: dict[str, Lowering] = {
    "ARANGE": _arange,
    "ARGSORT": _argsort,
    "ARGSORT.top_k": _argsort_top_k,
    "GET_ROWS": _get_rows,
    "LIGHTNING_INDEXER": _lightning_indexer,
    "SET_ROWS": _set_rows,
    "TOP_K": _top_k,
}
