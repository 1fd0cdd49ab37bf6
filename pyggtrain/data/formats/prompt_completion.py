"""Prompt and completion: `{"prompt": "...", "completion": "..."}`, plain text without a chat template; only the
completion is learnt."""

from typing import Any

from pyggtrain.data.samples import BadRowError, PromptCompletion, text_of

KEYS = ("prompt", "completion")
OPTIONAL_KEYS = ()


def parse(value: dict[str, Any]) -> PromptCompletion:
    """Read one row.

    Raises:
        BadRowError: a text is missing or the completion is empty.
    """
    if isinstance(value["prompt"], list) or isinstance(value["completion"], list):
        raise BadRowError(
            "'prompt' and 'completion' hold lists of messages; join the two into one list under 'messages'"
        )
    prompt, completion = text_of(value, "prompt"), text_of(value, "completion")
    if not completion:
        raise BadRowError("'completion' is empty; training on it teaches the model to end at once")
    return PromptCompletion(prompt, completion)
