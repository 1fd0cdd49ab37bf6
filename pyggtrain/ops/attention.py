"""Softmax attention inside documents that lie one after another; causal unless told otherwise.

    o[t] = Σ_s softmax_s(c q[t]·k[s]) v[s]      s over the tokens of t's document, with s <= t if causal

q [T, H, K], k and v [T, N, K], H a multiple of N: query head h reads kv head h // (H / N). On a GPU a token may see
fewer keys, scores may be bent, and a head may have a sink (`Variant`).

On a CPU each document is one call of torch's scaled_dot_product_attention, whose flash kernel (forward and backward)
never stores the scores and reads grouped heads without repeating them. On a GPU documents of one length are one call of
cuDNN's kernel through torch, and documents of different lengths one call of our own, which needs no loop over them
(docs/performance.md has both). Attention that is not causal is one call of torch's for each document on either.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from pyggtrain.kernels.gated_delta_rule.chunks import Chunks

if TYPE_CHECKING:
    from pyggtrain.kernels.attention.mask import AttentionMask

# cuDNN's attention through torch: head sizes that it takes, in both directions.
_CUDNN_MAX_HEAD = 128
# What our own kernel takes.
MAX_HEAD = 256


@dataclass(frozen=True, eq=False)
class Variant:
    """What some models change of plain causal attention; on a GPU only.

    Attributes:
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        chunk: documents fall into chunks of so many tokens, none sees across; None: they do not.
        softcap: p of s = p tanh(s / p); 0: none.
        sinks_H: logit of each head that takes weight and gives no value, float32 [H], frozen; None: none.
    """

    window: int | None = None
    chunk: int | None = None
    softcap: float = 0.0
    sinks_H: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.chunk is None and not self.softcap and self.sinks_H is None

    def for_documents(self, documents: "Documents") -> "Variant":
        """The same without bounds that no document reaches.

        Lengths up to the next power of two count as one: batches that a CUDA graph takes for alike are treated alike.
        """
        longest = 1 << (documents.longest - 1).bit_length()
        window = self.window if self.window is not None and self.window < longest else None
        chunk = self.chunk if self.chunk is not None and self.chunk < longest else None
        return Variant(window, chunk, self.softcap, self.sinks_H)


PLAIN = Variant()


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents begin and end in a row of tokens; what an attention kernel wants to know of it, made once.

    Attributes:
        cu_seqlens: int32 [B + 1] on the host: first token of each document and T at the end.
    """

    cu_seqlens: torch.Tensor

    @cached_property
    def bounds(self) -> list[int]:
        return self.cu_seqlens.tolist()

    @cached_property
    def common_length(self) -> int | None:
        """Tokens of every document, None if they differ."""
        lengths = {end - start for start, end in pairwise(self.bounds)}
        return lengths.pop() if len(lengths) == 1 else None

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(end - start for start, end in pairwise(self.bounds))

    @cached_property
    def masks(self) -> dict[tuple[int | None, int | None], "AttentionMask"]:
        """The masks that were asked for, by window and chunk: those of a CUDA graph are at places that it reads."""
        return {}

    def mask(self, device: torch.device, *, window: int | None = None, chunk: int | None = None) -> "AttentionMask":
        """Which keys each token sees, on a GPU; see `Variant`."""
        key = window, chunk
        if key not in self.masks:
            from pyggtrain.kernels.attention.mask import AttentionMask

            self.masks[key] = AttentionMask.from_documents(
                self.cu_seqlens.to(device), self.bounds[-1], window=window, chunk=chunk
            )
        return self.masks[key]

    @cached_property
    def chunk_tables(self) -> dict[torch.device, Chunks]:
        """What `chunks` gives on each device: those of a CUDA graph are at places that it reads."""
        return {}

    def chunks(self, device: torch.device) -> Chunks:
        """Where documents and their chunks begin, for `ops.gated_delta_rule`."""
        if device not in self.chunk_tables:
            self.chunk_tables[device] = Chunks.from_bounds(self.bounds, device)
        return self.chunk_tables[device]

    def make_room(self, device: torch.device, num_documents: int) -> None:
        """From now on `chunks` has room for `num_documents`: batches of as many tokens launch the same kernels."""
        self.chunk_tables[device] = Chunks.from_bounds(self.bounds, device, num_documents=num_documents)


def attention(
    q_THK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TNK: torch.Tensor,
    documents: Documents | torch.Tensor,
    *,
    softmax_scale: float,
    variant: Variant = PLAIN,
    is_causal: bool = True,
) -> torch.Tensor:
    """Attention inside each document, none across.

    Args:
        q_THK: float32 [T, H, K]; on a GPU also bfloat16 or float16.
        k_TNK, v_TNK: [T, N, K] in q's dtype, H % N == 0.
        documents: their bounds, or these as int32 [B + 1]. Many calls for one batch should share one `Documents`.
        softmax_scale: multiplies q·k.
        variant: what is not plain; on a CPU nothing may be.
        is_causal: a token sees no later one.

    Returns:
        [T, H, K].

    Raises:
        ValueError: heads do not group, the documents do not cover the tokens, or a CPU is asked for a variant.
    """
    if isinstance(documents, torch.Tensor):
        documents = Documents(documents)
    num_tokens, num_heads, _ = q_THK.shape
    if num_heads % k_TNK.shape[1]:
        raise ValueError(f"{num_heads} query heads do not group over {k_TNK.shape[1]} kv heads")
    bounds = documents.bounds
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(f"documents cover tokens {bounds[0]} to {bounds[-1]}: needed 0 to {num_tokens}")
    if q_THK.is_cuda and is_causal:
        output: torch.Tensor = _GpuAttention.apply(  # type: ignore[no-untyped-call]
            q_THK, k_TNK, v_TNK, documents, softmax_scale, variant
        )
        return output
    if not variant.is_plain:
        raise ValueError(f"attention on {q_THK.device} with {variant}: needed plain causal attention")
    outputs = [
        _of_document(q_THK[start:end], k_TNK[start:end], v_TNK[start:end], softmax_scale, is_causal)
        for start, end in pairwise(bounds)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _of_document(
    q_THK: torch.Tensor, k_TNK: torch.Tensor, v_TNK: torch.Tensor, softmax_scale: float, is_causal: bool
) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THK, k_TNK, v_TNK))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=softmax_scale, enable_gqa=True
    )
    return o.squeeze(0).transpose(0, 1)


