"""Where the messages of a plain conversation lie in its rendering, from that one rendering.

Finding a turn by rendering again (`data.turns`) takes three renderings for each answer. What a template writes around
messages depends on their roles and, in most templates, on nothing else. So it is found once for each sequence of roles,
with a character that occurs nowhere in the place of every message: the rendering's constant parts, and how much of them
the prompt is that llama-server would send for each answer. A row's own rendering must then be these parts with its
messages between them, to the letter; where it is not, the turns are found the long way.

The prompts of a row are not rendered again. That they too are the parts with the messages between them follows if the
template treats the row's messages as it treats that character. What a template asks of a text are words, as in
`'</think>' in content` or `content.startswith('<tool_response>')`. They are read from its source, and a row that holds
one of them goes the long way, as does every row of a template that asks for the length of a message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import nodes

from pyggtrain.data.samples import BadRowError

if TYPE_CHECKING:
    from pyggtrain.data.chat_template import ChatTemplate

_MOST_SKELETONS = 512


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the messages of a sequence of roles.

    Attributes:
        parts: the constant texts before, between and behind n messages, n + 1 of them.
        prompt_chars: index of an answer -> how many characters of the part before it belong to its prompt.
    """

    parts: tuple[str, ...]
    prompt_chars: dict[int, int]

    def places(self, contents: Sequence[str], text: str) -> list[tuple[int, int]] | None:
        """Start and end of each message in a rendering, None if it is not these parts with the messages between them.

        Templates may strip a message.
        """
        first, *others = self.parts
        if not text.startswith(first):
            return None
        position, places = len(first), []
        for content, part in zip(contents, others, strict=True):
            for written in (content, content.strip(), content.lstrip(), content.rstrip()):
                end = position + len(written)
                if text.startswith(written, position) and text.startswith(part, end):
                    break
            else:
                return None
            places.append((position, end))
            position = end + len(part)
        return places if position == len(text) else None


class Skeletons:
    """The skeletons of one template, made when they are asked for.

    Args:
        template: the template.
        mark: a character that no row holds.
    """

    def __init__(self, template: "ChatTemplate", mark: str) -> None:
        self._template, self._mark = template, mark
        self._by_roles: dict[tuple[str, ...], Skeleton | None] = {}
        self._words = looked_for(template.tree)

    def of(self, messages: Sequence[dict[str, Any]]) -> Skeleton | None:
        """The skeleton for these messages, None if they have to go the long way."""
        if self._words is None:
            return None
        for message in messages:
            content = message.get("content")
            if len(message) != 2 or not isinstance(content, str) or any(word in content for word in self._words):
                return None
        roles = tuple([message["role"] for message in messages])
        if roles not in self._by_roles:
            if len(self._by_roles) >= _MOST_SKELETONS:
                return None
            self._by_roles[roles] = self._make(roles)
        return self._by_roles[roles]

    def _make(self, roles: Sequence[str]) -> Skeleton | None:
        messages = [{"role": role, "content": self._mark} for role in roles]
        try:
            rendering = self._template.render(messages)
            parts = rendering.text.split(self._mark)
            if rendering.generated or len(parts) != len(roles) + 1:
                return None
            prompt_chars = {}
            for index, role in enumerate(roles):
                if role == "assistant":
                    prompt = self._template.render(messages[:index], add_generation_prompt=True)
                    *before, last = prompt.text.split(self._mark)
                    if before != parts[:index] or not parts[index].startswith(last):
                        return None
                    prompt_chars[index] = len(last)
        except BadRowError:
            return None
        return Skeleton(tuple(parts), prompt_chars)


def looked_for(tree: nodes.Template) -> frozenset[str] | None:
    """The words that a template asks its messages for: constants that it compares with anything but a role, or gives to
    a function, a filter or a test. None if it asks for the length of a message.
    """
    words: set[str] = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        if isinstance(node, nodes.Compare):
            sides = [node.expr, *(operand.expr for operand in node.ops)]
            if not any(_is_role(side) for side in sides):
                words.update(_texts(sides))
            continue
        assert isinstance(node, nodes.Call | nodes.Filter | nodes.Test), "the kinds that were asked for"
        if isinstance(node, nodes.Filter) and node.name in ("length", "count") and _is_content(node.node):
            return None
        # What is raised or formatted is no question; nor is the name of a date's format.
        if not (isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name)):
            words.update(_texts(node.args))
    return frozenset(word for word in words if word.strip())


def _texts(expressions: Sequence[nodes.Expr]) -> Iterator[str]:
    for expression in expressions:
        if isinstance(expression, nodes.Const) and isinstance(expression.value, str):
            yield expression.value
        elif isinstance(expression, nodes.List | nodes.Tuple):
            yield from _texts(expression.items)


def _is_role(expression: nodes.Expr) -> bool:
    return "role" in _name(expression)


def _is_content(expression: nodes.Expr | None) -> bool:
    found = [] if expression is None else [expression, *expression.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]
    return any("content" in _name(part) for part in found if isinstance(part, nodes.Expr))


def _name(expression: nodes.Expr) -> str:
    if isinstance(expression, nodes.Getattr):
        return expression.attr
    if isinstance(expression, nodes.Getitem):
        return str(expression.arg.value) if isinstance(expression.arg, nodes.Const) else ""
    return expression.name if isinstance(expression, nodes.Name) else ""
