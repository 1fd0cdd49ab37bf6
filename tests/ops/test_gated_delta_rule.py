"""ops.gated_delta_rule on a CPU, against the recurrence in float64."""

import pytest
import torch
from pyggtrain.kernels.gated_delta_rule.chunks import Chunks
from pyggtrain.kernels.reference import gated_delta_rule as reference
from pyggtrain.kernels.reference.cases import DELTA_RULE_CASES, DeltaRuleCase
from pyggtrain.kernels.reference.delta_net import delta_rule_inputs, leaves_of, plain_delta_rule

from pyggtrain import ops

CASES = (
    *DELTA_RULE_CASES,
    DeltaRuleCase((500,), 2, 4, 64, 64),
    # Documents of other numbers of chunks, the longest neither first nor last.
    DeltaRuleCase((64, 1, 200, 65, 63, 200), 1, 3, 16, 32),
    DeltaRuleCase((4096,), 1, 1, 16, 16, decay=0.01),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_output_and_gradients_are_as_near_as_plain_torch(earned, case):
    pytest.importorskip("triton", reason="the list of cases is the kernels'")
    inputs, do, bounds = delta_rule_inputs(case, torch.float32, torch.device("cpu"))
    chunks, scale = Chunks.from_bounds(bounds), case.key_size**-0.5
    exact_o = reference.gated_delta_rule_forward(*inputs, bounds, scale=scale)
    exact = (exact_o, *reference.gated_delta_rule_backward(do, *inputs, bounds, scale=scale))
    outcomes = []
    for function in (
        lambda *x: ops.gated_delta_rule(*x, chunks, scale=scale),
        lambda *x: plain_delta_rule(*x, bounds, scale),
    ):
        leaves = leaves_of(inputs)
        o = function(*leaves)
        outcomes.append((o.detach(), *torch.autograd.grad(o, leaves, do)))
    for result, plain, right in zip(*outcomes, exact, strict=True):
        if right.abs().max() > 0:
            earned(result, plain, right)


def inputs_of(lengths, key_heads=1, heads=2, key_size=3, value_size=4):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(lengths)
    q, k = (torch.nn.functional.normalize(normal(tokens, key_heads, key_size), dim=-1) for _ in range(2))
    gates = -normal(tokens, heads).abs(), normal(tokens, heads).sigmoid()
    return [x.requires_grad_() for x in (q, k, normal(tokens, heads, value_size), *gates)]


def chunks_of(lengths):
    return Chunks.from_bounds([0, *torch.tensor(lengths).cumsum(0).tolist()])


def test_room_for_more_documents_changes_nothing():
    inputs, bounds = inputs_of((3, 66, 64)), [0, 3, 69, 133]
    results = []
    for chunks in (Chunks.from_bounds(bounds), Chunks.from_bounds(bounds, num_documents=8)):
        o = ops.gated_delta_rule(*inputs, chunks, scale=0.7)
        results.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_gradcheck():
    inputs, chunks = inputs_of((3, 66)), chunks_of((3, 66))
    assert torch.autograd.gradcheck(lambda *x: ops.gated_delta_rule(*x, chunks, scale=0.7), inputs, fast_mode=True)


def test_opcheck():
    inputs, chunks = inputs_of((3, 2)), chunks_of((3, 2))
    arguments = (*inputs, chunks.first_token, chunks.cu_seqlens, chunks.first_chunk, 0.7)
    torch.library.opcheck(torch.ops.pyggtrain.gated_delta_rule.default, arguments)


def test_a_value_head_reads_the_key_head_of_its_number_modulo_theirs():
    q, k, v, log_decay, beta = inputs_of((5,), key_heads=2, heads=6)
    chunks = chunks_of((5,))
    together = ops.gated_delta_rule(q, k, v, log_decay, beta, chunks, scale=1.0)
    for head in range(6):
        one, keys = slice(head, head + 1), slice(head % 2, head % 2 + 1)
        alone = ops.gated_delta_rule(
            q[:, keys], k[:, keys], v[:, one], log_decay[:, one], beta[:, one], chunks, scale=1.0
        )
        torch.testing.assert_close(together[:, one], alone)


def test_packed_documents_are_as_good_as_separate_ones():
    lengths = (70, 1, 130)
    inputs = inputs_of(lengths)
    packed = ops.gated_delta_rule(*inputs, chunks_of(lengths), scale=1.0).split(lengths)
    separate = zip(*(x.split(lengths) for x in inputs), strict=True)
    for length, found, parts in zip(lengths, packed, separate, strict=True):
        torch.testing.assert_close(found, ops.gated_delta_rule(*parts, chunks_of((length,)), scale=1.0))


def test_wrong_heads_and_documents_are_refused():
    q, k, v, log_decay, beta = inputs_of((5,), key_heads=2, heads=4)
    with pytest.raises(ValueError, match="3 value heads do not lie over 2"):
        ops.gated_delta_rule(q, k, v[:, :3], log_decay[:, :3], beta[:, :3], chunks_of((5,)), scale=1.0)
    with pytest.raises(ValueError, match="documents cover 4 tokens: needed 5"):
        ops.gated_delta_rule(q, k, v, log_decay, beta, chunks_of((4,)), scale=1.0)
