"""The fused halves of a layer against the same layer made of single operations: float32; those of a GPU (there or in
Triton's interpreter) and those of a CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from pyggtrain import ops
from pyggtrain.gguf import quantize_tensor
from pyggtrain.graph.masked_attention import Mask, masked_attention
from pyggtrain.models.llama import Block, Config
from pyggtrain.nn import FusedLayers, QuantLinear, RMSNorm
from pyggtrain.nn.quant_linear import LoraPair
from pyggtrain.ops import rehearsal
from pyggtrain.ops.attention import PLAIN, Variant
from pyggtrain.ops.fused import Kept, can_fuse_on_cpu
from pyggtrain.ops.rope import RopeTables, cpu_rope

WIDTH, HEADS, KV_HEADS, HEAD, FF = 64, 4, 2, 16, 96
TYPES = {"attn_q": "Q8_0", "attn_k": "Q4_0", "attn_v": "F16", "ffn_gate": "Q5_1", "ffn_down": "Q8_0"}


class _Weights:
    """Stands where a file's tensors stand."""

    def __init__(self, has_bias: bool, is_fused: bool) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.has_bias, self.is_fused = has_bias, is_fused

    def __contains__(self, name: str) -> bool:
        return self.is_fused and name.endswith("attn_qkv.weight")

    def take(self, name: str, shape: tuple[int, ...]) -> Any:
        kind = name.split(".")[2]
        values = torch.randn(*shape, generator=self.generator)
        if kind.endswith("norm"):
            return quantize_tensor(name, 1 + values * 0.2, "F32")
        return quantize_tensor(name, values / shape[1] ** 0.5, TYPES.get(kind, "F32"))

    def take_optional(self, name: str, shape: tuple[int, ...]) -> Any:
        is_there = self.has_bias and name.split(".")[2] in ("attn_q", "attn_k", "attn_qkv") and name.endswith("bias")
        return quantize_tensor(name, torch.randn(*shape, generator=self.generator), "F32") if is_there else None


def make_block(device: torch.device, *, has_bias: bool = False, is_fused: bool = False, pairs: str = "all") -> Block:
    config = Config(1, 64, WIDTH, FF, HEADS, KV_HEADS, HEAD, 1e-5, 1e4, "none", 0.0, 1.0, 64)
    block = Block(config, _Weights(has_bias, is_fused), 0, "exact")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    for index, linear in enumerate(module for module in block.modules() if isinstance(module, QuantLinear)):
        if pairs == "none" or (pairs == "some" and index % 2):
            continue
        rows, columns = linear.shape
        rank = 3 + index
        linear.lora = LoraPair(
            torch.randn(rank, columns, generator=generator) / columns**0.5,
            torch.randn(rows, rank, generator=generator) / rank**0.5,
            scale=0.5 + index,
        )
    return block.to(device)


def run(
    layer: Callable[..., torch.Tensor], block: Block, x: torch.Tensor, bounds: list[int], kept: Kept | None
) -> list[torch.Tensor]:
    """Output, gradient of x, gradients of all pairs."""
    num_tokens = x.shape[0]
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(bounds)])
    angles = positions[:, None] * 1e4 ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    tables = RopeTables(angles.cos().float().to(x.device), angles.sin().float().to(x.device), "NORM")
    documents = ops.Documents(torch.tensor(bounds, dtype=torch.int32))
    x = x.detach().clone().requires_grad_()
    y = layer(x, tables, documents) if isinstance(layer, Block) else layer(x, tables, documents, kept)
    weight = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(5)).to(x.device, x.dtype)
    parameters = list(block.parameters())
    gradients = torch.autograd.grad((y * weight).sum(), [x, *parameters])
    return [y.detach(), *gradients]


