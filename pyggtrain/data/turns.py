"""Where the assistant's turns lie in a rendered conversation.

Nothing is searched for in the text. A turn begins behind the prompt that llama-server would send for it (the messages
before it, with generation prompt), proven to be the beginning of the whole rendering. Where its text ends is found by
rendering again with that message replaced by a character that occurs nowhere: what stays equal at the end is not of
this message. A template that writes earlier turns differently once later ones follow (Qwen3 drops their <think> text)
can make the prompt no beginning of the whole; then the turn begins where the rendering first depends on the message,
and the caller is told. For plain conversations all this is found once for each sequence of roles (`data.skeleton`).
"""

import json
from dataclasses import dataclass
from typing import Any

from pyggtrain.data.chat_template import RESERVED_CHARS, ChatTemplate, content_text
from pyggtrain.data.samples import BadRowError, Conversation
from pyggtrain.data.skeleton import Skeleton

_MARK = RESERVED_CHARS[-1]


@dataclass(frozen=True)
class Turn:
    """One assistant turn, as places in the rendered text, in characters.

    Attributes:
        start: where the text that the model writes begins.
        end: behind the last character that depends on the message.
        limit: how far its end-of-turn token may lie; not beyond `end` where the template itself marked what is
            generated.
        follows_prompt: whether the text before `start` is what llama-server sends to have this turn written.
        is_whole: whether all of the message's text is in the rendering.
    """

    start: int
    end: int
    limit: int
    follows_prompt: bool
    is_whole: bool


def render_turns(template: ChatTemplate, chat: Conversation) -> tuple[str, list[Turn], list[str]]:
    """Render a conversation and find the turns that are to be learnt.

    Returns:
        the text, its turns in order, and the roles of messages whose text the template left out (of an assistant's: all
        of it).

    Raises:
        BadRowError: the template refuses the messages.
    """
    whole = template.render(chat.messages, tools=chat.tools)
    text = whole.text
    skeleton = None if chat.tools else template.skeletons.of(chat.messages)
    if skeleton is not None:
        contents = [message["content"] for message in chat.messages]
        is_reserved = any(char in content or char in text for char in RESERVED_CHARS for content in contents)
        places = None if is_reserved else skeleton.places(contents, text)
        if places is not None:
            return text, _turns_at(places, skeleton, chat, text), []
    given = json.dumps([chat.messages, chat.tools], ensure_ascii=False)
    if any(char in given or char in text for char in RESERVED_CHARS):
        raise BadRowError(
            "the text holds one of the noncharacters U+FDD0 to U+FDD2, which Unicode reserves for internal use"
        )
    answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    lost = [
        message["role"]
        for message in chat.messages
        if message["role"] != "assistant" and not _is_in(content_text(message), text)
    ]
    if whole.generated and len(whole.generated) != len(answers):
        raise BadRowError(
            f"{template.name} marks {len(whole.generated)} passages as generated for {len(answers)} assistant turns"
        )
    marked = dict(zip(answers, whole.generated, strict=bool(whole.generated)))
    turns: list[Turn] = []
    for index in answers:
        if not chat.learnt[index]:
            continue
        turn = _find_turn(template, chat, index, text, marked.get(index))
        # Of a tool call that the template has no words for, only the end of the turn is left.
        if turn is None or not text[turn.start : turn.end].strip():
            lost.append("assistant")
        else:
            turns.append(turn)
    return text, turns, lost


def _turns_at(places: list[tuple[int, int]], skeleton: Skeleton, chat: Conversation, text: str) -> list[Turn]:
    """The turns to learn, from the places of all messages."""
    turns = []
    for index, before_message in skeleton.prompt_chars.items():
        if chat.learnt[index]:
            message_start, end = places[index]
            start = message_start - len(skeleton.parts[index]) + before_message
            limit = places[index + 1][0] if index + 1 < len(places) else len(text)
            turns.append(Turn(start, end, limit, True, _is_whole(chat.messages[index], text[start:end])))
    return turns


def _find_turn(
    template: ChatTemplate, chat: Conversation, index: int, text: str, marked: tuple[int, int] | None
) -> Turn | None:
    """Message `index` in the rendered text; None if the template writes nothing of it."""
    prompt = _prompt(template, chat, index)
    if marked is not None:
        start, end = marked
        limit = end
        follows_prompt = prompt == text[:start]
    else:
        extent = _extent(template, chat, index, text)
        if extent is None:
            return None
        start, end, limit = extent
        follows_prompt = prompt is not None and len(prompt) <= end and text.startswith(prompt)
        start = len(prompt) if follows_prompt and prompt else _written_start(chat.messages[index], text, start, end)
    return Turn(start, end, limit, follows_prompt, _is_whole(chat.messages[index], text[start:end]))


def _prompt(template: ChatTemplate, chat: Conversation, index: int) -> str | None:
    """What llama-server sends to have message `index` written, or None where the template refuses to."""
    try:
        return template.render(chat.messages[:index], tools=chat.tools, add_generation_prompt=True).text
    except BadRowError:
        return None


def _extent(template: ChatTemplate, chat: Conversation, index: int, text: str) -> tuple[int, int, int] | None:
    """Where the rendering depends on message `index` (start, end), and from where on it may depend on the next one.

    None if the template writes nothing of the message.
    """
    changed = _render_with_mark(template, chat, index, {"role": "assistant"})
    if _MARK not in changed:
        return None
    start, end = _common_start(text, changed), len(text) - _common_end(text, changed)
    if index + 1 == len(chat.messages):
        return start, end, len(text)
    following = _render_with_mark(template, chat, index + 1, chat.messages[index + 1])
    return start, end, max(end, _common_start(text, following))


def _render_with_mark(template: ChatTemplate, chat: Conversation, index: int, message: dict[str, Any]) -> str:
    messages = list(chat.messages)
    messages[index] = {**message, "content": _MARK}
    return template.render(messages, tools=chat.tools).text


def _written_start(message: dict[str, Any], text: str, first: int, end: int) -> int:
    """Begin of a turn without proven prompt: `first`, where the rendering depends on the message, is late if the
    message begins with what the template writes before it in any case (<think>)."""
    content = content_text(message).strip()
    return min(first, end - len(content)) if text.endswith(content, 0, end) else first


def _is_whole(message: dict[str, Any], written: str) -> bool:
    parts = [
        content_text(message),
        *(message[key] for key in ("reasoning_content",) if isinstance(message.get(key), str)),
    ]
    parts += [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return all(_is_in(part, written) for part in parts)


def _is_in(part: str, text: str) -> bool:
    """Whether `part` stands in the text; templates may change the blanks."""
    return part.strip() in text or "".join(part.split()) in "".join(text.split())


def _common_start(a: str, b: str) -> int:
    """Length of the longest common beginning, by bisection: comparing slices is much faster than characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(a: str, b: str) -> int:
    """Length of the longest common ending."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]:
            low = middle
        else:
            high = middle - 1
    return low
