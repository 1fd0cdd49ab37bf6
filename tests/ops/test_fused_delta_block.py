"""The fused half of a gated delta net's layer against the same half made of single operations in float64: float32, in
Triton's interpreter or on a GPU.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from pyggtrain.kernels.reference.causal_conv1d import causal_conv1d_forward
from pyggtrain.kernels.reference.gated_delta_rule import gated_delta_rule_forward
from pyggtrain.kernels.reference.gated_rms_norm import gated_rms_norm_forward

from pyggtrain import ops
from pyggtrain.ops.fused import DeltaBlock, Kept, LinearGroup, Pair, delta_block

WIDTH, KEY_HEADS, HEADS, KEY, VALUE, TAPS, EPS = 48, 1, 2, 16, 32, 4, 1e-5
CHANNELS, VALUES = 2 * KEY_HEADS * KEY + HEADS * VALUE, HEADS * VALUE
ROWS = (CHANNELS, VALUES, HEADS, HEADS, WIDTH)
COLUMNS = (WIDTH,) * 4 + (VALUES,)


def make(device: torch.device, kinds: str) -> tuple[DeltaBlock, list[torch.Tensor], list[Pair]]:
    """The block, its five weights, and a pair for each that `kinds` has an x for."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    weights = [normal(rows, columns) / columns**0.5 for rows, columns in zip(ROWS, COLUMNS, strict=True)]
    scales = (0.5, 1.5, 2.0, 1.0, 0.7)

    def group(*indices: int) -> LinearGroup:
        return LinearGroup(
            tuple(weights[index].view(torch.uint8) for index in indices),
            ("F32",) * len(indices),
            tuple(ROWS[index] for index in indices),
            COLUMNS[indices[0]],
            tuple(scales[index] for index in indices),
        )

    block = DeltaBlock(
        norm_weight=1 + 0.2 * normal(WIDTH),
        eps=EPS,
        qkv_z=group(0, 1),
        alpha_beta=group(2, 3),
        output=group(4),
        conv_weight=normal(CHANNELS, TAPS) / 2,
        a=-normal(HEADS).abs(),
        dt=normal(HEADS),
        head_norm_weight=1 + 0.2 * normal(VALUE),
        num_key_heads=KEY_HEADS,
        num_heads=HEADS,
        key_size=KEY,
        value_size=VALUE,
    )
    pairs: list[Pair] = []
    for index, kind in enumerate(kinds):
        rank = 2 + index
        pair = (normal(rank, COLUMNS[index]) / 7, normal(ROWS[index], rank) / 3)
        pairs.append((pair[0].requires_grad_(), pair[1].requires_grad_()) if kind == "x" else None)
    return block, weights, pairs


def exact(
    x: torch.Tensor, block: DeltaBlock, weights: list[torch.Tensor], pairs: list[Pair], bounds: list[int]
) -> torch.Tensor:
    """The half layer in float64, written out."""
    scales = (*block.qkv_z.scales, *block.alpha_beta.scales, *block.output.scales)

    def linear(index: int, y: torch.Tensor) -> torch.Tensor:
        result, pair = y @ weights[index].double().t(), pairs[index]
        return result if pair is None else result + scales[index] * (y @ pair[0].double().t()) @ pair[1].double().t()

    def rms_norm(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    y = rms_norm(x, block.norm_weight)
    mixed = causal_conv1d_forward(
        linear(0, y), block.conv_weight, bounds, has_silu=True, num_normed=2 * KEY_HEADS, head_size=KEY, eps=EPS
    )
    q, k, v = mixed.split((KEY_HEADS * KEY, KEY_HEADS * KEY, VALUES), 1)
    o = gated_delta_rule_forward(
        q.unflatten(1, (KEY_HEADS, KEY)),
        k.unflatten(1, (KEY_HEADS, KEY)),
        v.unflatten(1, (HEADS, VALUE)),
        block.a.double() * F.softplus(linear(2, y) + block.dt.double()),
        linear(3, y).sigmoid(),
        bounds,
        scale=KEY**-0.5,
    )
    z = linear(1, y).unflatten(1, (HEADS, VALUE))
    return x + linear(4, gated_rms_norm_forward(o, z, block.head_norm_weight, eps=EPS).flatten(1))


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "made again"])
@pytest.mark.parametrize("kinds", ["xxxxx", "x..x.", "....."], ids=["all pairs", "some pairs", "no pairs"])
def test_values_and_gradients_are_those_of_single_operations(device: torch.device, kinds: str, keeps: bool) -> None:
    block, weights, pairs = make(device, kinds)
    bounds = [0, 5, 6, 76]
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(bounds[-1], WIDTH, generator=generator).to(device) for _ in range(2))
    x.requires_grad_()
    parameters = [x, *(half for pair in pairs if pair is not None for half in pair)]
    y = delta_block(x, block, ops.Documents(torch.tensor(bounds, dtype=torch.int32)), pairs, kept=Kept(attention=keeps))
    wanted = exact(x.double(), block, weights, pairs, bounds)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(y, parameters, dy)
    right = torch.autograd.grad(wanted, parameters, dy.double())
    for one, other in zip(found, right, strict=True):
        cosine = F.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0)
        assert cosine >= 0.99999
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=2e-5 * float(other.abs().max()))


def test_packed_documents_are_as_good_as_separate_ones(device: torch.device) -> None:
    block, _, pairs = make(device, "xxxxx")
    bounds = [0, 5, 70]
    x = torch.randn(bounds[-1], WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    packed = delta_block(x, block, ops.Documents(torch.tensor(bounds, dtype=torch.int32)), pairs, kept=Kept())
    for start, end in pairwise(bounds):
        alone = ops.Documents(torch.tensor([0, end - start], dtype=torch.int32))
        torch.testing.assert_close(packed[start:end], delta_block(x[start:end], block, alone, pairs, kept=Kept()))


def test_what_it_does_not_keep_does_not_change_a_gradient(device: torch.device) -> None:
    block, _, pairs = make(device, "xxxxx")
    x = torch.randn(66, WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    documents = ops.Documents(torch.tensor([0, 66], dtype=torch.int32))
    kept, again = (
        torch.autograd.grad(delta_block(x, replace(block), documents, pairs, kept=Kept(attention=keeps)).sum(), x)[0]
        for keeps in (True, False)
    )
    assert torch.equal(kept, again)
