"""ops.fused.expert_feed_forward against the same experts in plain torch and float64: Triton's interpreter or a GPU."""

from importlib import import_module
from typing import Any

import pytest
import torch
from pyggtrain.kernels.reference.cases import random_blocks
from pyggtrain.kernels.reference.dequant import dequantize
from pyggtrain.kernels.reference.experts import expert_swiglu_forward

from pyggtrain.ops import expert_product, workspace
from pyggtrain.ops.expert_product import Decoded, ExpertStack
from pyggtrain.ops.fused import ExpertFeedForward, Kept, expert_feed_forward

T, J, E, D, F, R = 7, 2, 5, 64, 96, 3
module = import_module("pyggtrain.ops.fused.expert_feed_forward")


def make_block(
    device: torch.device, types: tuple[str, str, str], *, is_limited: bool = False
) -> tuple[ExpertFeedForward, list[torch.Tensor]]:
    """Stacks of gate, up and down, and their exact values.

    Args:
        is_limited: with biases and gpt-oss's gated unit.
    """
    generator = torch.Generator(device).manual_seed(3)
    stacks, values = [], []
    for type, (rows, columns) in zip(types, ((F, D), (F, D), (D, F)), strict=True):
        if type == "F32":
            weight = torch.randn(E * rows, columns, device=device, generator=generator) / columns**0.5
            blocks = weight.view(torch.uint8)
        else:
            blocks = random_blocks(type, E * rows, columns, generator=generator, magnitude=2e-3)
            weight = dequantize(blocks, type, dtype=torch.float32)
        bias = torch.randn(E, rows, device=device, generator=generator) if is_limited else None
        stacks.append(ExpertStack(blocks.view(E, rows, -1), type, bias=bias))
        values.append(weight.view(E, rows, columns))
    unit = (1.702, 1.0, 0.8) if is_limited else ()
    return ExpertFeedForward(*stacks, (0.5, 2.0, 0.7), *unit), values


def make_inputs(device: torch.device, pairs: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    ids = torch.randint(0, E - 1, (T, J), generator=generator).to(device)
    lora = [leaf(*shape) for width, out in ((D, F), (D, F), (F, D)) for shape in ((E, R, width), (E, out, R))]
    used = {"all": lora, "none": [None] * 6, "down": [None] * 4 + lora[4:], "gate and up": [*lora[:4], None, None]}
    probs = torch.rand(T, J, generator=generator).to(device).requires_grad_()
    gradient = leaf(T, D).detach()
    inputs = {"y": leaf(T, D), "probs": probs, "residual": leaf(T, D), "ids": ids}
    return inputs | {"lora": used[pairs], "gradient": gradient}


def expected_results(values: list[torch.Tensor], block: ExpertFeedForward, inputs: dict[str, Any]) -> list[Any]:
    leaves = [inputs[name].detach().double().requires_grad_() for name in ("y", "probs", "residual")]
    lora = [None if item is None else item.detach().double().requires_grad_() for item in inputs["lora"]]
    y, probs, residual = leaves
    ids, scales = inputs["ids"], block.scales

    def product(x: torch.Tensor, index: int) -> torch.Tensor:
        out = torch.einsum("tjnk,tjk->tjn", values[index].double()[ids], x)
        bias = (block.gate, block.up, block.down)[index].bias
        out = out if bias is None else out + bias.double()[ids]
        a, b = lora[2 * index : 2 * index + 2]
        if a is None or b is None:
            return out
        return out + scales[index] * torch.einsum("tjnr,tjrk,tjk->tjn", b[ids], a[ids], x)

    x = y[:, None].expand(-1, J, -1)
    unit = {"alpha": block.alpha, "offset": block.offset, "limit": block.limit}
    z = product(expert_swiglu_forward(product(x, 0), product(x, 1), **unit), 2)
    out = residual + (probs[..., None] * z).sum(1)
    used = [item for item in lora if item is not None]
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *used], inputs["gradient"].double())]


def results(block: ExpertFeedForward, inputs: dict[str, Any], kept: Kept, dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [inputs["y"].detach().to(dtype).requires_grad_(), inputs["probs"]]
    leaves.append(inputs["residual"].detach().to(dtype).requires_grad_())
    lora = inputs["lora"]
    pairs = [None if a is None else (a, b) for a, b in zip(lora[::2], lora[1::2], strict=True)]
    out = expert_feed_forward(leaves[0], inputs["ids"], leaves[1], block, pairs, kept=kept, residual_TD=leaves[2])
    used = [item for item in lora if item is not None]
    gradient = inputs["gradient"].to(dtype)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *used], gradient)]


def compare(
    device: torch.device,
    *,
    types: tuple[str, str, str] = ("Q8_0", "Q8_0", "Q4_0"),
    pairs: str = "all",
    kept: Kept | None = None,
    dtype: torch.dtype = torch.float32,
    bound: float = 2e-6,
    is_limited: bool = False,
) -> None:
    block, values = make_block(device, types, is_limited=is_limited)
    inputs = make_inputs(device, pairs)
    ours = results(block, inputs, kept or Kept(), dtype)
    for result, exact in zip(ours, expected_results(values, block, inputs), strict=True):
        assert float((result.double() - exact).norm() / exact.norm()) < bound


