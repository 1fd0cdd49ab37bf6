import pytest
import torch
from pyggtrain.kernels.gated_delta_rule.backward import gated_delta_rule_backward
from pyggtrain.kernels.gated_delta_rule.chunks import Chunks, most_chunks
from pyggtrain.kernels.gated_delta_rule.forward import gated_delta_rule_forward
from pyggtrain.kernels.reference.cases import DeltaRuleCase
from pyggtrain.kernels.reference.checks import CHECKS, Check
from pyggtrain.kernels.reference.comparison import as_near_as_torch
from pyggtrain.kernels.reference.delta_net import delta_rule_inputs, leaves_of, plain_delta_rule

from pyggtrain import ops


@pytest.mark.parametrize("check", CHECKS["gated_delta_rule"], ids=lambda check: check.id)
def test_forward_and_backward_are_as_close_to_float64_as_torch(
    check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


def test_backward_takes_what_forward_made(device: torch.device) -> None:
    inputs, do, bounds = delta_rule_inputs(DeltaRuleCase((5, 66), 1, 2, 16, 32), torch.float32, device)
    chunks = Chunks.from_bounds(bounds, device)
    _, made = gated_delta_rule_forward(*inputs, chunks, scale=0.5)
    again = gated_delta_rule_backward(do, *inputs, chunks, scale=0.5)
    for one, other in zip(gated_delta_rule_backward(do, *inputs, chunks, scale=0.5, made=made), again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("lengths", "num_documents"),
    [((1, 63, 64, 65, 130), 8), ((130, 1), 2), ((64,), 3)],
    ids=["all", "none more", "one"],
)
def test_room_for_more_documents_changes_nothing(
    lengths: tuple[int, ...], num_documents: int, device: torch.device
) -> None:
    inputs, do, bounds = delta_rule_inputs(DeltaRuleCase(lengths, 1, 2, 16, 16), torch.float32, device)

    def results(chunks: Chunks) -> tuple[torch.Tensor, ...]:
        o, made = gated_delta_rule_forward(*inputs, chunks, scale=0.5)
        return o, *gated_delta_rule_backward(do, *inputs, chunks, scale=0.5, made=made)

    chunks, roomy = Chunks.from_bounds(bounds, device), Chunks.from_bounds(bounds, device, num_documents=num_documents)
    assert roomy.num_documents == num_documents and roomy.num_chunks >= chunks.num_chunks
    for one, other in zip(results(roomy), results(chunks), strict=True):
        assert torch.equal(one, other)


def test_tables_with_room_have_sizes_of_their_own_and_can_be_overwritten() -> None:
    sizes = set()
    one = Chunks.from_bounds([0, 192], num_documents=4)
    for bounds in ([0, 192], [0, 1, 192], [0, 1, 2, 3, 192], [0, 64, 128, 192], [0, 65, 130, 131, 192]):
        other = Chunks.from_bounds(bounds, num_documents=4)
        exact = Chunks.from_bounds(bounds)
        sizes.add(tuple(table.shape for table in other.tables))
        assert exact.num_chunks == other.first_chunk[-1] <= other.num_chunks
        for table, wanted, end in zip(other.tables, exact.tables, (192, 192, exact.num_chunks), strict=True):
            assert torch.equal(table[: wanted.shape[0]], wanted) and (table[wanted.shape[0] :] == end).all()
        one.copy_(other)
        assert all(torch.equal(old, new) for old, new in zip(one.tables, other.tables, strict=True))
    assert len(sizes) == 1
    # The worst case fills the room.
    assert Chunks.from_bounds([0, 1, 66, 131, 196]).num_chunks == most_chunks(196, 4)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    (q, k, v, log_decay, beta), _, bounds = delta_rule_inputs(DeltaRuleCase((5,), 2, 4, 16, 16), torch.float32, device)
    chunks = Chunks.from_bounds(bounds, device)
    with pytest.raises(ValueError, match="value heads a multiple of key heads"):
        gated_delta_rule_forward(q, k, v[:, :3], log_decay[:, :3], beta[:, :3], chunks, scale=1.0)
    with pytest.raises(ValueError, match="log_decay is torch.float64"):
        gated_delta_rule_forward(q, k, v, log_decay.double(), beta, chunks, scale=1.0)
    with pytest.raises(ValueError, match="k is torch.float32"):
        gated_delta_rule_forward(q, k.transpose(1, 2), v, log_decay, beta, chunks, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "case",
    [
        DeltaRuleCase((2048,), 16, 32, 128, 128),
        DeltaRuleCase((8192,), 16, 32, 128, 128, decay=0.05),
        DeltaRuleCase((500, 1, 4096, 63, 64, 65), 2, 4, 64, 64, decay=0.1),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: takes hours in the interpreter")
def test_long_rows_of_real_models(case: DeltaRuleCase, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    inputs, do, bounds = delta_rule_inputs(case, dtype, device)
    chunks, scale = Chunks.from_bounds(bounds, device), case.key_size**-0.5
    results = (
        gated_delta_rule_forward(*inputs, chunks, scale=scale)[0],
        *gated_delta_rule_backward(do, *inputs, chunks, scale=scale),
    )
    leaves = leaves_of(inputs)
    o = plain_delta_rule(*leaves, bounds, scale)
    plain = (o.detach(), *torch.autograd.grad(o, leaves, do))
    # The chunks of the operation on a CPU, which its own tests hold against the recurrence.
    q, k, v, log_decay, beta = (x.cpu() for x in inputs)
    leaves = leaves_of((q, k, v, log_decay, beta), torch.float64)
    o = ops.gated_delta_rule(*leaves, Chunks.from_bounds(bounds), scale=scale)
    exact = (o.detach(), *torch.autograd.grad(o, leaves, do.cpu().double()))
    for name, ours, bar, right in zip(
        ("o", "dq", "dk", "dv", "d_log_decay", "d_beta"), results, plain, exact, strict=True
    ):
        comparison = as_near_as_torch(name, ours.cpu(), bar.cpu(), right)
        assert comparison.passed, comparison
