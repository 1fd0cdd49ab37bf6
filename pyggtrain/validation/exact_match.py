"""How many prompts llama.cpp answers word for word as the training data does, with and without the adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyggtrain.validation.runtime import Runtime


@dataclass(frozen=True)
class Answer:
    """What llama.cpp wrote, without surrounding white space, and whether it ended by itself or was cut at the limit."""

    text: str
    ended: bool


@dataclass(frozen=True)
class Answered:
    """One prompt: the wanted answer and llama.cpp's greedy ones, without and with the adapter."""

    wanted: str
    without_adapter: Answer
    with_adapter: Answer


@dataclass(frozen=True)
class ExactMatches:
    """Greedy answers to all prompts.

    Attributes:
        answers: One entry per prompt, in order.
    """

    answers: tuple[Answered, ...]

    @property
    def num_prompts(self) -> int:
        return len(self.answers)

    @property
    def num_with_adapter(self) -> int:
        """Prompts whose answer with the adapter equals the wanted one and ends there."""
        return sum(answer.with_adapter == Answer(answer.wanted, ended=True) for answer in self.answers)

    @property
    def num_without_adapter(self) -> int:
        """Prompts that the base model alone already answers so."""
        return sum(answer.without_adapter == Answer(answer.wanted, ended=True) for answer in self.answers)


def count_exact_matches(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[str],
    *,
    decode: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    scale: float = 1.0,
) -> ExactMatches:
    """Let llama.cpp answer each prompt greedily, once without and once with the adapter, and compare the text.

    White space around an answer does not count: templates add and strip it. An answer that does not end by itself
    within `max_new_tokens` is no match even if its words are right: the served model would talk on.

    Args:
        runtime: Holds the base model and the adapter.
        prompts: Token ids of each rendered prompt, ending where the assistant's answer begins.
        wanted: Text of each answer.
        decode: Token ids to text, control tokens left out (`Tokenizer.decode`).
        max_new_tokens: Limit of an answer; it must be longer than the longest wanted one, in tokens.
        scale: llama.cpp's scale of the adapter.
    """

    def answer(prompt: Sequence[int], scale: float | None) -> Answer:
        ids = runtime.generate(prompt, max_new_tokens, scale=scale)
        return Answer(decode(ids).strip(), ended=len(ids) < max_new_tokens)

    return ExactMatches(
        tuple(
            Answered(wanted=text.strip(), without_adapter=answer(prompt, None), with_adapter=answer(prompt, scale))
            for prompt, text in zip(prompts, wanted, strict=True)
        )
    )
