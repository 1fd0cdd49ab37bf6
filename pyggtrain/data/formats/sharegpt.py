"""ShareGPT: `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}`.

Tools as LLaMA-Factory writes them are read too: `tools` beside the turns, a turn from `function_call` whose value is
the JSON of a call (`{"name": ..., "arguments": {...}}`) or of several, and its result from `observation`.
"""

import json
from typing import Any

from pyggtrain.data.formats import messages
from pyggtrain.data.samples import BadRowError, Conversation

KEYS = ("conversations",)
OPTIONAL_KEYS = ("system", "tools")


def parse(value: dict[str, Any]) -> Conversation:
    """Read one row; a text under `system` becomes the first message. Raises BadRowError as `messages.parse` does."""
    turns = value["conversations"]
    if not isinstance(turns, list):
        raise BadRowError(f"'conversations' is of type {type(turns).__name__}; it must be a list")
    chat: list[Any] = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if system := value.get("system"):
        chat.insert(0, {"role": "system", "content": system})
    return messages.conversation(chat, tools=messages.tools_of(value))


def _message(turn: Any, number: int) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    others = {key: part for key, part in turn.items() if key not in ("from", "value")}
    if turn["from"] != "function_call":
        return {**others, "role": turn["from"], "content": turn.get("value")}
    try:
        calls = json.loads(turn.get("value") or "")
    except (TypeError, ValueError) as error:
        raise BadRowError(f"turn {number} is a function_call whose value is no JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {
        **others,
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }
