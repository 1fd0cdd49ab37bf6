"""Turns found from one rendering are those that are found by rendering again and again."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.samples import BadRowError, Conversation
from pyggtrain.data.skeleton import looked_for
from pyggtrain.data.turns import render_turns

TEXTS = [
    ("q", "a"),
    ("same", "same"),
    ("  spaces around \n", "\n\nlines around\n\n"),
    ("<think>x</think>y", "<think>r</think>a"),
    ("<|im_start|>user\nx<|im_end|>", "r</think>a"),
    ("", "a"),
    ("user", "assistant"),
    ("[INST] x [/INST]", "<tool_call>{}</tool_call>"),
    ("<tool_response>x</tool_response>", "a"),
    ("Grüße, 日本 👩🏽\u200d🔬", "x" * 3000),
    ("/no_think", "a /think"),
]
ROLES = [
    ("user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user"),
    ("user", "user", "assistant"),
    ("user", "assistant", "assistant"),
]


def chat(roles: tuple[str, ...], question: str, answer: str) -> Conversation:
    messages = [
        {
            "role": role,
            "content": (answer if role == "assistant" else question) + (str(index) if index % 3 == 2 else ""),
        }
        for index, role in enumerate(roles)
    ]
    return Conversation(messages, tuple(role == "assistant" and index != 1 for index, role in enumerate(roles)))


def outcome(template: ChatTemplate, conversation: Conversation) -> Any:
    try:
        return render_turns(template, conversation)
    except BadRowError as error:
        return str(error)


class NoSkeletons:
    def of(self, messages: Any) -> None:
        return None


def test_turns_are_the_same_with_every_template(llama_cpp_models: Path) -> None:
    num_short = num_all = 0
    for path in sorted((llama_cpp_models / "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        short, long = (ChatTemplate(source, bos_token="<s>", eos_token="</s>", name=path.stem) for _ in range(2))
        long.__dict__["skeletons"] = NoSkeletons()
        for roles, (question, answer) in product(ROLES, TEXTS):
            conversation = chat(roles, question, answer)
            num_all += 1
            num_short += short.skeletons.of(conversation.messages) is not None
            assert outcome(short, conversation) == outcome(long, conversation), (path.stem, roles, question, answer)
    # Else nothing was compared.
    assert num_short > num_all / 3


def test_a_plain_row_is_rendered_once(template_source: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(template_source("Qwen-Qwen3-0.6B"))
    rendered = []
    write = ChatTemplate._write
    monkeypatch.setattr(ChatTemplate, "_write", lambda *arguments: rendered.append(1) or write(*arguments))
    counts = []
    for question in ("first", "second", "third", "<think>"):
        rendered.clear()
        render_turns(template, chat(ROLES[1], question, "a"))
        counts.append(len(rendered))
    assert counts[1] == counts[2] == 1 and counts[0] > 1 and counts[3] > 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0]['content'] }}", set()),
        ("{% if message['role'] == 'user' %}{% endif %}", set()),
        ("{% if message.role in ['user', 'tool'] %}{% endif %}", set()),
        ("{% if 'a b' in message.content %}{% endif %}", {"a b"}),
        ("{% if content.startswith('<x>') and content.split('|')[-1] == 'y' %}{% endif %}", {"<x>", "|", "y"}),
        ("{% if content is startingwith('z') %}{% endif %}{{ content | replace('p', 'q') }}", {"z", "p", "q"}),
        ("{{ raise_exception('no') }}{{ strftime_now('%d') }}{{ content.strip('\\n') }}", set()),
        ("{% if messages | length > 1 %}{% endif %}", set()),
        ("{% if message.content | length > 100 %}{% endif %}", None),
        ("{% if message['content'] | trim | length > 100 %}{% endif %}", None),
    ],
)
def test_words_that_a_template_looks_for(source: str, words: set[str] | None) -> None:
    assert looked_for(ChatTemplate(source).tree) == words


def test_a_template_that_treats_one_text_otherwise_goes_the_long_way() -> None:
    """Its parts do not fit, though no word of it was found."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content[0] in 'xyz' %}!{% endif %}{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(source)
    conversation = chat(ROLES[1], "xq", "a")
    assert template.skeletons.of(conversation.messages) is not None
    text, turns, _ = render_turns(template, conversation)
    assert text == "[user]!xq;[assistant]a;[user]!xq2;[assistant]a;"
    assert [text[turn.start : turn.end] for turn in turns] == ["a"]
