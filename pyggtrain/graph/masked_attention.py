"""Attention inside documents, with what `ops.attention` does not have: windows, soft-cap, sinks and ALiBi.

    s[t, u] = c q[t]·k[u];  s = p tanh(s / p) if soft-capped;  s -= m_h |t - u| with ALiBi (Press et al. 2022)
    o[t]    = Σ_u exp(s[t, u]) v[u] / (Σ_u exp(s[t, u]) + exp(sink_h))         u over the visible tokens of t's document

Queries are taken in blocks. A block's scores exist only while it is computed and are computed again in backward, so
memory is block x keys and never tokens x tokens; keys outside the block's window are not read.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pyggtrain import ops
from pyggtrain.graph.frame import in_full
from pyggtrain.ops import Documents
from pyggtrain.ops.attention import MAX_HEAD, Variant

# Queries in one block: small against the keys of a long document, large against the cost of a call.
BLOCK = 256


@dataclass(frozen=True)
class Mask:
    """Which tokens of its document a token sees.

    Attributes:
        window_type: "none" (all), "standard" (itself and the window - 1 tokens before it), or "chunked" (from the
            start of its chunk of `window` positions on).
        window: tokens.
        is_causal: it sees no later token. Otherwise it sees all, and there is no window.
    """

    window_type: str = "none"
    window: int = 0
    is_causal: bool = True

    def variant(self, softcap: float, sinks_H: torch.Tensor | None) -> Variant:
        """The same for `ops.attention` on a GPU."""
        return Variant(
            window=self.window if self.window_type == "standard" else None,
            chunk=self.window if self.window_type == "chunked" else None,
            softcap=softcap,
            sinks_H=sinks_H,
        )

    def first_visible(self, position: int) -> int:
        """The earliest position that a token at `position` sees."""
        if self.window_type == "standard":
            return max(0, position - self.window + 1)
        if self.window_type == "chunked":
            return position // self.window * self.window
        return 0


def alibi_slopes(num_heads: int, max_bias: float) -> torch.Tensor:
    """m_h for each head, float64 [H], as ggml computes them (soft_max in ggml-cpu/ops.cpp)."""
    power = 1 << math.floor(math.log2(num_heads))
    even, odd = 2 ** (-max_bias / power), 2 ** (-max_bias / 2 / power)
    slopes = [even ** (head + 1) if head < power else odd ** (2 * (head - power) + 1) for head in range(num_heads)]
    return torch.tensor(slopes, dtype=torch.float64)


def masked_attention(
    q_THK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TNV: torch.Tensor,
    documents: Documents,
    *,
    softmax_scale: float,
    mask: Mask,
    softcap: float = 0.0,
    slopes_H: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each token to the tokens of its document that it sees.

    Args:
        q_THK: [T, H, K].
        k_TNK, v_TNV: [T, N, K] and [T, N, V], H % N == 0.
        documents: their bounds.
        softmax_scale: c, multiplies q·k.
        mask: which of these.
        softcap: p; 0: none.
        slopes_H: ALiBi's m, or None.
        sinks_H: logit of each head that takes weight and gives no value, or None.

    Returns:
        [T, H, V].
    """
    bounds = documents.bounds
    if not mask.is_causal and not softcap and slopes_H is None and sinks_H is None:
        return ops.attention(q_THK, k_TNK, v_TNV, documents, softmax_scale=softmax_scale, is_causal=False)
    if not q_THK.is_cuda and mask.window_type != "none" and documents.longest <= mask.window:
        mask = Mask()
    variant = mask.variant(softcap, sinks_H)
    is_wide = max(q_THK.shape[2], v_TNV.shape[2]) > MAX_HEAD
    if mask.is_causal and slopes_H is None and (not is_wide if q_THK.is_cuda else variant.is_plain):
        return _of_one_width(q_THK, k_TNK, v_TNV, documents, softmax_scale, variant)
    parts = []
    for start, end in pairwise(bounds):
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            low = start + mask.first_visible(first - start)
            high = last if mask.is_causal else end
            inputs = (
                q_THK[first:last],
                k_TNK[low:high],
                v_TNV[low:high],
                slopes_H,
                sinks_H,
                softmax_scale,
                softcap,
                mask,
                first - start,
                low - start,
            )
            parts.append(
                checkpoint(_block, *inputs, use_reentrant=False) if torch.is_grad_enabled() else _block(*inputs)
            )
    return torch.cat(parts)


