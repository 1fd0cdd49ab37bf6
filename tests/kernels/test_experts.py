"""Kernels of experts: choosing, sorting by expert, grouped products, low-rank pairs, SwiGLU with a router's weight."""

import pytest
import torch
from pyggtrain.kernels.expert_swiglu import expert_swiglu_backward
from pyggtrain.kernels.grouped_dequant_matmul import grouped_dequant_forward
from pyggtrain.kernels.grouped_lora import outer, project
from pyggtrain.kernels.grouped_matmul import LowRank, grouped_matmul_backward, grouped_matmul_forward, num_tiles
from pyggtrain.kernels.moe_routing import combine, sort_by_expert
from pyggtrain.kernels.reference import experts as reference
from pyggtrain.kernels.reference import moe_routing as routing_reference
from pyggtrain.kernels.reference.checks import CHECKS, Check
from pyggtrain.kernels.top_k import top_k

ALL = [
    pytest.param(check, id=f"{name}_{check.id}")
    for name in ("top_k", "moe_routing", "grouped_matmul", "grouped_lora", "expert_swiglu")
    for check in CHECKS[name]
]


@pytest.mark.parametrize("check", ALL)
def test_results_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


@pytest.mark.parametrize(("tokens", "chosen", "num_experts"), [(1, 1, 1), (300, 4, 3), (700, 1, 130), (5, 8, 512)])
def test_order_is_stable_for_any_number_of_experts(
    tokens: int, chosen: int, num_experts: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, num_experts, (tokens, chosen), generator=generator).to(device)
    slot, bounds = routing_reference.sort_by_expert(ids, num_experts)
    for kind in (torch.int64, torch.int32):
        routing = sort_by_expert(ids.to(kind), num_experts)
        assert torch.equal(routing.slot, slot.int())
        assert torch.equal(routing.bounds, bounds.int())


def test_no_tokens_are_no_work(device: torch.device) -> None:
    routing = sort_by_expert(torch.zeros(0, 2, dtype=torch.int64, device=device), 3)
    assert routing.bounds.tolist() == [0, 0, 0, 0]
    empty = torch.zeros(0, 32, device=device)
    grouped_matmul_forward(empty, torch.zeros(1, 3, 32, 32, device=device), routing, out=empty)
    assert top_k(empty, 4).shape == (0, 4)
    assert combine(empty, 2).shape == (0, 32)
    assert not outer(torch.zeros(0, 16, device=device), empty, routing, rank=2, is_lora_b=False).any()


def test_programs_suffice_for_any_distribution() -> None:
    for counts in ([0, 0, 64], [1] * 40, [17, 0, 33, 16, 1], [16, 16]):
        for rows in (16, 64):
            assert sum(-(-count // rows) for count in counts) <= num_tiles(sum(counts), len(counts), rows)


def test_reference_gradients_are_the_gradients() -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    bounds = torch.tensor([0, 3, 3, 5])
    x, a, b, scale = leaf(5, 6), leaf(3, 2, 6), leaf(3, 4, 2), torch.rand(3, dtype=torch.float64)
    bias = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    w = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator)
    h = reference.project(x, a, bounds, scale=0.5)
    y = reference.grouped_matmul_forward(x, w, bounds, h=h, lora_b=b, expert_scale=scale, bias=bias)
    dy = torch.randn_like(y)
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    dh = reference.project(dy, b.transpose(1, 2), bounds, scale=0.5)
    ours = reference.grouped_matmul_backward([dy], [w], bounds, dh=[dh], lora_a=[a], expert_scale=scale)
    torch.testing.assert_close(ours, dx)
    torch.testing.assert_close(reference.outer(dh, x, bounds, scale=1.0), da)
    torch.testing.assert_close(reference.outer(h, dy, bounds, scale=1.0).transpose(1, 2), db)

    gate, up, weight = leaf(5, 4), leaf(5, 4), leaf(5)
    da = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    for settings in ({"alpha": 1.0, "offset": 0.0, "limit": None}, {"alpha": 1.7, "offset": 1.0, "limit": 0.5}):
        weighted = weight[:, None] * reference.expert_swiglu_forward(gate, up, **settings)
        d_gate, d_up, d_weight = torch.autograd.grad(weighted, (gate, up, weight), da)
        ours = reference.expert_swiglu_backward(da, gate, up, weight, **settings)
        for result, expected in zip(ours, (d_gate, d_up, weighted, d_weight), strict=True):
            torch.testing.assert_close(result, expected)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    zeros = lambda *shape: torch.zeros(*shape, device=device)  # noqa: E731
    routing = sort_by_expert(torch.zeros(4, 2, dtype=torch.int64, device=device), 3)
    with pytest.raises(ValueError, match="x is torch.float64"):
        top_k(zeros(4, 8).double(), 2)
    for shape, chosen in (((4, 8), 9), ((4, 64), 33), ((4, 1025), 2)):
        with pytest.raises(ValueError, match="at most 32 of at most 1024"):
            top_k(zeros(*shape), chosen)
    with pytest.raises(ValueError, match="ids are"):
        sort_by_expert(zeros(4, 2), 3)
    with pytest.raises(ValueError, match="0, 1 or 2"):
        grouped_matmul_forward(zeros(4, 32), zeros(1, 3, 8, 32), routing, out=zeros(8, 8), slots_per_row=4)
    with pytest.raises(ValueError, match=r"x is \[4, 32\].*needed: \[8, 32\]"):
        grouped_matmul_forward(zeros(4, 32), zeros(1, 3, 8, 32), routing, out=zeros(8, 8))
    with pytest.raises(ValueError, match="from expert 2 of 3"):
        grouped_matmul_backward(zeros(8, 8), zeros(1, 2, 8, 32), routing, out=zeros(8, 32), first_expert=2)
    pair = LowRank(zeros(8, 32), (zeros(3, 4, 32), zeros(3, 5, 32)))
    with pytest.raises(ValueError, match="contiguous ones of one shape and dtype"):
        grouped_matmul_backward(zeros(8, 16), zeros(2, 3, 8, 32), routing, out=zeros(8, 32), low_rank=pair)
    with pytest.raises(ValueError, match="a bias and a low-rank factor for each or none"):
        grouped_matmul_forward(zeros(8, 32), zeros(2, 3, 8, 32), routing, out=zeros(8, 16), biases=[zeros(3, 8)])
    with pytest.raises(ValueError, match=r"not contiguous \[3, 8\]"):
        grouped_matmul_forward(zeros(8, 32), zeros(1, 3, 8, 32), routing, out=zeros(8, 8), biases=[zeros(2, 8)])
    blocks = torch.zeros(2, 8, 34, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"needed: contiguous uint8 \[3, N"):
        grouped_dequant_forward(zeros(8, 32), blocks, "Q8_0", routing, out=zeros(8, 8))
    with pytest.raises(ValueError, match="of 3 experts"):
        project(zeros(8, 32), [zeros(2, 4, 32)], routing, scales=[1.0])
    rows = zeros(8, 4)
    with pytest.raises(ValueError, match="each of 8 slots"):
        expert_swiglu_backward(rows, rows, rows, routing, zeros(3, 2), d_gate=rows, d_up=rows, weighted=rows)
