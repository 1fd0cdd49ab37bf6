from typing import Any

import pytest

from pyggtrain.data import DataSettings, Example, load_examples, load_pairs
from pyggtrain.data.formats import preference
from pyggtrain.data.samples import BadRowError, PromptCompletion
from pyggtrain.errors import DataError
from pyggtrain.gguf import Tokenizer

USER = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}


def text(ids: Any, tokenizer: Tokenizer) -> str:
    return b"".join(tokenizer.piece(token) for token in ids if token >= 0).decode()


def prompt(example: Example) -> list[int]:
    return [token for token, label in zip(example.input_ids, example.labels, strict=True) if label == -100]


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": "q", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": GOOD, "rejected": BAD},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["messages", "text prompt", "one message", "whole conversations", "repeated text", "repeated messages"],
)
def test_all_ways_to_write_a_pair_mean_the_same(row: dict[str, Any], smollm2_tokenizer: Tokenizer) -> None:
    (pair,), report = load_pairs([row], smollm2_tokenizer, DataSettings())
    (chosen,), _ = load_examples([{"messages": [USER, GOOD]}], smollm2_tokenizer, DataSettings())
    assert (pair.chosen.input_ids, pair.chosen.labels) == (chosen.input_ids, chosen.labels)
    assert text(pair.rejected.labels, smollm2_tokenizer) == "bad<|im_end|>"
    assert prompt(pair.chosen)[:-1] == prompt(pair.rejected)[:-1]
    assert report.num_rows == 1
    assert report.num_examples == 2
    assert report.num_learnt == pair.num_learnt
    assert report.warnings == []


def test_texts_are_plain_text_without_a_template(smollm2_tokenizer: Tokenizer) -> None:
    (pair,), _ = load_pairs([{"prompt": "2+2=", "chosen": "4", "rejected": "5"}], smollm2_tokenizer, DataSettings())
    assert text(pair.chosen.input_ids, smollm2_tokenizer) == "2+2=4<|im_end|>"
    assert text(pair.rejected.labels, smollm2_tokenizer) == "5<|im_end|>"
    sample = preference.parse({"prompt": "", "chosen": "a", "rejected": "b"})
    assert sample.chosen == PromptCompletion("", "a")


def test_answers_in_the_prompt_are_not_learnt(smollm2_tokenizer: Tokenizer) -> None:
    before = [USER, {"role": "assistant", "content": "first"}, USER]
    row = {"chosen": [*before, GOOD], "rejected": [*before, BAD, USER, BAD]}
    (pair,), _ = load_pairs([row], smollm2_tokenizer, DataSettings())
    assert text(pair.chosen.labels, smollm2_tokenizer) == "good<|im_end|>"
    assert text(pair.rejected.labels, smollm2_tokenizer) == "bad<|im_end|>bad<|im_end|>"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "'rejected' is empty"),
        ({"chosen": "a", "rejected": "b"}, "'prompt' is missing"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "there is no prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": [BAD]}, "'chosen' is of type str and 'rejected' of type list"),
        ({"prompt": "other", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "none of the messages"),
        ({"prompt": [GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "differs from the messages"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [{"role": "assistant", "content": " "}]}, "empty assistant"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "last turn is by the user"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "last turn is by the user"),
    ],
)
def test_pairs_without_a_choice_are_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRowError, match=words):
        preference.parse(row)


def test_pairs_and_rows_to_imitate_are_not_confused(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"row 1: .*preference pair .* only a preference loss"):
        load_examples([PAIR], smollm2_tokenizer, DataSettings())
    with pytest.raises(DataError, match=r"row 1: .*needs rows with 'chosen' and 'rejected'; this one is messages"):
        load_pairs([{"messages": [USER, GOOD]}], smollm2_tokenizer, DataSettings())


def test_a_pair_is_dropped_or_cut_as_one(smollm2_tokenizer: Tokenizer) -> None:
    long = {"prompt": "q", "chosen": [{"role": "assistant", "content": "word " * 60}], "rejected": [BAD]}
    pairs, report = load_pairs([PAIR, long], smollm2_tokenizer, DataSettings(max_length=40, too_long="drop"))
    assert (len(pairs), report.num_kept, report.num_examples) == (1, 1, 2)
    pairs, report = load_pairs([PAIR, long], smollm2_tokenizer, DataSettings(max_length=40, too_long="truncate"))
    assert [pair.chosen.num_tokens == 40 for pair in pairs] == [False, True]
    assert report.num_truncated == 1


def test_preference_rows_are_told_by_their_keys(smollm2_tokenizer: Tokenizer) -> None:
    _, report = load_pairs([{**PAIR, "score": 1}], smollm2_tokenizer, DataSettings())
    assert report.num_rows_of == {"preference": 1}
    assert any("keys not used by format 'preference': score" in warning for warning in report.warnings)
