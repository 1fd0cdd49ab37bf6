import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggtrain.data.order import epoch_order
from pyggtrain.data.packing import MicroBatches, best_fit


def realistic_lengths(num_rows: int, longest: int = 2048, seed: int = 0) -> list[int]:
    """Log-normal, as chat data are: many short rows, few long ones."""
    rng = random.Random(seed)
    return [min(longest, max(4, round(rng.lognormvariate(5.3, 0.9)))) for _ in range(num_rows)]


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(64, 100), st.randoms(use_true_random=False))
def test_every_row_is_in_one_pack_and_no_pack_is_too_full(
    lengths: list[int], capacity: int, rng: random.Random
) -> None:
    order = rng.sample(range(len(lengths)), len(lengths))
    packs = best_fit(lengths, order, capacity)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in pack) <= capacity for pack in packs)
    # The order decides between equals only.
    assert len(packs) == len(best_fit(lengths, sorted(order), capacity))


def test_each_row_goes_into_the_fullest_pack_with_room() -> None:
    assert best_fit([6, 5, 4, 3, 2], range(5), 10) == [[0, 2], [1, 3, 4]]
    # First fit would put the 1 beside the 7.
    assert best_fit([7, 5, 4, 1], range(4), 10) == [[0], [1, 2, 3]]
    assert best_fit([10, 10], [1, 0], 10) == [[1], [0]]


def test_realistic_lengths_fill_the_packs() -> None:
    lengths = realistic_lengths(2000)
    batches = MicroBatches(lengths, seed=1, micro_batch_size=1, accumulation_steps=1, capacity=2048)
    assert batches.fill > 0.99
    assert 2000 < sum(lengths[row] for row in batches.largest(1)) <= 2048


@pytest.mark.parametrize("capacity", [None, 2048], ids=["rows", "packs"])
def test_an_epoch_takes_each_row_once_and_the_next_one_in_another_order(capacity: int | None) -> None:
    lengths = realistic_lengths(301)
    batches = MicroBatches(lengths, seed=7, micro_batch_size=2, accumulation_steps=3, capacity=capacity)
    epochs = []
    for epoch in range(2):
        first = epoch * batches.steps_per_epoch
        steps = [batches.of_step(first + step) for step in range(batches.steps_per_epoch)]
        assert all(len(step) == 3 for step in steps[:-1])
        epochs.append([row for step in steps for micro_batch in step for row in micro_batch])
        assert sorted(epochs[-1]) == list(range(301))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("capacity", [None, 256], ids=["rows", "packs"])
def test_a_step_is_a_function_of_seed_and_number(capacity: int | None) -> None:
    """So a resumed run, which asks for later steps first, takes the same rows."""
    lengths = realistic_lengths(100, longest=256)

    def batches(seed: int) -> MicroBatches:
        return MicroBatches(lengths, seed=seed, micro_batch_size=1, accumulation_steps=4, capacity=capacity)

    forwards = [batches(3).of_step(step) for step in range(60)]
    fresh, other = batches(3), batches(4)
    assert [fresh.of_step(step) for step in reversed(range(60))][::-1] == forwards
    assert [other.of_step(step) for step in range(60)] != forwards


def test_unpacked_micro_batches_are_the_epoch_s_order_cut_into_equal_parts() -> None:
    batches = MicroBatches([5] * 10, seed=2, micro_batch_size=2, accumulation_steps=2)
    assert (batches.num_units, batches.steps_per_epoch, batches.fill) == (10, 3, 1.0)
    assert len(batches.largest(3)) == 3
    order = list(epoch_order(10, 2, 0))
    assert batches.of_step(0) == [order[0:2], order[2:4]]
    assert batches.of_step(2) == [order[8:10]]
