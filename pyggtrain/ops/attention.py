"""Causal softmax attention inside documents that lie one after another.

    o[t] = Σ_s softmax_s(c q[t]·k[s]) v[s]      s over the tokens of t's document with s <= t

q [T, H, K], k and v [T, N, K], H a multiple of N: query head h reads kv head h // (H / N).

On a CPU each document is one call of torch's scaled_dot_product_attention, whose flash kernel (forward and backward)
never stores the scores and reads grouped heads without repeating them. Nothing of our own is needed, so autograd is
torch's.
"""

from itertools import pairwise

import torch


def attention(
    q_THK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TNK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    softmax_scale: float,
) -> torch.Tensor:
    """Causal attention inside each document, none across.

    Args:
        q_THK: float32 [T, H, K].
        k_TNK, v_TNK: float32 [T, N, K], H % N == 0.
        cu_seqlens: int32 [B + 1], first token of each document and T at the end.
        softmax_scale: multiplies q·k.

    Returns:
        [T, H, K].

    Raises:
        ValueError: heads do not group, or the documents do not cover the tokens.
    """
    num_tokens, num_heads, _ = q_THK.shape
    if num_heads % k_TNK.shape[1]:
        raise ValueError(f"{num_heads} query heads do not group over {k_TNK.shape[1]} kv heads")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(f"documents cover tokens {bounds[0]} to {bounds[-1]}: needed 0 to {num_tokens}")
    outputs = [
        _causal(q_THK[start:end], k_TNK[start:end], v_TNK[start:end], softmax_scale) for start, end in pairwise(bounds)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _causal(q_THK: torch.Tensor, k_TNK: torch.Tensor, v_TNK: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THK, k_TNK, v_TNK))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True)
    return o.squeeze(0).transpose(0, 1)
