"""OpenAI chat: `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`.

Also read: `tools` beside the messages (a list, or its JSON as text), `tool_calls` in assistant messages, content as a
list of text parts, OpenAI's `"weight": 0` on an assistant message that is context only, and the model's reasoning under
`reasoning_content` (also called `thinking` or `reasoning`). Other keys of a message reach the chat template unchanged
(`name`, `tool_call_id`); one that is null counts as not given.
"""

import json
from difflib import get_close_matches
from typing import Any

from pyggtrain.data.samples import BadRowError, Conversation

KEYS = ("messages",)
OPTIONAL_KEYS = ("tools",)

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def parse(value: dict[str, Any]) -> Conversation:
    """Read one row.

    Raises:
        BadRowError: no messages, a message without role or content, an unknown role, an image, an empty answer, or a
            last turn that is not the assistant's.
    """
    return conversation(value["messages"], tools=tools_of(value))


def tools_of(value: dict[str, Any]) -> list[Any] | None:
    """The descriptions of tools in a row, or None; raises BadRowError if they are no list."""
    tools = value.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRowError(f"'tools' is a text, but no valid JSON: {error}") from error
    if tools and not isinstance(tools, list):
        raise BadRowError(f"'tools' is of type {type(tools).__name__}; it must be a list")
    return tools or None


def conversation(messages: Any, *, tools: list[Any] | None = None) -> Conversation:
    """Check messages and bring their roles to the names that templates know; raises BadRowError as `parse` does."""
    if not isinstance(messages, list) or not messages:
        found = "empty" if messages == [] else f"of type {type(messages).__name__}"
        raise BadRowError(
            f"the list of messages is {found}; it needs at least one turn of the user and one of the assistant"
        )
    notes: list[str] = []
    read: list[dict[str, Any]] = []
    learnt: list[bool] = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRowError(f"message {number} is of type {type(message).__name__}; it must be an object")
        role = _role(message, number, notes)
        is_answer = role == "assistant"
        _check_content(message, number, is_answer)
        weight = 1 if message.get("weight") is None else message["weight"]
        if weight not in (0, 1):
            raise BadRowError(f"message {number} has weight {weight!r}; it must be 0 (context only) or 1")
        given = {key: part for key, part in message.items() if key == "content" or part is not None}
        given.pop("weight", None)
        read.append(_with_reasoning(given, number) | {"role": role})
        learnt.append(is_answer and weight == 1)
    if read[-1]["role"] != "assistant":
        last = read[-1]["role"]
        raise BadRowError(
            f"the last turn is by the {last}; it must be the assistant's, since nothing is learnt after it"
        )
    if not any(learnt):
        raise BadRowError("every assistant message has weight 0; at least one must be learnt")
    return Conversation(read, tuple(learnt), tools, tuple(notes))


def _role(message: dict[str, Any], number: int, notes: list[str]) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRowError(f"message {number} has no role; it must be one of {', '.join(ROLES)}")
    if role in ROLES:
        return role
    if known := ROLE_ALIASES.get(role.lower(), role.lower() if role.lower() in ROLES else None):
        notes.append(f"role '{role}' read as '{known}'")
        return known
    near = get_close_matches(role.lower(), ROLES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise BadRowError(f"message {number} has the unknown role {role!r}{hint}; known: {', '.join(ROLES)}")


def _with_reasoning(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message with its reasoning under the one name that llama-server knows."""
    for name in REASONING_KEYS:
        text = message.get(name)
        if text is not None and not isinstance(text, str):
            raise BadRowError(f"message {number} has '{name}' of type {type(text).__name__}; it must be text")
        if text:
            return {key: part for key, part in message.items() if key not in REASONING_KEYS} | {
                "reasoning_content": text
            }
    return {key: part for key, part in message.items() if key not in REASONING_KEYS}


def _check_content(message: dict[str, Any], number: int, is_answer: bool) -> None:
    content = message.get("content")
    if isinstance(content, list):
        text = "".join(_part_text(part, number) for part in content)
    elif isinstance(content, str):
        text = content
    elif content is None and is_answer and message.get("tool_calls"):
        return
    else:
        found = "no content" if content is None else f"content of type {type(content).__name__}"
        raise BadRowError(f"message {number} has {found}; it must be text")
    if is_answer and not text.strip() and not message.get("tool_calls"):
        raise BadRowError(
            f"message {number} is an empty assistant turn; training on it teaches the model to end at once"
        )


def _part_text(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in ("image", "image_url", "input_image", "audio", "input_audio", "video", "file"):
        raise BadRowError(
            f"message {number} has a part of type {kind!r}; pyggtrain trains on text only. Leave out such rows"
        )
    if kind != "text":
        raise BadRowError(f"message {number} has a part of type {kind!r}; only text can be trained on")
    if not isinstance(part.get("text"), str):
        raise BadRowError(f"message {number} has a text part without text")
    return str(part["text"])
