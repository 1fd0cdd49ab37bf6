"""A jinja2 environment for chat templates out of files from strangers.

jinja2's immutable sandbox keeps a template from attributes, files and the data that it is given; it does not keep it
from looping for ever or from building a text of many gigabytes. This environment counts steps (passes of loops and
calls) and checks lengths where operators make long values. What remains open is time inside single filters and string
methods, which the bounded lengths keep short. A template is still a program: bounded here, not proven harmless.
"""

import json
import re
from collections.abc import Iterable, Sequence, Sized
from types import GeneratorType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Around the output of `{% generation %}`: noncharacters, which Unicode keeps for internal use, so that no text holds
# them.
GENERATION_START = "\ufdd0"
GENERATION_END = "\ufdd1"

_MAX_INTEGER_BITS = 4096
# A call takes about as long as this many passes of an empty loop.
_STEPS_PER_CALL = 16
# A field of a format string whose width has five digits or is an argument.
_WIDE_FIELD = re.compile(r"[%{][^%{}]*(?:[0-9]{5}|\*)|\{[^}]*\{")
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill")


class GenerationTag(Extension):
    """Hugging Face's `{% generation %}`: marks its output, in place, as what the model writes.

    transformers evaluates the block as a macro; here its statements stay where they are, so that a variable set inside
    is seen outside, as in llama.cpp's engine and llama-cpp-python.
    """

    tags = {"generation"}  # noqa: RUF012 - an instance variable in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start = nodes.Output([nodes.TemplateData(GENERATION_START)], lineno=line)
        end = nodes.Output([nodes.TemplateData(GENERATION_END)], lineno=line)
        return [start, *body, end]


class _CountingCodeGenerator(CodeGenerator):
    """Compiles loops and `~` so that they pass through the environment, as calls and the other operators do by
    themselves."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        node.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """The settings of llama-cpp-python and transformers (trim_blocks, lstrip_blocks, loop controls), with bounds.

    Call `begin` before each rendering. Renders one template at a time: not for use by several threads.
    """

    code_generator_class = _CountingCodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        # None has a use in a chat template, and all make text of any length.
        del self.globals["lipsum"], self.filters["center"], self.filters["format"]
        self.filters["tojson"] = to_json
        # Nothing is escaped here, so nothing needs to be marked as safe; jinja2's own would escape what is added to it
        # later.
        self.filters["safe"] = str
        self._max_chars = self._steps_left = 0

    def begin(self, *, max_steps: int, max_chars: int) -> None:
        """Set the bounds of the rendering that follows: passes of loops (a call counts as several), and the length of
        any one text or list."""
        self._steps_left, self._max_chars = max_steps, max_chars

    def counted(self, items: Iterable[Any]) -> Iterable[Any]:
        """What a loop runs over; all its passes are counted before the first."""
        if not isinstance(items, Sized):
            # An undefined value or a generator of a filter; the latter is as long as what it filters.
            items = list(items)
        self._count(len(items) + 1)
        return items

    def concatenated(self, parts: Sequence[Any]) -> str:
        """The value of `a ~ b`."""
        texts = [str(part) for part in parts]
        self._check_length(sum(map(len, texts)))
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox's rule, and `append` and `pop` on a list that the template made (Kimi K2 needs them)."""
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._count(_STEPS_PER_CALL)
        # jinja2 wraps `str.format`.
        method = getattr(function, "__wrapped__", function)
        name, text = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(text, str):
            if name in _PADDING_METHODS and args and isinstance(args[0], int):
                self._check_length(args[0])
            elif name in ("format", "format_map"):
                _check_format(text)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+":
            # Most of what a chat template does; the sandbox would only add them.
            self._check_length(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 1) if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise SecurityError(f"an integer of {bits} bits; at most {_MAX_INTEGER_BITS} are allowed")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(times, int):
                    self._check_length(len(items) * times)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self._check_length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def _check_length(self, length: int) -> None:
        if length > self._max_chars:
            raise SecurityError(f"a value of {length} characters; this conversation allows {self._max_chars}")

    def _count(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise SecurityError("too many loop passes and calls for this conversation")


class GivenList(list[Any]):
    """A list that the template was given, so that it cannot be changed by it."""


def given(value: Any) -> Any:
    """The value with all its lists as `GivenList`."""
    if isinstance(value, dict):
        return {key: given(part) for key, part in value.items()}
    return GivenList(map(given, value)) if isinstance(value, list) else value


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter of transformers: unlike jinja2's own it escapes no HTML and keeps the order of keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_generated,
    )


def _generated(value: Any) -> list[Any]:
    """What filters such as `map` give, which are generators in jinja2 and lists in llama.cpp's engine."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def _check_format(text: str) -> None:
    if _WIDE_FIELD.search(text):
        raise SecurityError("a format string with a very wide field")
