"""The model's own chat template, rendered as llama-server renders it.

The variables are those of llama.cpp's `common/chat.cpp` and `common/jinja/caps.cpp` (commit 0c1e57098): besides
messages and tools also `enable_thinking`, `date_string` and others, which llama-cpp-python and transformers leave out.
Messages are brought into the shape that the template reads by the same rules, found here by rendering small probes
where llama.cpp watches its own engine: content as text or as parts, arguments of tool calls as an object or as text,
`developer` as `system`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from pyggtrain.data.samples import BadRowError
from pyggtrain.data.sandbox import GENERATION_END, GENERATION_START, ChatTemplateEnvironment, given, to_json
from pyggtrain.data.skeleton import Skeletons
from pyggtrain.errors import DataError
from pyggtrain.gguf.tokenizer import Tokenizer

_MAX_SOURCE_CHARS = 1 << 20
# Room for what a template writes by itself, and a multiple of what it is given.
_BASE_CHARS, _CHARS_PER_CHAR = 1 << 20, 8
_BASE_STEPS, _STEPS_PER_CHAR = 1 << 20, 64
_PROBE = "\ufdd2"

# Noncharacters of Unicode by which places in a rendering are found; a row that holds one is refused.
RESERVED_CHARS = (GENERATION_START, GENERATION_END, _PROBE)


class _RaisedByTemplateError(Exception):
    """`raise_exception(message)` in a template."""


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation.

    Attributes:
        text: what the template wrote.
        generated: spans of `text` [start, end) in characters that stood in `{% generation %}` blocks, in order.
    """

    text: str
    generated: tuple[tuple[int, int], ...]