@pytest.fixture(params=["gpu"] if torch.cuda.is_available() else ["cpu", "gpu"])
def halves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose halves run: on a GPU its own, on a CPU both (the GPU's in Triton's interpreter)."""
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: request.param == "cpu")
    return str(request.param)


@pytest.fixture
def compare(device: torch.device, halves: str) -> Callable[..., None]:
    def compare(bounds: list[int], kept: Kept, **options: Any) -> None:
        block = make_block(device, **options)
        x = torch.randn(bounds[-1], WIDTH, generator=torch.Generator().manual_seed(6)).to(device)
        expected = run(block, block, x, bounds, None)
        for result, wanted in zip(run(block.fused(), block, x, bounds, kept), expected, strict=True):
            assert result.dtype == torch.float32
            torch.testing.assert_close(result, wanted, rtol=2e-4, atol=2e-5 * float(wanted.abs().max()))

    return compare


@pytest.mark.parametrize(
    "kept",
    [Kept(), Kept(gate_up=True), Kept(attention=False), Kept(gate_up=True, weights=True), Kept(halves=False)],
    ids=["matmuls", "none", "layers", "weights too", "whole layers"],
)
def test_values_and_gradients_are_those_of_single_operations(compare: Callable[..., None], kept: Kept) -> None:
    compare([0, 5, 14, 16], kept)


@pytest.mark.parametrize("options", [{"pairs": "some"}, {"has_bias": True}, {"is_fused": True, "has_bias": True}])
def test_missing_pairs_biases_and_one_linear_for_all(compare: Callable[..., None], options: dict[str, Any]) -> None:
    compare([0, 11], Kept(), **options)


def test_long_rows_are_taken_in_parts(compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("pyggtrain.ops.fused.feed_forward"), "MAX_TOKENS", 6)
    compare([0, 16], Kept())
    compare([0, 16], Kept(gate_up=True))


def test_without_pairs_there_is_still_a_gradient_of_the_input(compare: Callable[..., None]) -> None:
    compare([0, 9], Kept(), pairs="none")


@pytest.mark.parametrize("halves", ["gpu"], indirect=True)
def test_each_layer_keeps_what_it_is_told_where_it_is_told(
    device: torch.device, halves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyggtrain.nn.host_stash._MIN_BYTES", 64)
    block = make_block(device)
    # One block three times: its gradients are those of all three.
    layers = FusedLayers([block] * 3)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(6)).to(device)

    def outcome(kept: list[Kept]) -> list[torch.Tensor]:
        def run_layers(x: torch.Tensor, tables: RopeTables, documents: ops.Documents, _: Kept | None) -> torch.Tensor:
            return layers(x, tables, documents, kept)

        return run(run_layers, block, x, [0, 5, 16], None)

    expected = outcome([Kept(gate_up=True)] * 3)
    for kept in (
        [Kept(attention=False, on_host=True), Kept(on_host=True), Kept(gate_up=True)],
        [Kept(halves=False, on_host=True), Kept(attention=False), Kept(on_host=True, gate_up=True)],
        [Kept(on_host=True), Kept(attention=False, on_host=True), Kept(halves=False)],
    ):
        for result, wanted in zip(outcome(kept), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


class _HeadNorm(NamedTuple):
    weight: torch.Tensor
    eps: float


# (norms of heads, rotation, what is not plain).
ATTENTIONS = {
    "norms of heads": (True, True, PLAIN),
    "norms of heads, no rotation": (True, False, PLAIN),
    "window, softcap and sinks, no rotation": (False, False, Variant(4, softcap=2.0, sinks_H=torch.randn(HEADS))),
}


@pytest.mark.parametrize("kept", [Kept(), Kept(attention=False)], ids=["matmuls", "layers"])
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_with_a_bias_behind_it_and_more(device: torch.device, halves: str, case: str, kept: Kept) -> None:
    has_norms, turns, variant = ATTENTIONS[case]
    if halves == "cpu" and not variant.is_plain:
        pytest.skip("a CPU's attention is plain")
    block = make_block(device, pairs="some")
    generator = torch.Generator().manual_seed(7)
    block.attn_output.bias = torch.randn(WIDTH, generator=generator).to(device)
    weights = [(1 + 0.3 * torch.randn(HEAD, generator=generator)).to(device) for _ in range(2)]
    norms = tuple(_HeadNorm(weight, 1e-4) for weight in weights)
    sinks_H = None if variant.sinks_H is None else variant.sinks_H.to(device)
    x = torch.randn(19, WIDTH, generator=generator).to(device).requires_grad_()
    angles = torch.arange(19)[:, None] * 0.3 ** torch.arange(HEAD // 2 - 2)
    tables = RopeTables(angles.cos().to(device), angles.sin().to(device), "NEOX") if turns else None
    documents = ops.Documents(torch.tensor([0, 13, 19], dtype=torch.int32))
    head_norms = norms if has_norms else None
    half = replace(block.fused().attention, head_norms=head_norms, variant=replace(variant, sinks_H=sinks_H))
    assert half.can_fuse(x.dtype, torch.device("cpu"))
    y = block.attn_norm(x)
    q, k, v = (linear(y).unflatten(1, (-1, HEAD)) for linear in (block.attn_q, block.attn_k, block.attn_v))
    if has_norms:
        q, k = (ops.rms_norm(heads, norm.weight, eps=norm.eps) for heads, norm in zip((q, k), norms, strict=True))
    if tables is not None:
        q, k = ops.rope(q, tables), ops.rope(k, tables)
    mask = Mask() if variant.window is None else Mask("standard", variant.window)
    o = masked_attention(
        q, k, v, documents, softmax_scale=HEAD**-0.5, mask=mask, softcap=variant.softcap, sinks_H=sinks_H
    )
    wanted = x + block.attn_output(o.flatten(1))
    found = half(x, tables, documents, kept)
    weight = torch.randn(19, WIDTH, generator=generator).to(device)
    parameters = [x, *(parameter for linear in half.linears for parameter in linear.parameters())]
    results = [(one, *torch.autograd.grad((one * weight).sum(), parameters)) for one in (found, wanted)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize("kept", [Kept(), Kept(attention=False)], ids=["matmuls", "layers"])
@pytest.mark.parametrize("pairs", ["all", "none"])
def test_attention_with_norms_of_heads_and_gates_behind_it(
    device: torch.device, kept: Kept, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)
    block = make_block(device, pairs=pairs)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(2 * HEADS * HEAD, WIDTH, generator=generator) / WIDTH**0.5
    q_and_gate = QuantLinear(quantize_tensor("blk.0.attn_q.weight", weight, "F32"), compute="exact").to(device)
    if pairs == "all":
        lora_a, lora_b = (torch.randn(*shape, generator=generator) / 4 for shape in ((3, WIDTH), (weight.shape[0], 3)))
        q_and_gate.lora = LoraPair(lora_a, lora_b, scale=0.5).to(device)
    norms = [
        RMSNorm(quantize_tensor("norm", torch.rand(HEAD, generator=generator) + 0.5, "F32"), eps=1e-5).to(device)
        for _ in range(2)
    ]
    x = torch.randn(19, WIDTH, generator=generator).to(device).requires_grad_()
    documents = ops.Documents(torch.tensor([0, 13, 19], dtype=torch.int32))
    angles = torch.cat([torch.arange(13), torch.arange(6)])[:, None] * 0.3 ** torch.arange(HEAD // 4)
    tables = RopeTables(angles.cos().to(device), angles.sin().to(device), "NEOX")
    half = replace(
        block.fused().attention,
        qkv=(q_and_gate, block.attn_k, block.attn_v),
        head_norms=(norms[0], norms[1]),
        is_gated=True,
    )
    y = block.attn_norm(x)
    q, gate = q_and_gate(y).view(-1, HEADS, 2, HEAD).unbind(2)
    k, v = (linear(y).unflatten(1, (-1, HEAD)) for linear in (block.attn_k, block.attn_v))
    q, k = (ops.rope(norm(heads.contiguous()), tables) for norm, heads in zip(norms, (q, k), strict=True))
    o = masked_attention(q, k, v, documents, softmax_scale=HEAD**-0.5, mask=Mask())
    wanted = x + block.attn_output((o * gate.sigmoid()).flatten(1))
    found = half(x, tables, documents, kept)
    factor = torch.randn(19, WIDTH, generator=generator).to(device)
    parameters = [x, *(parameter for linear in half.linears for parameter in linear.parameters())]
    results = [(one, *torch.autograd.grad((one * factor).sum(), parameters)) for one in (found, wanted)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * float(other.abs().max()))


def test_kept_gate_and_up_serve_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda device: False)
    block = make_block(device)
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    tables = RopeTables(torch.ones(4, HEAD // 2, device=device), torch.zeros(4, HEAD // 2, device=device), "NORM")
    y = block.fused()(x, tables, ops.Documents(torch.tensor([0, 4], dtype=torch.int32)), Kept(gate_up=True))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        y.sum().backward()


@pytest.mark.parametrize("pairing", ["NORM", "NEOX"])
@pytest.mark.parametrize("is_inverse", [False, True])
def test_rotation_in_place_is_the_rotation(pairing: str, is_inverse: bool) -> None:
    x = torch.randn(6, 3, HEAD, generator=torch.Generator().manual_seed(7))
    angles = torch.arange(6)[:, None] * 0.3 ** torch.arange(HEAD // 2 - 2)
    tables = RopeTables(angles.cos(), angles.sin(), pairing)  # type: ignore[arg-type]
    expected = cpu_rope(x, tables, is_inverse=is_inverse)
    wide = torch.cat([x.flatten(1), torch.ones(6, 2)], dim=1)
    part = wide[:, : 3 * HEAD].view(6, 3, HEAD)
    cpu_rope(part, tables, is_inverse=is_inverse, out=part)
    assert torch.equal(part, expected)
    assert torch.equal(wide[:, 3 * HEAD :], torch.ones(6, 2))


def test_a_cpu_half_runs_backward_twice_and_skips_what_nobody_asks_for() -> None:
    block = make_block(torch.device("cpu"))
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(8))
    tables = RopeTables(torch.ones(5, HEAD // 2), torch.zeros(5, HEAD // 2), "NORM")
    documents = ops.Documents(torch.tensor([0, 5], dtype=torch.int32))
    y = block.fused()(x, tables, documents, Kept(gate_up=True))
    parameters = list(block.parameters())
    first = torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    second = torch.autograd.grad(y.sum(), parameters)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kept", [Kept(), Kept(gate_up=True, weights=True)], ids=["matmuls", "weights too"])
@pytest.mark.parametrize("pairs", ["all", "some", "none"])
def test_8_bit_floats_change_nothing_but_the_rounding(
    device: torch.device, kept: Kept, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rounding that keeps every bit, values and gradients are those of single operations."""
    shapes = []
    monkeypatch.setattr("pyggtrain.nn.fused_layer._runs_on_cpu", lambda x: False)

    def product(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is None or out.is_contiguous()
        shapes.append((x.shape[0], w.shape[0]))
        return torch.mm(x, w.t(), out=out)

    monkeypatch.setattr("pyggtrain.kernels.fp8.quantize_rows", lambda x: x)
    monkeypatch.setattr("pyggtrain.kernels.fp8.quantize_columns", lambda w: w.t())
    monkeypatch.setattr("pyggtrain.kernels.fp8.product", product)
    block = make_block(device, pairs=pairs)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(6)).to(device)
    expected = run(block, block, x, [0, 5, 16], None)
    assert not shapes
    for linear in block.fused().linears:
        linear.compute = "fp8"
    for result, wanted in zip(run(block.fused(), block, x, [0, 5, 16], kept), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-4, atol=2e-5 * float(wanted.abs().max()))
    # q k v, output, gate and up, down: each forward and backward, and gate and up made again unless they are kept
    assert len(shapes) == 8 + (not kept.gate_up)


def test_what_a_cpu_can_fuse_does_not_depend_on_who_asks_first() -> None:
    can_fuse_on_cpu.cache_clear()
    with rehearsal.rehearsal(lambda storage, operation: None):
        inside = can_fuse_on_cpu(4, 2, 16)
    can_fuse_on_cpu.cache_clear()
    assert inside and can_fuse_on_cpu(4, 2, 16)
