from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from pyggtrain.data.chat_template import ChatTemplate, merge_system
from pyggtrain.data.samples import BadRowError
from pyggtrain.errors import DataError
from pyggtrain.gguf import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}


def test_model_template_gets_the_special_tokens_of_the_model(
    vocabulary: Callable[[str], Tokenizer], template_of: Callable[[Tokenizer, str], ChatTemplate]
) -> None:
    template = template_of(vocabulary("llama-spm"), "mistral")
    assert template.render([USER, ANSWER]).text == "<s>[INST] q [/INST] a</s>"


def test_refusal_names_message_role_and_the_words_of_the_template(template_source: Callable[[str], str]) -> None:
    gemma = ChatTemplate(template_source("google-gemma-2-2b-it"))
    with pytest.raises(BadRowError, match=r"message 1 \(role system\): System role not supported"):
        gemma.render([SYSTEM, USER, ANSWER])
    with pytest.raises(BadRowError, match=r"message 2 \(role user\): Conversation roles must alternate"):
        gemma.render([USER, USER, ANSWER])
    with pytest.raises(BadRowError, match=r"message 1 \(role user\): 'dict object' has no attribute 'name'"):
        ChatTemplate("{{ messages[0].name.first }}").render([USER])


def test_template_that_is_not_jinja_is_an_error_with_its_line() -> None:
    with pytest.raises(DataError, match=r"the chat template is not valid jinja2: line 2"):
        ChatTemplate("x\n{% if %}")
    with pytest.raises(DataError, match="at most"):
        ChatTemplate("x" * (1 << 21))
    with pytest.raises(DataError, match="cannot be compiled"):
        ChatTemplate("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}")


def test_model_without_template_is_an_error_that_says_what_to_do(vocabulary: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(DataError, match="no tokenizer.chat_template.*'completion'"):
        ChatTemplate.of_model(vocabulary("llama-spm"))


def test_date_is_that_of_the_run_and_templates_that_write_it_are_known(template_source: Callable[[str], str]) -> None:
    then = datetime(2031, 2, 3)
    for name, date in (("meta-llama-Llama-3.1-8B-Instruct", "03 Feb 2031"), ("openai-gpt-oss-120b", "2031-02-03")):
        template = ChatTemplate(template_source(name), now=then)
        assert template.uses_date
        assert date in template.render([USER, ANSWER]).text
    assert not ChatTemplate(template_source("chatml")).uses_date


def test_variables_reach_the_template(template_source: Callable[[str], str]) -> None:
    source = template_source("Qwen-Qwen3-0.6B")
    assert ChatTemplate(source).render([USER], add_generation_prompt=True).text.endswith("<|im_start|>assistant\n")
    silent = ChatTemplate(source, variables={"enable_thinking": False})
    assert silent.render([USER], add_generation_prompt=True).text.endswith("assistant\n<think>\n\n</think>\n\n")


def test_parts_are_joined_unless_the_template_reads_them(template_source: Callable[[str], str]) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert "one\ntwo<|im_end|>" in ChatTemplate(template_source("chatml")).render(parts).text
    reads_parts = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(reads_parts).render(parts).text == "[one][two]"
    assert ChatTemplate(reads_parts).render([USER]).text == "[q]"


def test_arguments_of_tool_calls_have_the_shape_the_template_wants(template_source: Callable[[str], str]) -> None:
    takes_text = (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{{ '\"arguments\": ' + c.function.arguments + '}' }}{% endfor %}{% endfor %}"
    )
    as_object = {**CALL, "function": {"name": "f", "arguments": {"x": "é"}}}
    for source in (template_source("Qwen-Qwen2.5-7B-Instruct"), takes_text):
        template = ChatTemplate(source)
        for call in (CALL, as_object):
            text = template.render([USER, {"role": "assistant", "content": None, "tool_calls": [call]}]).text
            assert '"arguments": {"x": "é"}}' in text
    broken = {**CALL, "function": {"name": "f", "arguments": "{x"}}
    template = ChatTemplate(template_source("Qwen-Qwen2.5-7B-Instruct"))
    with pytest.raises(BadRowError, match="arguments of tool call 'f' are not valid JSON"):
        template.render([USER, {"role": "assistant", "content": "", "tool_calls": [broken]}])


def test_system_text_is_merged_as_llama_server_does() -> None:
    assert merge_system([SYSTEM, USER, ANSWER]) == [{"role": "user", "content": "Be brief.\nq"}, ANSWER]
    assert merge_system([USER, ANSWER]) == [USER, ANSWER]


def test_system_role_is_probed(template_source: Callable[[str], str]) -> None:
    assert ChatTemplate(template_source("chatml")).has_system_role
    assert not ChatTemplate(template_source("google-gemma-2-2b-it")).has_system_role
    assert not ChatTemplate("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}").has_system_role


def test_developer_is_system_except_for_templates_with_channels(template_source: Callable[[str], str]) -> None:
    developer = {"role": "developer", "content": "d"}
    assert "<|im_start|>system\nd" in ChatTemplate(template_source("chatml")).render([developer, USER]).text
    assert (
        "<|start|>developer<|message|># Instructions\n\nd"
        in ChatTemplate(template_source("openai-gpt-oss-120b")).render([developer, USER]).text
    )


class ModelWithTemplates:
    """A tokenizer whose file holds several templates."""

    bos_id = eos_id = None

    def __init__(self, chat_template: str | None, chat_templates: dict[str, str]) -> None:
        self.chat_template, self.chat_templates = chat_template, chat_templates


def test_a_named_template_of_the_file_is_found_and_a_missing_one_is_an_error() -> None:
    model: Any = ModelWithTemplates("default", {"tool_use": "tools: {{ tools }}", "rag": "rag"})
    assert ChatTemplate.of_model(model, variant="rag").render([USER]).text == "rag"
    with pytest.raises(DataError, match="no chat template named 'rga'; it has: tool_use, rag"):
        ChatTemplate.of_model(model, variant="rga")


def test_conversations_with_tools_take_the_template_for_tools_as_in_llama_server() -> None:
    model: Any = ModelWithTemplates("default", {"tool_use": "with tools"})
    template = ChatTemplate.of_model(model)
    assert template.for_tools is not None
    assert (template.source, template.for_tools.source) == ("default", "with tools")
    assert ChatTemplate.of_model(model, source="own").for_tools is None
    assert ChatTemplate.of_model(model, variant="tool_use").for_tools is None
    only: Any = ModelWithTemplates(None, {"tool_use": "with tools"})
    assert ChatTemplate.of_model(only).source == "with tools"


def test_identity_is_equal_where_the_writing_is() -> None:
    def identity(source: str = "{{ messages[0].content }}", **options: Any) -> str:
        return ChatTemplate(source, **options).identity

    assert identity() == identity(now=datetime(2031, 2, 3))
    others = [identity("x"), identity(bos_token="<s>"), identity(variables={"enable_thinking": False})]
    others.append(identity(for_tools=ChatTemplate("x")))
    others += [identity("{{ date_string }}", now=datetime(2031, 2, day)) for day in (1, 2)]
    assert len({identity(), *others}) == 7
