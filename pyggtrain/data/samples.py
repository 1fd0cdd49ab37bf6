"""What a row means, whatever its format: a conversation, a prompt with its completion, a document, or a preference."""

from dataclasses import dataclass
from typing import Any, TypeAlias


class BadRowError(Exception):
    """One row cannot be used. The text says what was found and what is needed, without naming the row."""


@dataclass(frozen=True)
class Conversation:
    """Messages for the model's chat template.

    Attributes:
        messages: dicts as the template sees them; `role` is one of `ROLES`, `content` text, a list of text parts, or
            None beside `tool_calls`. The last one is the assistant's.
        learnt: for each message, whether its text is to be learnt; true for assistant messages only.
        tools: tool descriptions in OpenAI's form, or None.
        notes: what was read otherwise than written, for the report: `role 'gpt' read as 'assistant'`.
    """

    messages: list[dict[str, Any]]
    learnt: tuple[bool, ...]
    tools: list[Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromptCompletion:
    """Plain text that is given, and plain text that the model learns to write after it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Plain text that is learnt as a whole."""

    text: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, of which the first is better; in both only the answer is learnt."""

    chosen: Conversation | PromptCompletion
    rejected: Conversation | PromptCompletion


Sample: TypeAlias = Conversation | PromptCompletion | Document | Preference


def text_of(value: dict[str, Any], key: str) -> str:
    """The text under `key` of a row.

    Raises:
        BadRowError: it is missing or no text.
    """
    text = value.get(key)
    if not isinstance(text, str):
        found = "missing" if key not in value else f"of type {type(text).__name__}"
        raise BadRowError(f"'{key}' is {found}; it must be text")
    return text