@pytest.mark.parametrize(
    ("few_rows", "pairs"), [(0, "all"), (0, "none"), (0, "down"), (0, "gate and up"), (1000, "all"), (1000, "none")]
)
def test_values_and_gradients_are_those_of_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, few_rows: int, pairs: str
) -> None:
    monkeypatch.setattr(expert_product, "FEW_ROWS", few_rows)
    monkeypatch.setattr(expert_product, "PACKED_TYPES", frozenset({"Q4_K", "Q8_0", "Q4_0"}))
    compare(device, pairs=pairs)


def test_biases_and_another_gated_unit(device: torch.device) -> None:
    compare(device, is_limited=True)


def test_gate_and_up_may_be_kept_and_of_different_types(device: torch.device) -> None:
    compare(device, types=("Q8_0", "F32", "Q4_0"), kept=Kept(gate_up=True))


def test_stacks_are_decoded_in_slices_of_the_workspace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_product, "FEW_ROWS", 0)
    monkeypatch.setattr(workspace, "limit_bytes", lambda device_type: 2 * 3 * F * D * 4)
    block, values = make_block(device, ("Q8_0", "Q8_0", "Q8_0"))
    pieces = [(first, part.clone()) for first, part in Decoded([block.gate, block.up], torch.float32).slices()]
    assert [(first, part.shape[1]) for first, part in pieces] == [(0, 3), (3, 2)]
    assert torch.equal(torch.cat([part for _, part in pieces], 1), torch.stack(values[:2]))
    compare(device, types=("Q8_0", "Q8_0", "Q8_0"))


@pytest.mark.parametrize("pairs", ["all", "none", "down", "gate and up"])
def test_backward_of_slices_is_that_of_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, pairs: str
) -> None:
    monkeypatch.setattr(expert_product, "FEW_ROWS", 0)
    monkeypatch.setattr(workspace, "limit_bytes", lambda device_type: 2 * 2 * F * D * 4)
    compare(device, pairs=pairs, is_limited=pairs in ("all", "none"))


@pytest.mark.parametrize(
    ("num_experts", "counts"), [(5, (2, 2, 2)), (3, (2, 2, 2))], ids=["in one slice", "in two slices"]
)
def test_no_expert_is_decoded_without_need(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_experts: int, counts: tuple[int, int, int]
) -> None:
    """Once forward, once for gate and up again and for backward, slice by slice or all together."""
    monkeypatch.setattr(expert_product, "FEW_ROWS", 0)
    monkeypatch.setattr(workspace, "limit_bytes", lambda device_type: 2 * num_experts * F * D * 4)
    block, _ = make_block(device, ("Q8_0", "Q8_0", "Q8_0"))
    decoded = {id(stack): 0 for stack in (block.gate, block.up, block.down)}
    decode = expert_product._decode

    def counted(stack: ExpertStack, first: int, end: int, out: torch.Tensor) -> None:
        decoded[id(stack)] += end - first
        decode(stack, first, end, out)

    monkeypatch.setattr(expert_product, "_decode", counted)
    results(block, make_inputs(device, "all"), Kept(), torch.float32)
    assert list(decoded.values()) == [count * E for count in counts]


def test_long_rows_are_taken_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SLOTS", 3 * J)
    compare(device)


def test_backward_of_kept_gate_and_up_runs_once(device: torch.device) -> None:
    block, _ = make_block(device, ("Q8_0", "Q8_0", "Q8_0"))
    inputs = make_inputs(device, "none")
    out = expert_feed_forward(
        inputs["y"], inputs["ids"], inputs["probs"], block, [None] * 3, kept=Kept(gate_up=True)
    ).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        out.backward()


def test_ranks_of_gate_and_up_must_agree(device: torch.device) -> None:
    block, _ = make_block(device, ("Q8_0", "Q8_0", "Q8_0"))
    inputs = make_inputs(device, "all")
    lora = inputs["lora"]
    pairs = [(lora[0], lora[1]), None, None]
    with pytest.raises(ValueError, match="differ in rank, or one is missing"):
        expert_feed_forward(inputs["y"], inputs["ids"], inputs["probs"], block, pairs, kept=Kept())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("few_rows", [0, 1000], ids=["decoded", "packed"])
def test_bfloat16_and_a_graph_of_it(monkeypatch: pytest.MonkeyPatch, few_rows: int) -> None:
    """Near float64, and a CUDA graph replays it to the bit: nothing waits for the host, no sum depends on chance."""
    monkeypatch.setattr(expert_product, "FEW_ROWS", few_rows)
    monkeypatch.setattr(expert_product, "PACKED_TYPES", frozenset({"Q4_K", "Q8_0", "Q4_0"}))
    device = torch.device("cuda")
    compare(device, dtype=torch.bfloat16, bound=2e-2)
    torch.use_deterministic_algorithms(False)
    block, _ = make_block(device, ("Q8_0", "Q8_0", "Q4_0"))
    inputs = make_inputs(device, "all")
    expected = results(block, inputs, Kept(), torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(block, inputs, Kept(), torch.bfloat16)
    graph.replay()
    torch.cuda.synchronize()
    for result, wanted in zip(captured, expected, strict=True):
        assert torch.equal(result, wanted)
