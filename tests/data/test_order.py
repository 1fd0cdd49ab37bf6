import pytest

from pyggtrain.data.order import epoch_order


@pytest.mark.parametrize("num_examples", [1, 2, 100])
def test_each_epoch_sees_every_example_once(num_examples: int) -> None:
    for epoch in range(3):
        assert sorted(epoch_order(num_examples, seed=0, epoch=epoch)) == list(range(num_examples))


def test_order_depends_on_seed_and_epoch_only() -> None:
    """Written out: a checkpoint of one machine and Python version goes on in the same order on another."""
    assert epoch_order(8, seed=0, epoch=0) == (3, 5, 7, 1, 2, 0, 4, 6)
    assert epoch_order(8, seed=0, epoch=1) == (5, 7, 0, 1, 6, 4, 3, 2)
    assert epoch_order(8, seed=7, epoch=0) == (1, 5, 7, 3, 0, 6, 4, 2)
