from collections.abc import Callable
from typing import Any

import pytest

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.data.samples import BadRowError, Conversation
from pyggtrain.data.turns import Turn, render_turns


def conversation(*turns: tuple[str, str], **options: Any) -> Conversation:
    messages = [{"role": role, "content": content} for role, content in turns]
    return Conversation(messages, tuple(role == "assistant" for role, _ in turns), **options)


def learnt(text: str, turns: list[Turn]) -> list[str]:
    return [text[turn.start : turn.end] for turn in turns]


TWO_TURNS = conversation(("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))
THINKING = conversation(
    ("user", "q1"), ("assistant", "<think>r1</think>a1"), ("user", "q2"), ("assistant", "<think>r2</think>a2")
)


def test_turn_begins_behind_the_prompt_and_ends_with_the_text(template_source: Callable[[str], str]) -> None:
    text, turns, lost = render_turns(ChatTemplate(template_source("chatml")), TWO_TURNS)
    assert learnt(text, turns) == ["a1", "a2"]
    assert [text[turn.end : turn.limit] for turn in turns] == ["<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n"]
    assert all(turn.follows_prompt and turn.is_whole for turn in turns)
    assert lost == []


def test_text_that_repeats_elsewhere_is_not_confused(template_source: Callable[[str], str]) -> None:
    same = "<|im_start|>assistant\nx<|im_end|>\n"
    chat = conversation(("user", same), ("assistant", same), ("user", "x"), ("assistant", "x"))
    text, turns, _ = render_turns(ChatTemplate(template_source("chatml")), chat)
    assert learnt(text, turns) == [same, "x"]


def test_reasoning_that_the_template_drops_is_not_learnt_and_told(template_source: Callable[[str], str]) -> None:
    template = ChatTemplate(template_source("Qwen-Qwen3-0.6B"))
    text, turns, _ = render_turns(template, THINKING)
    assert learnt(text, turns) == ["a1", "<think>\nr2\n</think>\n\na2"]
    assert [turn.is_whole for turn in turns] == [False, True]
    # The opening tag is missing: the template writes it.
    text, turns, _ = render_turns(template, conversation(("user", "q"), ("assistant", "r</think>a")))
    assert learnt(text, turns) == ["<think>\nr\n</think>\n\na"]
    assert text == template.render(conversation(("user", "q"), ("assistant", "r</think>a")).messages).text


def test_prompt_that_is_no_beginning_of_the_rendering_is_told(template_source: Callable[[str], str]) -> None:
    """QwQ's generation prompt ends in <think>, which the rendering of a plain answer lacks."""
    text, turns, _ = render_turns(ChatTemplate(template_source("Qwen-QwQ-32B")), TWO_TURNS)
    assert learnt(text, turns) == ["a1", "a2"]
    assert not any(turn.follows_prompt for turn in turns)


def test_template_that_moves_the_system_text_is_told(template_source: Callable[[str], str]) -> None:
    """Mistral Nemo writes the system text into the last message if it is the user's: never into a whole chat."""
    chat = conversation(("system", "Be brief."), ("user", "q1"), ("assistant", "a1"))
    template = ChatTemplate(template_source("mistralai-Mistral-Nemo-Instruct-2407"), eos_token="</s>")
    text, turns, lost = render_turns(template, chat)
    assert text == "[INST]q1[/INST]a1</s>"
    assert learnt(text, turns) == ["a1"]
    assert not turns[0].follows_prompt
    assert lost == ["system"]


def test_generation_blocks_are_honoured(template_source: Callable[[str], str]) -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
        "{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text, turns, _ = render_turns(ChatTemplate(source), TWO_TURNS)
    assert learnt(text, turns) == ["a1<end>", "a2<end>"]
    assert all(turn.follows_prompt and turn.limit == turn.end for turn in turns)
    last_only = Conversation(TWO_TURNS.messages, (False, False, False, True))
    text, turns, _ = render_turns(ChatTemplate(source), last_only)
    assert learnt(text, turns) == ["a2<end>"]
    with pytest.raises(BadRowError, match="1 passages as generated for 2"):
        render_turns(ChatTemplate("{% generation %}x{% endgeneration %}"), TWO_TURNS)


def test_answer_that_the_template_leaves_out_is_told() -> None:
    text, turns, lost = render_turns(ChatTemplate("{{ messages[0].content }}{{ messages[-1].content }}"), TWO_TURNS)
    assert text == "q1a2"
    assert learnt(text, turns) == ["a2"]
    assert lost == ["user", "assistant"]


@pytest.mark.parametrize("char", ["\ufdd0", "\ufdd1", "\ufdd2"])
def test_reserved_characters_are_refused(template_source: Callable[[str], str], char: str) -> None:
    with pytest.raises(BadRowError, match="noncharacters"):
        render_turns(ChatTemplate(template_source("chatml")), conversation(("user", char), ("assistant", "a")))