class ChatTemplate:
    """One jinja2 chat template with the texts of the model's special tokens. Not for use by several threads.

    Args:
        source: the template.
        bos_token, eos_token: text of these tokens, or empty where the model has none.
        name: what to call the template in messages.
        now: the time that templates with a date write; a resumed run must pass that of its start to get equal tokens.
        variables: further template variables, such as `{"enable_thinking": False}`; llama-server's
            `--chat-template-kwargs`.
        for_tools: what renders conversations with tools instead: a model's template named `tool_use`, as in
            llama-server.

    Attributes:
        identity: equal for two templates that write the same for the same messages.
        tree: the parsed source.

    Raises:
        DataError: the template is not valid jinja2, or too large.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        name: str = "the chat template",
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
        for_tools: "ChatTemplate | None" = None,
    ) -> None:
        if len(source) > _MAX_SOURCE_CHARS:
            raise DataError(
                f"{name} has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are read. Give another one."
            )
        self.source, self.name, self.for_tools = source, name, for_tools
        self.now = now or datetime.now()
        self._environment = ChatTemplateEnvironment()
        try:
            self.tree = self._environment.parse(source)
            undeclared = meta.find_undeclared_variables(self.tree)
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{name} is not valid jinja2: line {error.lineno}: {error.message}. Give another one."
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise DataError(f"{name} cannot be compiled ({type(error).__name__}). Give another one.") from error
        self.uses_date = not undeclared.isdisjoint(("strftime_now", "date_string", "datetime"))
        self.identity: str = json.dumps(
            [
                source,
                bos_token,
                eos_token,
                dict(variables or {}),
                self.now.isoformat() if self.uses_date else None,
                for_tools.identity if for_tools is not None else None,
            ],
            sort_keys=True,
        )
        self._variables: dict[str, Any] = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            # llama-server's defaults: think, and keep the reasoning of earlier turns where a template lets one choose.
            "enable_thinking": True,
            "preserve_thinking": True,
            "clear_thinking": False,
            "truncate_history_thinking": False,
            "drop_thinking": False,
            "date_string": self.now.strftime("%d %b %Y"),
            "datetime": self.now.strftime("%b %d %Y"),
            "strftime_now": self.now.strftime,
            "raise_exception": _raise_exception,
            **(variables or {}),
        }

    @classmethod
    def of_model(
        cls,
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        variant: str | None = None,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> "ChatTemplate":
        """The template of a model's file, one of its further templates by name, or another `source` with that model's
        special tokens.

        Like llama-server, conversations with tools take the file's template named `tool_use`, if it has one and no
        other template is asked for.

        Raises:
            DataError: the file has no template and none is given, or it is not valid.
        """
        further = tokenizer.chat_templates
        for_tools = None
        if source is None and variant is None and "tool_use" in further:
            for_tools = cls.of_model(tokenizer, variant="tool_use", now=now, variables=variables)
        name = "the chat template"
        if source is None and variant is not None:
            if variant not in further:
                names = ", ".join(further) or "none"
                raise DataError(f"The model file has no chat template named {variant!r}; it has: {names}.")
            source, name = further[variant], f"the model's chat template '{variant}'"
        elif source is None:
            # llama-server too falls back to the one for tools.
            source, name = tokenizer.chat_template or further.get("tool_use"), "the model's chat template"
        if source is None:
            raise DataError(
                "The model file has no tokenizer.chat_template, which conversations need. It is probably a base model: "
                "give a chat template, or write the rows as 'prompt' and 'completion' or as 'text'."
            )
        return cls(
            source,
            bos_token=token_text(tokenizer, tokenizer.bos_id),
            eos_token=token_text(tokenizer, tokenizer.eos_id),
            name=name,
            now=now,
            variables=variables,
            for_tools=for_tools,
        )

    def render(
        self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> Rendering:
        """Write a conversation as text.

        Raises:
            BadRowError: the template refuses the messages or fails; holds the template's own message, and the number
                and role of the first message with which it does.
        """
        try:
            return self._write([self._shaped(message) for message in messages], tools, add_generation_prompt)
        except BadRowError as error:
            raise BadRowError(f"{self.name} refuses {self._culprit(messages, tools)}: {error}") from error

    def _culprit(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        number = 0
        for number, message in enumerate(messages, start=1):
            try:
                self._write([self._shaped(message) for message in messages[:number]], tools, False)
            except BadRowError:
                return f"message {number} (role {message['role']})"
        return f"the {number} messages"

    def _write(self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool) -> Rendering:
        """Run the template on messages that have the shape it wants; raises BadRowError with the template's message."""
        if ".append(" in self.source or ".pop(" in self.source:
            messages, tools = given(messages), given(tools)
        variables = self._variables | {"messages": messages}
        # As in llama.cpp, what is not there stays undefined: templates ask `tools is defined`.
        if tools:
            variables["tools"] = tools
        if add_generation_prompt:
            variables["add_generation_prompt"] = True
        num_chars = _num_chars(messages) + _num_chars(tools)
        max_chars = _BASE_CHARS + _CHARS_PER_CHAR * num_chars
        self._environment.begin(max_steps=_BASE_STEPS + _STEPS_PER_CHAR * num_chars, max_chars=max_chars)
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > max_chars:
                    raise SecurityError(f"more than {max_chars} characters of output for this conversation")
                pieces.append(piece)
        except _RaisedByTemplateError as error:
            raise BadRowError(str(error)) from error
        except Exception as error:
            # The template is a program of a stranger: whatever fails in it is a fault of template or row, never of
            # ours.
            raise BadRowError(f"{error} ({type(error).__name__})") from error
        return _without_marks("".join(pieces))

    def _shaped(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as this template wants to see it."""
        shaped = dict(message)
        if shaped["role"] == "developer" and "<|channel|>" not in self.source:
            shaped["role"] = "system"
        if shaped.get("reasoning_content") and self._reads_thinking:
            shaped.setdefault("thinking", shaped["reasoning_content"])
        content = shaped.get("content")
        if content is None:
            shaped["content"] = ""
        elif isinstance(content, str) and not self._takes_text:
            shaped["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self._takes_parts:
            shaped["content"] = content_text(message)
        if shaped.get("reasoning_content") and self._reads_thinking_parts:
            text = content_text(message)
            thinking = {"type": "thinking", "thinking": shaped["reasoning_content"]}
            shaped["content"] = [thinking, *([{"type": "text", "text": text}] if text else [])]
        if calls := shaped.get("tool_calls"):
            shaped["tool_calls"] = [self._shaped_call(call) for call in calls]
        return shaped

    def _shaped_call(self, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            raise BadRowError("a tool call must be an object with 'function': {'name': ..., 'arguments': ...}")
        arguments = function["arguments"]
        if isinstance(arguments, str) and self._takes_argument_objects:
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise BadRowError(
                    f"the arguments of tool call {function.get('name')!r} are not valid JSON: {error}"
                ) from error
        elif not isinstance(arguments, str) and not self._takes_argument_objects:
            arguments = to_json(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    @cached_property
    def skeletons(self) -> Skeletons:
        """What is written around the messages of plain conversations."""
        return Skeletons(self, _PROBE)

    @cached_property
    def has_system_role(self) -> bool:
        """Whether the template accepts a system message and writes its text."""
        system = {"role": "system", "content": self._content(_PROBE)}
        return _PROBE in self._probe([system, {"role": "user", "content": self._content("x")}])

    @property
    def _reads_thinking(self) -> bool:
        """Whether reasoning goes by gpt-oss's name for it."""
        return "reasoning_content" not in self.source and "message.thinking" in self.source

    @property
    def _reads_thinking_parts(self) -> bool:
        """Whether reasoning is a part of the content, as in Mistral's templates."""
        return "reasoning_content" not in self.source and "['thinking']" in self.source

    @cached_property
    def _takes_text(self) -> bool:
        return _PROBE in self._probe([{"role": "user", "content": _PROBE}]) or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        text = self._probe([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        # A list that is printed as a list is not understood.
        return _PROBE in text and f"'text': '{_PROBE}'" not in text and f'"text": "{_PROBE}"' not in text

    @cached_property
    def _takes_argument_objects(self) -> bool:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": _PROBE}}}
        function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
        user = {"role": "user", "content": self._content("x")}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._probe([user, answer], tools=[{"type": "function", "function": function}])
        return _PROBE in text and f"'x': '{_PROBE}'" not in text

    def _content(self, text: str) -> Any:
        return text if self._takes_text else [{"type": "text", "text": text}]

    def _probe(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """What the template writes for messages that need no shaping; nothing where it refuses them."""
        try:
            return self._write(messages, tools, True).text
        except BadRowError:
            return ""


def content_text(message: dict[str, Any]) -> str:
    """The text of a message; parts are joined by line breaks, as llama-server joins them."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the text of a leading system message before that of the next message, as llama-server does for a template
    without a system role (`system_message_not_supported` in common/chat.cpp)."""
    if len(messages) < 2 or messages[0]["role"] not in ("system", "developer"):
        return messages
    merged = {**messages[1], "content": content_text(messages[0]) + "\n" + content_text(messages[1])}
    return [merged, *messages[2:]]


def token_text(tokenizer: Tokenizer, token: int | None) -> str:
    """The text of a special token, or nothing for None."""
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplateError(message)


def _num_chars(value: Any) -> int:
    """How much text a value holds, with one for each number, key and brace."""
    if isinstance(value, str):
        return len(value)
    count = 1
    # Asked for at each rendering of each row, so the usual case, a dict of texts, takes no further call.
    if isinstance(value, dict):
        for key, part in value.items():
            count += len(key) + (len(part) if isinstance(part, str) else _num_chars(part))
    elif isinstance(value, list):
        for part in value:
            count += _num_chars(part)
    return count


def _without_marks(text: str) -> Rendering:
    """Take the marks of generation blocks out of the text and note where they stood."""
    if GENERATION_START not in text:
        return Rendering(text, ())
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for part in text.split(GENERATION_START):
        inside, mark, after = part.partition(GENERATION_END)
        if mark:
            spans.append((length, length + len(inside)))
        pieces += (inside, after)
        length += len(inside) + len(after)
    return Rendering("".join(pieces), tuple(spans))
