"""Which keys a token sees, and what q, k and v must look like."""

from dataclasses import dataclass

import torch

MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a token sees: those from first_key[t] to t. Both int32 [T], never falling."""

    first_key: torch.Tensor
    last_query: torch.Tensor
    """The last token that sees key s."""

    @staticmethod
    def from_documents(
        cu_seqlens: torch.Tensor, num_tokens: int, *, window: int | None = None, chunk: int | None = None
    ) -> "AttentionMask":
        """Causal inside each document, none across.

        Args:
            cu_seqlens: int32 or int64 [B + 1], first token of each document and the end, on the device of the tokens.
            num_tokens: T, the last element of cu_seqlens.
            window: a token sees itself and the window - 1 before it.
            chunk: documents fall into chunks of so many tokens, none sees across.
        """
        token = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        document = torch.searchsorted(cu_seqlens, token, right=True) - 1
        first_key, last_query = cu_seqlens[document], cu_seqlens[document + 1] - 1
        if window is not None:
            first_key = torch.maximum(first_key, token - (window - 1))
            last_query = torch.minimum(last_query, token + (window - 1))
        if chunk is not None:
            start = cu_seqlens[document]
            first_of_chunk = start + (token - start) // chunk * chunk
            first_key = torch.maximum(first_key, first_of_chunk)
            last_query = torch.minimum(last_query, first_of_chunk + (chunk - 1))
        return AttentionMask(first_key.int(), last_query.int())


def check_heads(name: str, tensor: torch.Tensor, num_heads: int, like: torch.Tensor) -> None:
    """Require [T, num_heads, K] with heads stored whole; tokens and heads may lie any distance apart."""
    expected = (like.shape[0], num_heads, like.shape[2])
    if tensor.shape != expected or tensor.stride(2) != 1 or tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"needed: {like.dtype} {list(expected)} with heads stored whole, on {like.device}."
        )


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> None:
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    if num_heads % num_kv_heads or head_size > MAX_HEAD_SIZE:
        raise ValueError(
            f"q has {num_heads} heads of {head_size}, k has {num_kv_heads}; "
            f"needed: whole groups of query heads, and heads of at most {MAX_HEAD_SIZE}."
        )
    check_heads("q", q, num_heads, q)
    check_heads("k", k, num_kv_heads, q)
    check_heads("v", v, num_kv_heads, q)
    for name, bound in (("first_key", mask.first_key), ("last_query", mask.last_query)):
        if bound.shape != (num_tokens,) or bound.dtype != torch.int32 or not bound.is_contiguous():
            raise ValueError(f"{name} is {bound.dtype} {list(bound.shape)}; needed: contiguous int32 [{num_tokens}].")
