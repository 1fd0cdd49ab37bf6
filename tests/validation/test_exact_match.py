from collections.abc import Sequence
from typing import Any

import pytest

from pyggtrain.gguf import Tokenizer
from pyggtrain.validation.exact_match import Answer, count_exact_matches
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings


class Scripted:
    """A runtime whose answers are given: {scale: ids}."""

    def __init__(self, answers: dict[float | None, list[int]]) -> None:
        self._answers = answers

    def generate(self, tokens: Sequence[int], max_new_tokens: int, *, scale: float | None = None) -> list[int]:
        return self._answers[scale][:max_new_tokens]


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def ids(text: str) -> list[int]:
    return list(map(ord, text))


@pytest.mark.parametrize(
    ("written", "matches"),
    [("Enough.", 1), (" Enough.\n", 1), ("Enough", 0), ("enough.", 0), ("Enough. And more", 0), ("", 0)],
)
def test_only_the_whole_answer_counts(written: str, matches: int) -> None:
    runtime: Any = Scripted({None: ids("Hi"), 1.0: ids(written)})
    found = count_exact_matches(runtime, [[1]], ["Enough."], decode=decode, max_new_tokens=99)
    assert (found.num_prompts, found.num_without_adapter, found.num_with_adapter) == (1, 0, matches)


def test_right_words_without_an_end_are_no_match() -> None:
    runtime: Any = Scripted({None: ids("Enough."), 1.0: ids("Enough." + "x" * 9)})
    found = count_exact_matches(runtime, [[1]], ["Enough."], decode=decode, max_new_tokens=7)
    assert (found.num_without_adapter, found.num_with_adapter) == (0, 0)
    assert found.answers[0].with_adapter == Answer("Enough.", ended=False)


def test_every_prompt_needs_an_answer() -> None:
    runtime: Any = Scripted({None: [], 1.0: []})
    with pytest.raises(ValueError, match="shorter"):
        count_exact_matches(runtime, [[1], [2]], ["a"], decode=decode, max_new_tokens=7)


@pytest.mark.slow
def test_taught_answers_come_back_from_llama_cpp_word_for_word(taught: Any) -> None:
    tokenizer = Tokenizer.from_gguf(taught.base)
    runtime = BridgeRuntime(taught.base, RuntimeSettings(num_ctx=128, num_ubatch=128, kv_type="F16"))
    runtime.load_adapter(taught.adapter)
    found = count_exact_matches(
        runtime,
        [lesson.prompt for lesson in taught.lessons],
        [lesson.answer for lesson in taught.lessons],
        decode=tokenizer.decode,
        max_new_tokens=40,
    )
    runtime.close()
    assert (found.num_prompts, found.num_without_adapter, found.num_with_adapter) == (4, 0, 4)
