"""Preference pairs: `{"prompt": "...", "chosen": "...", "rejected": "..."}`, for losses such as DPO and ORPO.

As in TRL, texts are plain text without a chat template, and lists of messages are conversations. Lists may hold the
answer alone (then `prompt` comes before it) or the whole conversation; then what both begin with is the prompt.
"""

from typing import Any

from pyggtrain.data.formats import messages
from pyggtrain.data.samples import BadRowError, Conversation, Preference, PromptCompletion, text_of

KEYS = ("chosen", "rejected")
OPTIONAL_KEYS = ("prompt", "tools")


def parse(value: dict[str, Any]) -> Preference:
    """Read one row.

    Raises:
        BadRowError: prompt or an answer is missing or empty, both answers are equal, or as in `messages.parse`.
    """
    chosen, rejected = value["chosen"], value["rejected"]
    if isinstance(chosen, dict) and isinstance(rejected, dict):
        chosen, rejected = [chosen], [rejected]
    if chosen == rejected:
        raise BadRowError("'chosen' and 'rejected' are equal, so there is nothing to prefer")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _of_texts(text_of(value, "prompt"), chosen, rejected)
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise BadRowError(
            f"'chosen' is of type {type(chosen).__name__} and 'rejected' of type {type(rejected).__name__}; both must "
            "be texts, or both lists of messages"
        )
    prompt = _prompt(value, chosen, rejected)
    tools = messages.tools_of(value)
    return Preference(*(_answered(prompt, answer, tools) for answer in (chosen, rejected)))


def _of_texts(prompt: str, chosen: str, rejected: str) -> Preference:
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise BadRowError(f"'{name}' is empty; an answer needs a text")
    return Preference(PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected))


def _prompt(value: dict[str, Any], chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """The messages before the answers."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    prompt = value.get("prompt")
    if shared > 0:
        # The lists are whole conversations; a prompt beside them may only repeat how they begin.
        if isinstance(prompt, str) and not any(turn.get("content") == prompt for turn in _dicts(chosen[:shared])):
            raise BadRowError("'prompt' is none of the messages that 'chosen' and 'rejected' begin with")
        if isinstance(prompt, list) and prompt != chosen[: len(prompt)]:
            raise BadRowError("'prompt' differs from the messages that 'chosen' and 'rejected' begin with")
        return chosen[:shared]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt:
        return prompt
    raise BadRowError("there is no prompt: neither 'prompt' nor messages with which both answers begin")


def _answered(prompt: list[Any], answer: list[Any], tools: list[Any] | None) -> Conversation:
    """The conversation with this answer, of which only messages behind the prompt are learnt."""
    is_whole = answer[: len(prompt)] == prompt
    chat = messages.conversation(answer if is_whole else [*prompt, *answer], tools=tools)
    learnt = tuple(is_learnt and index >= len(prompt) for index, is_learnt in enumerate(chat.learnt))
    if not any(learnt):
        raise BadRowError("an answer has no message of the assistant")
    return Conversation(chat.messages, learnt, chat.tools, chat.notes)


def _dicts(turns: list[Any]) -> list[dict[str, Any]]:
    return [turn for turn in turns if isinstance(turn, dict)]
