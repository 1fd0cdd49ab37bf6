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

WIDTH, KEY, VALUE, TAPS, EPS = 48, 16, 32, 4, 1e-5


def make(
    device: torch.device, kinds: str, *, is_grouped: bool = False
) -> tuple[DeltaBlock, list[torch.Tensor], list[Pair]]:
    """The block, its five weights (four if grouped), and a pair for each that `kinds` has an x for."""
    key_heads, heads = (2, 4) if is_grouped else (1, 2)
    channels, values = 2 * key_heads * KEY + heads * VALUE, heads * VALUE
    gate_rows = (2 * heads,) if is_grouped else (heads, heads)
    all_rows = (channels, values, *gate_rows, WIDTH)
    all_columns = (WIDTH,) * (len(all_rows) - 1) + (values,)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    weights = [normal(rows, columns) / columns**0.5 for rows, columns in zip(all_rows, all_columns, strict=True)]
    scales = (0.5, 1.5, 2.0, 1.0, 0.7)

    def group(*indices: int) -> LinearGroup:
        return LinearGroup(
            tuple(weights[index].view(torch.uint8) for index in indices),
            ("F32",) * len(indices),
            tuple(all_rows[index] for index in indices),
            all_columns[indices[0]],
            tuple(scales[index] for index in indices),
        )

    block = DeltaBlock(
        norm_weight=1 + 0.2 * normal(WIDTH),
        eps=EPS,
        qkv_z=group(0, 1),
        alpha_beta=group(*range(2, len(all_rows) - 1)),
        output=group(len(all_rows) - 1),
        conv_weight=normal(channels, TAPS) / 2,
        a=-normal(heads).abs(),
        dt=normal(heads),
        head_norm_weight=1 + 0.2 * normal(VALUE),
        num_key_heads=key_heads,
        num_heads=heads,
        key_size=KEY,
        value_size=VALUE,
        is_grouped=is_grouped,
    )
    pairs: list[Pair] = []
    for index, kind in enumerate(kinds):
        rank = 2 + index
        pair = (normal(rank, all_columns[index]) / 7, normal(all_rows[index], rank) / 3)
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

    num_key_heads, num_heads = block.num_key_heads, block.num_heads
    y = rms_norm(x, block.norm_weight)
    mixed = causal_conv1d_forward(
        linear(0, y), block.conv_weight, bounds, has_silu=True, num_normed=2 * num_key_heads, head_size=KEY, eps=EPS
    )
    q, k, v = mixed.split((num_key_heads * KEY, num_key_heads * KEY, num_heads * VALUE), 1)
    q, k = (part.unflatten(1, (num_key_heads, KEY)) for part in (q, k))
    if block.is_grouped:
        num_neighbours = num_heads // num_key_heads
        q, k = (part.repeat_interleave(num_neighbours, 1) for part in (q, k))
        b, alpha = (part.flatten(1) for part in linear(2, y).view(-1, num_key_heads, 2, num_neighbours).unbind(2))
    else:
        alpha, b = linear(2, y), linear(3, y)
    o = gated_delta_rule_forward(
        q,
        k,
        v.unflatten(1, (num_heads, VALUE)),
        block.a.double() * F.softplus(alpha + block.dt.double()),
        b.sigmoid(),
        bounds,
        scale=KEY**-0.5,
    )
    z = linear(1, y).unflatten(1, (num_heads, VALUE))
    return x + linear(len(weights) - 1, gated_rms_norm_forward(o, z, block.head_norm_weight, eps=EPS).flatten(1))


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "made again"])
@pytest.mark.parametrize(
    ("kinds", "is_grouped"),
    [("xxxxx", False), ("x..x.", False), (".....", False), ("x.xx", True)],
    ids=["all pairs", "some pairs", "no pairs", "grouped heads, some pairs"],
)
def test_values_and_gradients_are_those_of_single_operations(
    device: torch.device, kinds: str, is_grouped: bool, keeps: bool
) -> None:
    block, weights, pairs = make(device, kinds, is_grouped=is_grouped)
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


@pytest.mark.parametrize("is_grouped", [False, True], ids=["tiled", "grouped"])
def test_half_precision_points_the_same_way(device: torch.device, is_grouped: bool) -> None:
    # In float16, which the interpreter computes with too.
    block, weights, pairs = make(device, "xxxx" if is_grouped else "xxxxx", is_grouped=is_grouped)
    bounds = [0, 3, 12]
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(bounds[-1], WIDTH, generator=generator).to(device, torch.float16) for _ in range(2))
    x.requires_grad_()
    parameters = [x, *(half for pair in pairs if pair is not None for half in pair)]
    y = delta_block(x, block, ops.Documents(torch.tensor(bounds, dtype=torch.int32)), pairs, kept=Kept())
    wanted = exact(x.double(), block, weights, pairs, bounds)
    found = (y, *torch.autograd.grad(y, parameters, dy))
    right = (wanted, *torch.autograd.grad(wanted, parameters, dy.double()))
    for one, other, like in zip(found, right, [x, *parameters], strict=True):
        assert one.dtype == like.dtype
        assert F.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0) >= 0.9999


def test_packed_documents_are_as_good_as_separate_ones(device: torch.device) -> None:
    block, _, pairs = make(device, "xxxxx")
    bounds = [0, 5, 70]
    x = torch.randn(bounds[-1], WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    packed = delta_block(x, block, ops.Documents(torch.tensor(bounds, dtype=torch.int32)), pairs, kept=Kept())
    for start, end in pairwise(bounds):
        alone = ops.Documents(torch.tensor([0, end - start], dtype=torch.int32))
        torch.testing.assert_close(packed[start:end], delta_block(x[start:end], block, alone, pairs, kept=Kept()))


@pytest.mark.parametrize(
    ("is_grouped", "keeps"), [(False, False), (True, True)], ids=["tiled, made again", "grouped, kept"]
)
def test_room_for_more_documents_changes_nothing(device: torch.device, is_grouped: bool, keeps: bool) -> None:
    block, _, pairs = make(device, "xxxx" if is_grouped else "xxxxx", is_grouped=is_grouped)
    bounds = torch.tensor([0, 1, 66], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(66, WIDTH, generator=generator).to(device) for _ in range(2))
    x.requires_grad_()
    parameters = [x, *(half for pair in pairs if pair is not None for half in pair)]

    def results(documents: ops.Documents) -> tuple[torch.Tensor, ...]:
        y = delta_block(x, block, documents, pairs, kept=Kept(attention=keeps))
        return y, *torch.autograd.grad(y, parameters, dy)

    documents, roomy = ops.Documents(bounds), ops.Documents(bounds)
    roomy.make_room(x.device, 4)
    assert roomy.chunks(x.device).num_chunks > documents.chunks(x.device).num_chunks
    for one, other in zip(results(roomy), results(documents), strict=True):
        assert torch.equal(one, other)


def test_what_it_does_not_keep_does_not_change_a_gradient(device: torch.device) -> None:
    block, _, pairs = make(device, "xxxxx")
    x = torch.randn(66, WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    documents = ops.Documents(torch.tensor([0, 66], dtype=torch.int32))
    kept, again = (
        torch.autograd.grad(delta_block(x, replace(block), documents, pairs, kept=Kept(attention=keeps)).sum(), x)[0]
        for keeps in (True, False)
    )
    assert torch.equal(kept, again)