def _of_one_width(
    q_THK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TNV: torch.Tensor,
    documents: Documents,
    softmax_scale: float,
    variant: Variant,
) -> torch.Tensor:
    """Attention by kernels whose keys and values are of one width: the narrower gets zeros behind it."""
    key_width, value_width = q_THK.shape[2], v_TNV.shape[2]
    if key_width < value_width:
        q_THK, k_TNK = (functional.pad(x, (0, value_width - key_width)) for x in (q_THK, k_TNK))
    elif value_width < key_width:
        v_TNV = functional.pad(v_TNV, (0, key_width - value_width))
    o_THK = ops.attention(q_THK, k_TNK, v_TNV, documents, softmax_scale=softmax_scale, variant=variant)
    return o_THK[..., :value_width]


def _block(
    q_QHK: torch.Tensor,
    k_SNK: torch.Tensor,
    v_SNV: torch.Tensor,
    slopes_H: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
    mask: Mask,
    first_query: int,
    first_key: int,
) -> torch.Tensor:
    """Queries at positions from `first_query` on against keys from `first_key` on."""
    num_queries = q_QHK.shape[0]
    num_kv_heads = k_SNK.shape[1]
    q = _grouped(q_QHK, num_kv_heads)
    scores = in_full(q @ k_SNK.permute(1, 2, 0).unsqueeze(1)).flatten(0, 1) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(first_query, first_query + num_queries, device=scores.device).unsqueeze(1)
    keys = torch.arange(first_key, first_key + k_SNK.shape[0], device=scores.device)
    if slopes_H is not None:
        scores = scores - slopes_H.to(scores).reshape(-1, 1, 1) * (queries - keys).abs().to(scores.dtype)
    if not mask.is_causal:
        return _weighted_values(scores, v_SNV, sinks_H)
    is_hidden = keys > queries
    if mask.window_type == "standard":
        is_hidden = is_hidden | (queries - keys >= mask.window)
    elif mask.window_type == "chunked":
        is_hidden = is_hidden | (keys < queries // mask.window * mask.window)
    return _weighted_values(scores.masked_fill(is_hidden, -math.inf), v_SNV, sinks_H)


def _weighted_values(scores_HQS: torch.Tensor, v_SNV: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    if sinks_H is not None:
        sinks = sinks_H.to(scores_HQS.dtype).reshape(-1, 1, 1).expand(-1, scores_HQS.shape[1], 1)
        weights = torch.cat([scores_HQS, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores_HQS.softmax(-1)
    grouped = weights.to(v_SNV.dtype).reshape(v_SNV.shape[1], -1, *weights.shape[1:])
    return torch.matmul(grouped, v_SNV.transpose(0, 1).unsqueeze(1)).flatten(0, 1).transpose(0, 1)


def _grouped(q_THK: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Queries by the kv head that they read: [T, H, K] -> [N, H / N, T, K]."""
    num_tokens, num_heads, width = q_THK.shape
    return q_THK.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, width).permute(1, 2, 0, 3)


def dense_attention(
    q_THK: torch.Tensor,
    k_SNK: torch.Tensor,
    v_SNV: torch.Tensor,
    mask_TS: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    slopes_H: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `masked_attention`, with a mask that the model computed itself (added to the scores, times the slope with
    ALiBi).
    """
    q = _grouped(q_THK, k_SNK.shape[1])
    scores = in_full(q @ k_SNK.permute(1, 2, 0).unsqueeze(1)).flatten(0, 1) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    bias = mask_TS.to(scores.dtype)
    scores = scores + (bias if slopes_H is None else slopes_H.to(scores).reshape(-1, 1, 1) * bias)
    return _weighted_values(scores, v_SNV, sinks_H)
