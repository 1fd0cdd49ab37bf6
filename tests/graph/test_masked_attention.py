"""Attention in blocks equals the written-out softmax: windows, chunks, soft-cap, sinks, ALiBi, documents, gradients."""

import math

import pytest
import torch

from pyggtrain.graph import masked_attention as module
from pyggtrain.graph.masked_attention import Mask, alibi_slopes, dense_attention, masked_attention
from pyggtrain.ops import Documents

BOUNDS = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 20, 4, 2
MASKS = {"all": Mask(), "window": Mask("standard", 3), "chunks": Mask("chunked", 4), "document": Mask(is_causal=False)}
EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks_H": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "alibi": {"slopes_H": alibi_slopes(NUM_HEADS, 8.0)},
}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_TOKENS, NUM_HEADS, 6), (NUM_TOKENS, NUM_KV_HEADS, 6), (NUM_TOKENS, NUM_KV_HEADS, 5))
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    return q, k, v


def written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    *,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token and one head after another."""
    rows = []
    for token in range(NUM_TOKENS):
        start = max(int(bound) for bound in BOUNDS if bound <= token)
        position = token - start
        seen = []
        end = next(int(bound) for bound in BOUNDS if bound > token)
        for other in range(start, token + 1 if mask.is_causal else end):
            distance = abs(token - other)
            if mask.window_type == "standard" and distance >= mask.window:
                continue
            if mask.window_type == "chunked" and (other - start) // mask.window != position // mask.window:
                continue
            seen.append(other)
        heads = []
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = 0.7 * k[seen, kv_head] @ q[token, head]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes_H is not None:
                scores = scores - slopes_H[head] * torch.tensor([abs(token - other) for other in seen])
            weights = scores.exp()
            total = weights.sum() + (0 if sinks_H is None else sinks_H[head].exp())
            heads.append((weights / total) @ v[seen, kv_head])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("block", [4, 256])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_written_out_softmax_with_gradients(
    mask: str, extra: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    if mask == "all" and extra == "plain":
        # This is `ops.attention`, whose kernel on a CPU computes in float32 or float64 alike.
        assert MASKS[mask].first_visible(9) == 0
    q, k, v = inputs()
    options = EXTRAS[extra]
    found = masked_attention(q, k, v, Documents(BOUNDS), softmax_scale=0.7, mask=MASKS[mask], **options)  # type: ignore[arg-type]
    wanted = written_out(q, k, v, MASKS[mask], **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    for name, got, want in zip(
        "qkv", torch.autograd.grad(found, (q, k, v), dy), torch.autograd.grad(wanted, (q, k, v), dy), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=f"d{name}")


def test_scores_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)
    sizes: list[int] = []
    weighted_values = module._weighted_values

    def recorded(scores: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        sizes.append(scores[0].numel())
        return weighted_values(scores, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_weighted_values", recorded)
    q = torch.randn(64, 2, 4)
    bounds = torch.tensor([0, 64], dtype=torch.int32)
    masked_attention(q, q, q, Documents(bounds), softmax_scale=1.0, mask=Mask("standard", 8))
    assert max(sizes) <= 8 * (8 + 7)


def test_a_window_wider_than_every_document_is_no_window() -> None:
    q, k, v = inputs()
    wide = masked_attention(q, k, v, Documents(BOUNDS), softmax_scale=0.7, mask=Mask("standard", 12))
    assert torch.equal(wide, masked_attention(q, k, v, Documents(BOUNDS), softmax_scale=0.7, mask=Mask()))
    narrow = masked_attention(q, k, v, Documents(BOUNDS), softmax_scale=0.7, mask=Mask("standard", 11))
    assert not torch.allclose(wide, narrow)


def test_a_given_mask_is_added_to_the_scores() -> None:
    q, k, v = inputs()
    bias = torch.full((NUM_TOKENS, NUM_TOKENS), -math.inf, dtype=q.dtype)
    for start, end in ((0, 7), (7, 8), (8, 20)):
        bias[start:end, start:end] = torch.full((end - start, end - start), -math.inf, dtype=q.dtype).triu(1)
    found = dense_attention(q, k, v, bias, softmax_scale=0.7, softcap=2.0)
    torch.testing.assert_close(found, written_out(q, k, v, Mask(), softcap=2.0), rtol=1e-12, atol=1e-12)


def test_slopes_are_those_of_the_paper_for_a_power_of_two_and_of_ggml_for_others() -> None:
    assert alibi_slopes(8, 8.0).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6, 8.0).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
