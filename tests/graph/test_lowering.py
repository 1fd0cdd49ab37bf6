"""Each operation of the table against its definition in float64, and its gradient against finite differences."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering import LOWERINGS, lower
from pyggtrain.graph.lowering.shape import read_view
from pyggtrain.nn import Batch

GRAPH = Graph(
    (),
    0,
    window=0,
    window_type="none",
    is_causal=True,
    is_diffusion=False,
    uses_alibi=False,
    attn_temperature=(0, 0, 0),
)
FRAME = Frame(Batch.from_documents([([1, 2, 3], [1, 2, 3])]), torch.arange(3))
# These have files of tests of their own.
ELSEWHERE = {
    *(
        "FLASH_ATTN_EXT",
        "FLASH_ATTN_EXT.kq_mask",
        "FLASH_ATTN_EXT.kq_mask_swa",
        "SOFT_MAX",
        "LATENT_ATTENTION.kq_mask",
        "LATENT_ATTENTION.kq_mask_swa",
    ),
    *("ROPE", "ROPE_BACK"),
    *("GATED_DELTA_NET", "GATED_LINEAR_ATTN", "RWKV_WKV6", "RWKV_WKV7", "SSM_CONV", "SSM_SCAN"),
    *("CONCAT.empty", "GATED_DELTA_NET.empty", "RWKV_WKV6.empty", "RWKV_WKV7.empty"),
    *("SSM_CONV.empty", "SSM_SCAN.empty"),
}


def bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """An operation on random inputs of given shapes and what it must give.

    Attributes:
        shapes: of the inputs, standard normal unless `inputs` are given.
        params: int or float, by position.
        shape: of the node, where the operation needs it.
    """

    reference: Callable[..., torch.Tensor]
    shapes: Sequence[tuple[int, ...]] = ((1, 2, 3, 4),)
    params: dict[int, float] = field(default_factory=dict)
    shape: tuple[int, ...] = (1, 1, 1, 1)
    inputs: Sequence[torch.Tensor] = ()
    positive: bool = False
    has_gradient: bool = True

    def values(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        random = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        return [*(x.abs() + 0.1 if self.positive else x for x in random), *self.inputs]

    def node(self, op: str) -> Node:
        params = [0] * 16
        for index, value in self.params.items():
            params[index] = bits(value) if isinstance(value, float) else value
        strides = [math.prod(self.shape[dim + 1 :]) * 4 for dim in range(4)]
        return Node("node", op, "node", "f32", self.shape, tuple(strides), tuple(params), (), None, 0)


PAIR = ((2, 2, 3, 4), (1, 2, 1, 4))
TWO = ((1, 2, 3, 4), (1, 2, 3, 4))
IDS = torch.tensor([[[[2, 0], [1, 1], [0, 2]]]])
RANK = torch.tensor([[[[3.0, 1.0, 2.0], [-1.0, 5.0, 0.0]]]], dtype=torch.float64)


def sinkhorn(mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Token by token: softmax, columns, then rows and columns in turn."""
    tokens = []
    for mix in mixes[0, 0]:
        comb = (mix[8:] * scale[0, 0, 0, 2] + base[0, 0, 0, 8:]).reshape(4, 4).exp()
        comb = comb / comb.sum(1, keepdim=True) + 0.125
        for sums in (0, 1, 0):
            comb = comb / (comb.sum(sums, keepdim=True) + 0.125)
        tokens.append(comb)
    return torch.stack(tokens)[None]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.special.erf(x / math.sqrt(2)))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def xielu(x: torch.Tensor) -> torch.Tensor:
    below = (x.minimum(torch.tensor(-0.125)).exp() - 1 - x) * 1.25
    return torch.where(x > 0, 0.75 * x**2, below) + 0.5 * x


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.minimum(torch.tensor(0.5)), up.maximum(torch.tensor(-0.5)).minimum(torch.tensor(0.5))
    return gate * sigmoid(1.5 * gate) * (up + 1)


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.minimum(torch.tensor(0.5)), up.maximum(torch.tensor(-0.5)).minimum(torch.tensor(0.5))
    return gate * sigmoid(gate) * up


