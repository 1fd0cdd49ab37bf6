"""ops.expert_linear: products with the experts that a router chose, their low-rank updates, and all gradients."""

import pytest
import torch

from pyggtrain.gguf import quantize_tensor
from pyggtrain.ops import dequantize, expert_linear, quant_matmul

# Expert 3 is chosen by nobody, expert 1 twice by one token, expert 4 once.
IDS = torch.tensor([[0, 2], [2, 0], [1, 1], [5, 4], [0, 5]])
NUM_EXPERTS = 6


def random(*shape, seed=1, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def make_stack(type, num_out, num_in):
    weight = quantize_tensor("blk.0.ffn_up_exps.weight", random(NUM_EXPERTS, num_out, num_in, seed=7), type)
    return weight, dequantize(weight).double()


def reference(x, ids, w, a, b, scale, mask=None, base_scale=None):
    """Every expert's matrices gathered for every slot, in x's dtype."""
    x = x.expand(-1, ids.shape[1], -1)
    y = torch.einsum("tjk,tjnk->tjn", x, w.to(x.dtype)[ids])
    if base_scale is not None:
        y = y * base_scale.to(x.dtype)[ids][..., None]
    seen = x if mask is None else x * mask
    return y + scale * torch.einsum("tjk,tjrk,tjnr->tjn", seen, a[ids], b[ids])


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("type", ["F32", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("has_options", [False, True])
def test_output_and_gradients_are_as_near_as_plain_torch(earned, rank, width, type, has_options):
    weight, exact = make_stack(type, 48, 256)
    mask = random(5, width, 256, seed=9) < 0.8 if has_options else None
    base_scale = random(NUM_EXPERTS, seed=8) if has_options else None
    inputs = (
        random(5, width, 256),
        random(NUM_EXPERTS, rank, 256, seed=2),
        random(NUM_EXPERTS, 48, rank, seed=3),
    )
    dy = random(5, 2, 48, seed=5)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        x, a, b = (tensor.to(dtype or torch.float32, copy=True).requires_grad_() for tensor in inputs)
        if dtype is None:
            y = expert_linear(
                x,
                IDS,
                weight,
                lora_a_ERK=a,
                lora_b_ENR=b,
                base_scale_E=base_scale,
                scale=0.7,
                dropout_mask_TJK=mask,
                compute="exact",
            )
        else:
            y = reference(x, IDS, exact, a, b, 0.7, mask, base_scale)
        y.backward(dy.to(y.dtype))
        outcomes.append((y.detach(), x.grad, a.grad, b.grad))
    for result, plain, exact_result in zip(*outcomes, strict=True):
        earned(result, plain, exact_result)
    for gradient in outcomes[0][2:]:
        assert not gradient[3].any(), "an expert that nobody chose learnt something"


@pytest.mark.parametrize("width", [1, 2])
def test_without_a_pair_it_is_the_base_with_its_gradient(earned, width):
    weight, exact = make_stack("Q4_1", 48, 64)
    dy = random(5, 2, 48, seed=5)
    outcomes = []
    for dtype in (None, torch.float32, torch.float64):
        x = random(5, width, 64).to(dtype or torch.float32).requires_grad_()
        if dtype is None:
            y = expert_linear(x, IDS, weight, compute="exact")
        else:
            y = torch.einsum("tjk,tjnk->tjn", x.expand(-1, 2, -1), exact.to(dtype)[IDS])
        y.backward(dy.to(y.dtype))
        outcomes.append((y.detach(), x.grad))
    for result, plain, exact_result in zip(*outcomes, strict=True):
        earned(result, plain, exact_result)


@pytest.mark.parametrize("width", [1, 2])
def test_gradcheck_of_the_operation_itself(width):
    weight, _ = make_stack("Q8_0", 6, 32)
    shapes = [(5, width, 32), (NUM_EXPERTS, 2, 32), (NUM_EXPERTS, 6, 2)]
    inputs = [random(*shape, seed=seed, dtype=torch.float64).requires_grad_() for seed, shape in enumerate(shapes)]
    factors = random(NUM_EXPERTS, dtype=torch.float64)
    mask = random(5, width, 32) < 0.5
    assert torch.autograd.gradcheck(
        lambda x, a, b: expert_linear(
            x,
            IDS,
            weight,
            lora_a_ERK=a,
            lora_b_ENR=b,
            base_scale_E=factors,
            scale=1.3,
            dropout_mask_TJK=mask,
        ),
        inputs,
    )


@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_zero_b_is_the_base_bit_for_bit(compute):
    weight, _ = make_stack("Q4_1", 40, 64)
    x, a = random(5, 1, 64), random(NUM_EXPERTS, 4, 64)
    y = expert_linear(
        x, IDS, weight, lora_a_ERK=a, lora_b_ENR=torch.zeros(NUM_EXPERTS, 40, 4), scale=2.0, compute=compute
    )
    assert torch.equal(y, expert_linear(x, IDS, weight, compute=compute))


def test_only_chosen_experts_are_decoded_and_one_at_a_time(monkeypatch):
    weight, _ = make_stack("Q4_1", 40, 64)
    seen = []
    for name in ("forward", "backward"):
        original = getattr(quant_matmul, name)

        def spy(x, blocks, *args, original=original, **kwargs):
            seen.append(blocks.data_ptr())
            assert blocks.shape == weight.blocks.shape[1:]
            return original(x, blocks, *args, **kwargs)

        monkeypatch.setattr(quant_matmul, name, spy)
    x = random(5, 1, 64).requires_grad_()
    expert_linear(x, IDS, weight).sum().backward()
    assert seen == 2 * [weight.blocks[expert].data_ptr() for expert in (0, 1, 2, 4, 5)]


def test_input_gradient_is_not_computed_when_not_needed(monkeypatch):
    weight, _ = make_stack("Q4_1", 40, 64)

    def refuse(*args, **kwargs):
        raise AssertionError("dx was computed for an input without gradient")

    monkeypatch.setattr(quant_matmul, "backward", refuse)
    a, b = random(NUM_EXPERTS, 4, 64).requires_grad_(), random(NUM_EXPERTS, 40, 4).requires_grad_()
    expert_linear(random(5, 1, 64), IDS, weight, lora_a_ERK=a, lora_b_ENR=b).sum().backward()
    assert a.grad.abs().sum() > 0


@pytest.mark.parametrize("has_pair", [False, True])
def test_opcheck(has_pair):
    weight, _ = make_stack("Q4_1", 24, 32)
    order = torch.sort(IDS.reshape(-1), stable=True)
    bounds = torch.searchsorted(order.values, torch.arange(NUM_EXPERTS + 1))
    a = random(NUM_EXPERTS, 3, 32).requires_grad_() if has_pair else None
    b = random(NUM_EXPERTS, 24, 3).requires_grad_() if has_pair else None
    x = random(5, 32).requires_grad_()
    arguments = (x, order.indices, bounds, weight.blocks, "Q4_1", a, b, None, 0.5, "exact", None)
    torch.library.opcheck(torch.ops.pyggtrain.expert_linear.default, arguments)


def test_an_id_that_is_no_expert_is_an_error():
    weight, _ = make_stack("Q4_1", 24, 32)
    for ids in (torch.tensor([[6]]), torch.tensor([[-1]])):
        with pytest.raises(IndexError, match="outside of 0 to 5"):
            expert_linear(random(1, 1, 32), ids, weight)


def test_shapes_that_do_not_fit_are_named():
    weight, _ = make_stack("Q4_1", 24, 32)
    with pytest.raises(ValueError, match=r"x has shape \(5, 3, 32\) .* needed \[5, 2 or 1, 32\]"):
        expert_linear(random(5, 3, 32), IDS, weight)
    with pytest.raises(ValueError, match=r"needed \[6, r, 32\] and \[6, 24, r\]"):
        expert_linear(random(5, 1, 32), IDS, weight, lora_a_ERK=random(3, 4, 32), lora_b_ENR=random(NUM_EXPERTS, 24, 4))
    with pytest.raises(ValueError, match="one half of a pair"):
        expert_linear(random(5, 1, 32), IDS, weight, lora_a_ERK=random(NUM_EXPERTS, 4, 32))
