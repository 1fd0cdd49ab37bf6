"""ShareGPT: `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}`."""

from typing import Any

from pyggtrain.data.formats import messages
from pyggtrain.data.samples import BadRowError, Conversation

KEYS = ("conversations",)
OPTIONAL_KEYS = ("system",)


def parse(value: dict[str, Any]) -> Conversation:
    """Read one row; a text under `system` becomes the first message. Raises BadRowError as `messages.parse` does."""
    turns = value["conversations"]
    if not isinstance(turns, list):
        raise BadRowError(f"'conversations' is of type {type(turns).__name__}; it must be a list")
    chat: list[Any] = [
        {"role": turn.get("from"), "content": turn.get("value")} if isinstance(turn, dict) and "from" in turn else turn
        for turn in turns
    ]
    if system := value.get("system"):
        chat.insert(0, {"role": "system", "content": system})
    return messages.conversation(chat)
