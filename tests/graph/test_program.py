"""Steps in regions: where layers are cut, what lives how long, the residual inside the last product."""

import weakref

import torch

from pyggtrain.gguf import quantize_tensor
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.program import Step, cut_into_layers, dead_after, product_kernel, regions
from pyggtrain.nn import Batch, QuantLinear

FRAME = Frame(Batch.from_documents([([1, 2], [1, 2])]), torch.arange(2))


def add(frame: Frame, *values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values).sum(0)


def step(result: int, *sources: int, weight: str | None = None) -> Step:
    return Step(result, sources, add, () if weight is None else (weight,), f"node {result}")


# A scaled embedding, two blocks of "norm, product, residual sum", a norm and a head.
PROGRAM = [
    step(1, 0, weight="token_embd.weight"),
    step(2, 1),
    step(3, 2, weight="blk.0.attn_norm.weight"),
    step(4, 3, weight="blk.0.attn_q.weight"),
    step(5, 4, 2),
    step(6, 5, weight="blk.1.attn_norm.weight"),
    step(7, 6, weight="blk.1.attn_q.weight"),
    step(8, 7, 5),
    step(9, 8, weight="output_norm.weight"),
]
LEAVES = {0: lambda frame: torch.ones(1, 1, 2, 4)}


def test_layers_are_cut_where_one_value_is_alive() -> None:
    cuts = cut_into_layers(PROGRAM)
    assert [PROGRAM[start].result for start in cuts.starts] == [1, 2, 6, 9]
    assert cuts.is_layer == [False, True, True, False]
    parts, _ = regions(PROGRAM, LEAVES, 9)
    assert [(part.inputs, part.outputs) for part in parts] == [((), (1,)), ((1,), (5,)), ((5,), (8,)), ((8,), (9,))]


def test_a_value_that_later_blocks_read_crosses_the_cut() -> None:
    program = [*PROGRAM[:7], step(8, 7, 5, 3), PROGRAM[8]]
    parts, _ = regions(program, LEAVES, 9)
    assert parts[1].outputs == (3, 5)
    assert parts[2].inputs == (5, 3) and parts[2].outputs == (8,)
    assert dead_after(parts, [9]) == [[], [1], [3, 5], [8]]


def test_a_step_with_weights_of_two_blocks_joins_them() -> None:
    both = Step(5, (4, 2), add, ("blk.0.attn_output.weight", "blk.1.attn_norm.weight"), "node 5")
    cuts = cut_into_layers([*PROGRAM[:4], both, *PROGRAM[6:]])
    assert cuts.is_layer == [False, True, False]


def test_a_program_without_blocks_is_one_region() -> None:
    parts, is_layer = regions([step(1, 0), step(2, 1)], LEAVES, 2)
    assert len(parts) == 1 and is_layer == [True]


def test_regions_compute_what_the_steps_say() -> None:
    known: dict[int, torch.Tensor] = {}
    for part in regions(PROGRAM, LEAVES, 9)[0]:
        known[part.outputs[0]] = part(*(known[index] for index in part.inputs), frame=FRAME)
    # 1, doubled by each of the two residual sums.
    assert torch.equal(known[9], torch.full((2, 4), 4.0))


def test_a_value_is_freed_after_its_last_reader() -> None:
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(frame: Frame, x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        y = x + 1
        made.append(weakref.ref(y))
        return y

    chain = [Step(index + 1, (index,), watched, (), "") for index in range(5)]
    (part,), _ = regions(chain, LEAVES, 5)
    part(frame=FRAME)
    assert max(alive) == 1


def test_the_residual_goes_into_the_product_that_ends_a_layer() -> None:
    weight = quantize_tensor("blk.0.ffn_down.weight", torch.randn(4, 4), "F32")
    linear = QuantLinear(weight)
    product = Step(2, (1,), product_kernel(linear), ("blk.0.ffn_down.weight",), "down", linear=linear)
    program = [step(1, 0, weight="blk.0.x"), product, Step(3, (1, 2), add, (), "l_out", is_sum=True)]
    (part,), _ = regions(program, LEAVES, 3)
    assert [step.name for step in part.steps] == ["node 1", "l_out"]
    assert part.steps[-1].sources == (1, 1)
    x = torch.ones(1, 1, 2, 4)
    torch.testing.assert_close(part(frame=FRAME), (x @ weight.blocks.view(torch.float32).T + x)[0, 0])
    # Not where the product is read by others too.
    other = [*program[:2], step(4, 2, weight="blk.0.y"), Step(3, (4, 2), add, (), "l_out", is_sum=True)]
    assert len(regions(other, LEAVES, 3)[0][0].steps) == 4
