import time
from typing import Any

import pytest

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.samples import BadRowError
from pyggtrain.errors import DataError

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, variables=variables).render(MESSAGES).text


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_endless_templates_stop(source: str) -> None:
    started = time.process_time()
    with pytest.raises(BadRowError):
        render(source)
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format('a') }}",
        "{{ '{:{}}'.format('a', 1000000000) }}",
        "{% for i in range(1000) %}{{ messages[0].content * 1000000 }}{% endfor %}",
    ],
)
def test_values_of_gigabytes_are_refused_before_they_are_made(source: str) -> None:
    with pytest.raises((BadRowError, DataError)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1] }}",
        "{{ raise_exception.__globals__['meta'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].parts.pop(0) }}",
        "{% include '/etc/passwd' %}",
        "{{ strftime_now.__self__.year }}",
    ],
)
def test_sandbox_keeps_a_template_from_python_and_files(source: str) -> None:
    with pytest.raises(BadRowError):
        render(source)


def test_ordinary_operators_filters_and_loops_keep_their_meaning() -> None:
    assert render("{{ 'a' + 'b' * 3 ~ 2 ~ none }}") == "abbb2None"
    assert render("{{ 7 % 4 }} {{ 2 ** 10 }} {{ '%s-%02d' % ('x', 3) }} {{ '{}'.format(1) }}") == "3 1024 x-03 1"
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}") == "a1True"
    assert render("{% for m in nothing %}x{% else %}none{% endfor %}") == "none"
    assert render("{% for i in range(9) if i % 2 %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert render("{% for i in [1, 2] | map('string') %}{{ loop.length }}{{ i }}{% endfor %}") == "2122"
    assert render("{{ {'b': '<é>', 'a': [1.5, true, none]} | tojson }}") == '{"b": "<é>", "a": [1.5, true, null]}'
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"


def test_generation_tag_marks_its_output_and_keeps_variables() -> None:
    source = (
        "{% for m in messages %}<{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}>{{ x }}{% endfor %}"
    )
    rendering = ChatTemplate(source).render([*MESSAGES, {"role": "assistant", "content": "ho"}])
    assert rendering.text == "<hi>hi<ho>ho"
    assert [rendering.text[start:end] for start, end in rendering.generated] == ["hi", "ho"]
