import pytest

from pyggtrain.errors import DataError
from pyggtrain.validation.evidence import select_excerpts, spread_positions


def document(num_tokens: int, num_learnt: int) -> tuple[list[int], list[int]]:
    ids = list(range(100, 100 + num_tokens))
    return ids, [-100] * (num_tokens - num_learnt) + ids[num_tokens - num_learnt :]


def test_whole_documents_are_chosen_in_order_while_they_fit() -> None:
    documents = [document(10, 4), document(30, 4), document(8, 2), document(3, 1)]
    excerpts, notes = select_excerpts(documents, max_tokens=20)
    assert [len(excerpt.tokens) for excerpt in excerpts] == [10, 8]
    assert notes == ["2 of 4 documents were compared, 20 tokens at most."]


def test_nothing_left_out_is_nothing_to_say() -> None:
    assert select_excerpts([document(10, 4)], max_tokens=20)[1] == []


def test_a_document_that_is_too_long_is_cut_and_said_so() -> None:
    excerpts, notes = select_excerpts([document(1, 1), document(50, 10)], max_tokens=20)
    assert [len(excerpt.tokens) for excerpt in excerpts] == [20]
    assert notes == [
        "No document has 20 tokens or less; the first one was cut from 50.",
        "1 of 2 documents were compared, 20 tokens at most.",
    ]


def test_each_row_is_scored_on_the_next_token() -> None:
    (excerpt,), _ = select_excerpts([document(6, 2)], max_tokens=20)
    assert excerpt.positions == [0, 1, 2, 3, 4, 5]
    assert excerpt.targets_P.tolist() == [-100, -100, -100, 104, 105, -100]


def test_few_positions_are_spread_over_the_supervised_ones() -> None:
    excerpts, _ = select_excerpts([document(20, 12), document(10, 2), document(9, 9)], max_tokens=50)
    first, second = spread_positions(excerpts[:2], 8)
    assert first.positions == [7, 10, 13, 16]
    assert first.targets_P.tolist() == [108, 111, 114, 117]
    assert second.positions == [7, 8]
    assert [excerpt.positions for excerpt in spread_positions(excerpts, 2)] == [[7], [7]]


def test_without_supervised_tokens_positions_are_spread_over_the_text() -> None:
    excerpts, _ = select_excerpts([document(9, 0)], max_tokens=50)
    (thinned,) = spread_positions(excerpts, 3)
    assert thinned.positions == [0, 3, 6]
    assert thinned.targets_P.tolist() == [-100, -100, -100]


def test_text_without_anything_to_compare_is_refused() -> None:
    with pytest.raises(DataError, match="Of 2 held-out documents none has two tokens"):
        select_excerpts([document(1, 1), ([], [])], max_tokens=20)
