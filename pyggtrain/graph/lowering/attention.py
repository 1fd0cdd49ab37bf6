"""Attention: FLASH_ATTN_EXT, which names its mask, and SOFT_MAX, which some models write out around their own masks.

`rewrite.name_masks` puts the meaning of the mask into the operation's name, so that none is made:
"FLASH_ATTN_EXT.kq_mask" sees all earlier tokens (or all of its document), "FLASH_ATTN_EXT.kq_mask_swa" a window.
"""

import math

import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame, in_full
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering
from pyggtrain.graph.masked_attention import Mask, alibi_slopes, dense_attention, masked_attention


def _slopes(node: Node, max_bias: float, head_dim: int) -> torch.Tensor | None:
    if max_bias == 0:
        return None
    num_heads = node.shape[head_dim]
    assert isinstance(num_heads, int)
    return alibi_slopes(num_heads, max_bias)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[1, H, T, K] -> [T, H, K]."""
    return x.squeeze(0).transpose(0, 1)


def mask_of(graph: Graph, meaning: str) -> Mask:
    """The mask that an input of this meaning holds.

    Raises:
        UnsupportedError: a window of tokens that see later ones.
    """
    if meaning != "kq_mask_swa":
        return Mask(is_causal=graph.is_causal)
    if not graph.is_causal:
        raise UnsupportedError(
            f"Tokens of this model see later ones within a {graph.window_type} window, which is not implemented."
        )
    return Mask(graph.window_type, graph.window)


def _flash_attention(meaning: str | None) -> Lowering:
    def lowering(graph: Graph, node: Node) -> Kernel:
        softmax_scale, max_bias, softcap = node.number(0), node.number(1), node.number(2)
        slopes_H = _slopes(node, max_bias, head_dim=2)
        mask = None if meaning is None else mask_of(graph, meaning)

        def kernel(
            frame: Frame,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            mask_TS: torch.Tensor | None = None,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            sinks_H = None if sinks is None else sinks.reshape(-1)
            q, k, v = (frame.rounded(x) for x in (q, k, v))
            if mask is not None:
                q_THK, k_TNK, v_TNV = (_tokens_first(x) for x in (q, k, v))
                o_THV = masked_attention(
                    q_THK,
                    k_TNK,
                    v_TNV,
                    frame.batch.documents,
                    softmax_scale=softmax_scale,
                    mask=mask,
                    softcap=softcap,
                    slopes_H=slopes_H,
                    sinks_H=sinks_H,
                )
                return o_THV.unsqueeze(0)
            assert mask_TS is not None
            # Groups of heads may see other keys each: then there are several attentions in one operation.
            outputs = [
                dense_attention(
                    _tokens_first(q[group][None]),
                    _tokens_first(k[min(group, k.shape[0] - 1)][None]),
                    _tokens_first(v[min(group, v.shape[0] - 1)][None]),
                    mask_TS[min(group, mask_TS.shape[0] - 1), 0],
                    softmax_scale=softmax_scale,
                    softcap=softcap,
                    slopes_H=slopes_H,
                    sinks_H=sinks_H,
                )
                for group in range(q.shape[0])
            ]
            return torch.stack(outputs)

        return kernel

    return lowering


def _latent_attention(meaning: str) -> Lowering:
    """Attention whose keys and values are made from latent rows, see `graph.latent_attention`."""

    def lowering(graph: Graph, node: Node) -> Kernel:
        mask = mask_of(graph, meaning)

        def kernel(
            frame: Frame,
            q: torch.Tensor,
            q_rotated: torch.Tensor,
            c: torch.Tensor,
            k_rotated: torch.Tensor,
            w_k: torch.Tensor,
            w_v: torch.Tensor,
        ) -> torch.Tensor:
            """q [1, H, T, K], q_rotated [1, T, H, R], c [.., T, L], k_rotated [1, T, 1, R], w_k [1, H, L, K], w_v [1,
            H, V, L] -> [1, H, T, V].
            """
            q, q_rotated, c, k_rotated, w_k, w_v = (frame.rounded(x) for x in (q, q_rotated, c, k_rotated, w_k, w_v))
            num_heads, num_tokens = q.shape[1:3]
            c_TL = c.reshape(num_tokens, -1)
            w_k, w_v = (weight[0].to(c_TL.dtype) for weight in (w_k, w_v))
            q_THK = torch.cat([q[0].transpose(0, 1), q_rotated[0]], -1)
            k_THK = torch.mm(c_TL, w_k.transpose(0, 1).flatten(1)).view(num_tokens, num_heads, -1)
            k_THK = torch.cat([k_THK, k_rotated[0].expand(-1, num_heads, -1)], -1)
            v_THV = torch.mm(c_TL, w_v.flatten(0, 1).t()).view(num_tokens, num_heads, -1)
            o_THV = masked_attention(
                q_THK,
                k_THK,
                v_THV,
                frame.batch.documents,
                softmax_scale=node.number(0),
                mask=mask,
                softcap=node.number(2),
            )
            return o_THV.transpose(0, 1).unsqueeze(0)

        return kernel

    return lowering


def _soft_max(graph: Graph, node: Node) -> Kernel:
    """softmax(scale x + slope mask) over the last dimension, with a sink in the denominator if there is one."""
    scale, max_bias = node.number(0), node.number(1)
    slopes_H = _slopes(node, max_bias, head_dim=1)

    def kernel(
        frame: Frame, x: torch.Tensor, mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        scores = in_full(x) * scale
        if mask is not None:
            bias = mask[:, :, : x.shape[2]].to(scores.dtype)
            if bias.shape[1] not in (1, scores.shape[1]):
                bias = bias.repeat(1, scores.shape[1] // bias.shape[1], 1, 1)
            scores = scores + (bias if slopes_H is None else slopes_H.to(scores).reshape(1, -1, 1, 1) * bias)
        if sinks is None:
            return scores.softmax(-1)
        logits = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, logits], -1).softmax(-1)[..., :-1]

    return kernel


def dense_mask(frame: Frame, mask: Mask, *, uses_alibi: bool) -> torch.Tensor:
    """0 (with ALiBi: minus the distance) where a token sees another one, -inf elsewhere; float32 [1, 1, T, T].

    Only for models that compute with the mask itself.
    """
    batch = frame.batch
    # Bounds of documents are on the host, see `nn.Batch`.
    documents = torch.repeat_interleave(torch.arange(batch.num_documents), batch.cu_seqlens.diff().long())
    documents = documents.to(batch.positions_T.device)
    queries, keys = batch.positions_T.unsqueeze(1), batch.positions_T
    is_seen = documents.unsqueeze(1) == documents
    if mask.is_causal:
        is_seen &= keys <= queries
    if mask.window_type == "standard":
        is_seen &= queries - keys < mask.window
    elif mask.window_type == "chunked":
        is_seen &= keys >= queries // mask.window * mask.window
    values = -(keys - queries).abs().float() if uses_alibi else torch.zeros(is_seen.shape, device=is_seen.device)
    return values.masked_fill(~is_seen, -math.inf)[None, None]


LOWERINGS: dict[str, Lowering] = {
    "FLASH_ATTN_EXT": _flash_attention(None),
    "FLASH_ATTN_EXT.kq_mask": _flash_attention("kq_mask"),
    "FLASH_ATTN_EXT.kq_mask_swa": _flash_attention("kq_mask_swa"),
    "LATENT_ATTENTION.kq_mask": _latent_attention("kq_mask"),
    "LATENT_ATTENTION.kq_mask_swa": _latent_attention("kq_mask_swa"),
    "SOFT_MAX": _soft_max,
}