def gpu_attention_forward(
    q_THK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TNK: torch.Tensor,
    documents: Documents,
    softmax_scale: float,
    variant: Variant = PLAIN,
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """o [T, H, K], and what `gpu_attention_backward` wants besides q, k, v and o."""
    length = documents.common_length
    variant = variant.for_documents(documents)
    if length is not None and variant.is_plain and _does_cudnn_take(q_THK, v_TNK):
        q, k, v = (_batched(x, length) for x in (q_THK, k_TNK, v_TNK))
        o, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=softmax_scale
        )
        return o.transpose(1, 2).flatten(0, 1), tuple(rest[:7])
    from pyggtrain.kernels.attention.forward import attention_forward

    mask = documents.mask(q_THK.device, window=variant.window, chunk=variant.chunk)
    o_THK, lse_HT = attention_forward(
        q_THK, k_TNK, v_TNK, mask, softmax_scale=softmax_scale, softcap=variant.softcap or None, sinks=variant.sinks_H
    )
    return o_THK, (lse_HT,)


def gpu_attention_backward(
    d_o_THK: torch.Tensor,
    q_THK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TNK: torch.Tensor,
    o_THK: torch.Tensor,
    kept: tuple[Any, ...],
    documents: Documents,
    softmax_scale: float,
    variant: Variant = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, each [T, heads, K]."""
    if len(kept) == 1:
        from pyggtrain.kernels.attention.backward import attention_backward

        variant = variant.for_documents(documents)
        return attention_backward(
            d_o_THK,
            q_THK,
            k_TNK,
            v_TNK,
            o_THK,
            kept[0],
            documents.mask(q_THK.device, window=variant.window, chunk=variant.chunk),
            softmax_scale=softmax_scale,
            softcap=variant.softcap or None,
        )
    length = documents.common_length
    assert length is not None
    logsumexp, cum_q, cum_k, max_q, max_k, seed, offset = kept
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_batched(x, length) for x in (d_o_THK, q_THK, k_TNK, v_TNK, o_THK)),
        logsumexp,
        seed,
        offset,
        None,
        cum_q,
        cum_k,
        max_q,
        max_k,
        0.0,
        True,
        scale=softmax_scale,
    )
    dq, dk, dv = (gradient.transpose(1, 2).flatten(0, 1) for gradient in gradients)
    return dq, dk, dv


def _does_cudnn_take(q_THK: torch.Tensor, v_TNK: torch.Tensor) -> bool:
    width = q_THK.shape[-1]
    return (
        q_THK.dtype in (torch.bfloat16, torch.float16)
        and width == v_TNK.shape[-1]
        and width % 8 == 0
        and width <= _CUDNN_MAX_HEAD
        and torch.version.hip is None
        and torch.cuda.get_device_capability(q_THK.device) >= (8, 0)
    )


def _batched(x_THK: torch.Tensor, length: int) -> torch.Tensor:
    """[T, H, K] as [B, H, S, K]."""
    return x_THK.view(-1, length, *x_THK.shape[1:]).transpose(1, 2)


class _GpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THK: torch.Tensor,
        k_TNK: torch.Tensor,
        v_TNK: torch.Tensor,
        documents: Documents,
        softmax_scale: float,
        variant: Variant,
    ) -> torch.Tensor:
        q_THK, k_TNK, v_TNK = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THK, k_TNK, v_TNK))
        o_THK, kept = gpu_attention_forward(q_THK, k_TNK, v_TNK, documents, softmax_scale, variant)
        ctx.documents, ctx.softmax_scale, ctx.variant = documents, softmax_scale, variant
        ctx.others = [None if isinstance(item, torch.Tensor) else (item,) for item in kept]
        ctx.save_for_backward(
            q_THK, k_TNK, v_TNK, o_THK, *(item if isinstance(item, torch.Tensor) else None for item in kept)
        )
        return o_THK

    @staticmethod
    def backward(ctx: Any, d_o_THK: torch.Tensor) -> Any:
        q_THK, k_TNK, v_TNK, o_THK, *saved = ctx.saved_tensors
        kept = tuple(tensor if other is None else other[0] for tensor, other in zip(saved, ctx.others, strict=True))
        gradients = gpu_attention_backward(
            d_o_THK.contiguous(), q_THK, k_TNK, v_TNK, o_THK, kept, ctx.documents, ctx.softmax_scale, ctx.variant
        )
        return *gradients, None, None, None