CASES: dict[str, Case] = {
    "ADD": Case(lambda a, b: a + b, PAIR),
    "ADD1": Case(lambda a, b: a + b, ((1, 2, 3, 4), (1, 1, 1, 1))),
    "ADD_ID": Case(
        lambda x, bias, ids: torch.stack([x[0, t] + bias[0, 0, ids[0, 0, t]] for t in range(3)])[None],
        ((1, 3, 2, 4), (1, 1, 5, 4)),
        inputs=(IDS,),
    ),
    "ARANGE": Case(
        lambda: torch.tensor([[[[1.0, 1.5, 2.0]]]]), (), {0: 1.0, 2: 0.5}, shape=(1, 1, 1, 3), has_gradient=False
    ),
    "ARGSORT": Case(
        lambda x: torch.tensor([[[[0, 2, 1], [1, 2, 0]]]]), (), {0: 1}, inputs=(RANK,), has_gradient=False
    ),
    "ARGSORT.top_k": Case(
        lambda x: torch.tensor([[[[0, 2], [1, 2]]]]), shape=(1, 1, 2, 2), inputs=(RANK,), shapes=(), has_gradient=False
    ),
    "CLAMP": Case(lambda x: x.maximum(torch.tensor(-0.5)).minimum(torch.tensor(0.25)), params={0: -0.5, 1: 0.25}),
    "CONCAT": Case(lambda a, b: torch.cat([a, b], 2), ((1, 2, 3, 4), (1, 2, 1, 4)), {0: 2}),
    "CONT": Case(lambda x: x.reshape(1, 1, 6, 4), shape=(1, 1, 6, 4)),
    "COS": Case(lambda x: (torch.exp(1j * x)).real),
    "CPY": Case(lambda x: x.reshape(1, 1, 1, 24), shape=(1, 1, 1, 24)),
    "CUMSUM": Case(lambda x: torch.stack([x[..., : i + 1].sum(-1) for i in range(4)], -1)),
    "DIV": Case(lambda a, b: a * b**-1, PAIR),
    "DUP": Case(lambda x: x, shape=(1, 2, 3, 4)),
    "DSV4_HC_COMB": Case(
        sinkhorn, ((1, 1, 3, 24), (1, 1, 1, 3), (1, 1, 1, 24)), {0: 0.125, 1: 2}, has_gradient=True
    ),
    "DSV4_HC_POST": Case(
        lambda y, x, post, comb: (
            torch.einsum("abtd,abtm->btmd", y, post) + torch.einsum("atsm,atsd->atmd", comb, x)
        ),
        ((1, 1, 3, 5), (1, 3, 4, 5), (1, 1, 3, 4), (1, 3, 4, 4)),
    ),
    "DSV4_HC_PRE": Case(
        lambda x, w: 0.5 * torch.einsum("atmd,abtm->abtd", x, w), ((1, 3, 4, 5), (1, 1, 3, 4)), {0: 0.5}
    ),
    "FILL": Case(lambda x: torch.full((1, 1, 2, 2), 2.5), params={0: 2.5}, shape=(1, 1, 2, 2), has_gradient=False),
    "GET_ROWS": Case(
        lambda a, ids: torch.stack([a[0, t][ids[0, 0, t]] for t in range(3)])[None], ((1, 3, 4, 5),), inputs=(IDS,)
    ),
    "GLU.GEGLU": Case(lambda gate, up: gelu_tanh(gate) * up, TWO),
    "GLU.GEGLU_ERF": Case(lambda gate, up: gate * normal_cdf(gate) * up, TWO),
    "GLU.GEGLU_QUICK": Case(lambda gate, up: gate * sigmoid(1.702 * gate) * up, TWO),
    "GLU.REGLU": Case(lambda gate, up: (gate + gate.abs()) / 2 * up, TWO),
    "GLU.SWIGLU": Case(lambda gate, up: gate * sigmoid(gate) * up, TWO),
    "GLU.SWIGLU_CLAMP": Case(clamped, TWO, {2: 1.5, 3: 0.5}),
    "GLU.SWIGLU_OAI": Case(oai, TWO, {2: 1.5, 3: 0.5}),
    "GROUP_NORM": Case(
        lambda x: (
            (x.reshape(2, 3, -1) - x.reshape(2, 3, -1).mean(-1, keepdim=True))
            / (x.reshape(2, 3, -1).var(-1, keepdim=True, correction=0) + 0.125).sqrt()
        ).reshape(x.shape),
        ((2, 6, 1, 4),),
        {0: 3, 1: 0.125},
    ),
    "LIGHTNING_INDEXER": Case(
        lambda q, k, w, mask: (
            torch.einsum("qth,qths->qts", w[:, 0], torch.einsum("qthk,qsk->qths", q, k[:, :, 0]).clamp(min=0))[:, None]
            + mask
        ),
        ((1, 3, 2, 4), (1, 5, 1, 4), (1, 1, 3, 2), (1, 1, 3, 5)),
    ),
    "L2_NORM": Case(lambda x: x / (x * x).sum(-1, keepdim=True).sqrt(), params={0: 1e-6}),
    "LOG": Case(lambda x: torch.log1p(x - 1), positive=True),
    "MEAN": Case(lambda x: x.sum(-1, keepdim=True) / 4),
    "MUL": Case(lambda a, b: a * b, PAIR),
    "MUL_MAT": Case(
        lambda a, b: torch.stack([torch.einsum("nk,tk->tn", a[0, head // 2], b[0, head]) for head in range(4)])[None],
        ((1, 2, 3, 5), (1, 4, 6, 5)),
    ),
    "MUL_MAT_SCALED": Case(
        lambda a, b, scale: torch.einsum("nk,tk->tn", a[0, 0], b[0, 0])[None, None] * scale,
        ((1, 1, 3, 5), (1, 1, 6, 5), (1, 1, 1, 1)),
    ),
    "NORM": Case(
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 0.125).sqrt(),
        params={0: 0.125},
    ),
    "PAD": Case(
        lambda x: torch.cat([x.new_zeros(1, 2, 1, 4), x], 2),
        params={2: 1},
    ),
    "PERMUTE": Case(lambda x: torch.einsum("abcd->acbd", x), params={0: 0, 1: 2, 2: 1, 3: 3}),
    "REPEAT": Case(lambda x: torch.cat([x, x], 2), shape=(1, 2, 6, 4)),
    "RESHAPE": Case(lambda x: x.reshape(1, 1, 2, 12), shape=(1, 1, 2, 12)),
    "POOL_2D": Case(
        lambda x: torch.stack([x[:, :, :, :2].amax((2, 3)), x[:, :, :, 2:].amax((2, 3))], -1)[:, :, None],
        ((1, 2, 3, 4),),
        {0: 0, 1: 2, 2: 3, 3: 2, 4: 3},
    ),
    "RMS_NORM": Case(
        lambda x, w: x / ((x * x).mean(-1, keepdim=True) + 0.125).sqrt() * w, ((1, 2, 3, 4), (1, 1, 1, 4)), {0: 0.125}
    ),
    "SCALE": Case(lambda x: x * 2.5 - 0.5, params={0: 2.5, 1: -0.5}),
    "SET": Case(
        lambda a, b: torch.cat([a[..., :1], b, a[..., 3:]], -1),
        ((1, 2, 3, 4), (1, 2, 3, 2)),
        {0: 96, 1: 48, 2: 16, 3: 4},
        shape=(1, 2, 3, 4),
    ),
    "SET_ROWS": Case(
        lambda rows, ids, dst: torch.stack([rows[0, :, 1], dst[0, :, 1], rows[0, :, 0]], 1)[None],
        ((1, 2, 2, 4),),
        inputs=(torch.tensor([[[[2, 0]]]]), torch.arange(24, dtype=torch.float64).reshape(1, 2, 3, 4)),
    ),
    "SIN": Case(lambda x: (torch.exp(1j * x)).imag),
    "SQR": Case(lambda x: x * x),
    "SQRT": Case(lambda x: x**0.5, positive=True),
    "SUB": Case(lambda a, b: a + -1 * b, PAIR),
    "SUM": Case(lambda x: torch.einsum("abcd->", x).reshape(1, 1, 1, 1)),
    "SUM_ROWS": Case(lambda x: torch.einsum("abcd->abc", x)[..., None]),
    "TOP_K": Case(
        lambda x: torch.tensor([[[[0, 2], [1, 2]]]]), (), shape=(1, 1, 2, 2), inputs=(RANK,), has_gradient=False
    ),
    "TRANSPOSE": Case(lambda x: torch.einsum("abcd->abdc", x)),
    "UNARY.ABS": Case(lambda x: (x * x).sqrt()),
    "UNARY.ELU": Case(lambda x: torch.where(x > 0, x, x.exp() - 1)),
    "UNARY.EXP": Case(lambda x: math.e**x),
    "UNARY.EXPM1": Case(lambda x: x.exp() - 1),
    "UNARY.FLOOR": Case(lambda x: x - x.remainder(1), has_gradient=False),
    "UNARY.GELU": Case(gelu_tanh),
    "UNARY.GELU_ERF": Case(lambda x: x * normal_cdf(x)),
    "UNARY.GELU_QUICK": Case(lambda x: x * sigmoid(1.702 * x)),
    "UNARY.HARDSIGMOID": Case(lambda x: ((x + 3) / 6).maximum(torch.tensor(0.0)).minimum(torch.tensor(1.0))),
    "UNARY.HARDSWISH": Case(lambda x: x * ((x + 3) / 6).maximum(torch.tensor(0.0)).minimum(torch.tensor(1.0))),
    "UNARY.NEG": Case(lambda x: 0 - x),
    "UNARY.RELU": Case(lambda x: (x + (x * x).sqrt()) / 2),
    "UNARY.SGN": Case(lambda x: x / (x * x).sqrt(), has_gradient=False),
    "UNARY.SIGMOID": Case(sigmoid),
    "UNARY.SILU": Case(lambda x: x * sigmoid(x)),
    "UNARY.SOFTPLUS": Case(lambda x: torch.log1p(x.exp())),
    "UNARY.TANH": Case(lambda x: 1 - 2 / ((2 * x).exp() + 1)),
    "UNARY.XIELU": Case(xielu, params={1: 1.25, 2: 0.75, 3: 0.5, 4: -0.125}),
    "VIEW": Case(lambda x: x.reshape(-1)[:8].reshape(1, 1, 2, 4), shape=(1, 1, 2, 4)),
    "WRITE": Case(
        lambda memory, x: torch.cat([x.reshape(-1), memory.reshape(-1)[8:]]).reshape(memory.shape),
        ((1, 2, 3, 4), (1, 1, 2, 4)),
        shape=(1, 1, 2, 4),
    ),
}  # fmt: skip


def test_every_operation_has_a_case() -> None:
    assert set(LOWERINGS) == CASES.keys() | ELSEWHERE


@pytest.mark.parametrize("op", CASES)
def test_equals_its_definition(op: str) -> None:
    case = CASES[op]
    values = case.values()
    found, wanted = lower(GRAPH, case.node(op))(FRAME, *values), case.reference(*values)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [op for op, case in CASES.items() if case.has_gradient])
def test_gradient_equals_finite_differences(op: str) -> None:
    case = CASES[op]
    values = [x.requires_grad_(x.dtype == torch.float64) for x in case.values()]
    kernel = lower(GRAPH, case.node(op))
    assert torch.autograd.gradcheck(lambda *inputs: kernel(FRAME, *inputs), values)


@pytest.mark.parametrize("op", ["GLU.SWIGLU", "GLU.GEGLU"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_one_tensor_holds_gate_and_up_in_its_halves(op: str, is_swapped: bool) -> None:
    case = Case(CASES[op].reference, params={1: int(is_swapped)})
    (x,) = case.values()
    first, second = x[..., :2], x[..., 2:]
    wanted = case.reference(second, first) if is_swapped else case.reference(first, second)
    torch.testing.assert_close(lower(GRAPH, case.node(op))(FRAME, x), wanted)


def test_float32_takes_the_projects_own_operations_with_the_same_result() -> None:
    for op in ("GLU.SWIGLU", "RMS_NORM"):
        case = CASES[op]
        kernel = lower(GRAPH, case.node(op))
        values = case.values()
        found = kernel(FRAME, *(x.float() for x in values))
        torch.testing.assert_close(found.double(), kernel(FRAME, *values), rtol=1e-5, atol=1e-6)


def test_an_operation_that_is_not_known_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"holds CONV_2D \('node'\)"):
        lower(GRAPH, CASES["ADD"].node("CONV_2D"))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((1, 1, 5, 12), (60, 60, 12, 1), 0),
        ((1, 5, 2, 3), (60, 12, 3, 1), 6),
        ((1, 1, 5, 4), (60, 60, 12, 1), 8),
        ((1, 1, 5, 1), (60, 60, 12, 1), 7),
        ((1, 1, 3, 5), (60, 60, 1, 12), 2),
        ((1, 1, 3, 4), (60, 60, 12, 3), 14),
        ((1, 1, 1, 7), (60, 60, 60, 1), 50),
        # Overlapping windows, and rows that are repeated: no box.
        ((1, 1, 4, 5), (60, 60, 2, 1), 3),
        ((1, 1, 4, 0), (60, 60, 2, 1), 3),
        ((1, 1, 4, 5), (60, 60, 0, 1), 10),
        ((1, 1, 2, 5), (60, 60, 7, 1), 3),
    ],
    ids=str,
)
def test_views_read_what_their_strides_address(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    memory = torch.randn(1, 1, 5, 12, dtype=torch.float64, requires_grad=True)
    found, wanted = read_view(memory, shape, strides, offset), memory.as_strided(shape, strides, offset)
    assert torch.equal(found, wanted)
    dy = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(found, memory, dy), torch.autograd.grad(wanted, memory, dy))


def test_a_copy_between_numbers_and_whole_numbers_changes_the_kind() -> None:
    x = torch.tensor([[[[1.0, 2.0]]]])
    node = Node("node", "CPY", "node", "i32", (1, 1, 2, 1), (8, 8, 4, 4), (0,) * 16, (0, None), None, 0)
    ids = lower(GRAPH, node)(FRAME, x, None)
    assert ids.dtype == torch.int32 and ids.shape == (1, 1, 2, 1) and ids.flatten().tolist() == [1, 2]
    node = Node("node", "CPY", "node", "f32", (1, 1, 1, 2), (8, 8, 8, 4), (0,) * 16, (0, None), None, 0)
    assert lower(GRAPH, node)(FRAME, ids, None).dtype == torch.float32
