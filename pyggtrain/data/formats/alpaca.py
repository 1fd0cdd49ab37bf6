"""Alpaca: `{"instruction": "...", "input": "...", "output": "..."}`, read as one turn of the user and one of the
assistant.

The words "Below is an instruction ..." of the original data set are not added: the model's own chat template frames the
turns.
"""

from typing import Any

from pyggtrain.data.formats import messages
from pyggtrain.data.samples import Conversation, text_of

KEYS = ("instruction", "output")
OPTIONAL_KEYS = ("input", "system")


def parse(value: dict[str, Any]) -> Conversation:
    """Read one row; `input`, where not empty, follows the instruction after a blank line. Raises BadRowError as
    `messages.parse`."""
    request = text_of(value, "instruction")
    if value.get("input"):
        request += "\n\n" + text_of(value, "input")
    chat = [{"role": "user", "content": request}, {"role": "assistant", "content": text_of(value, "output")}]
    if value.get("system"):
        chat.insert(0, {"role": "system", "content": text_of(value, "system")})
    return messages.conversation(chat)
