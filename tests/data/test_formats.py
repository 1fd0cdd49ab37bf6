import json
from typing import Any

import pytest

from pyggtrain.data.formats import FORMATS, alpaca, matching_formats, messages, prompt_completion, sharegpt, text
from pyggtrain.data.samples import BadRowError, Conversation, Document, PromptCompletion

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def test_every_format_is_told_by_its_keys() -> None:
    for name, format in FORMATS.items():
        assert matching_formats(dict.fromkeys(format.KEYS, "x")) == [name]


def test_messages_keep_order_and_learn_the_assistant() -> None:
    chat = messages.parse({"messages": [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER]})
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.learnt == (False, False, True, False, True)
    assert chat.notes == ()


def test_known_aliases_of_roles_are_mapped_and_said() -> None:
    turns = [
        {"role": "human", "content": "q"},
        {"role": "GPT", "content": "a"},
        {"role": "User", "content": "q"},
        ANSWER,
    ]
    chat = messages.parse({"messages": turns})
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]
    assert chat.notes == ("role 'human' read as 'user'", "role 'GPT' read as 'assistant'", "role 'User' read as 'user'")


def test_sharegpt_and_alpaca_give_the_same_conversation_as_messages() -> None:
    plain = messages.parse({"messages": [{"role": "system", "content": "s"}, USER, ANSWER]})
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert sharegpt.parse({"conversations": turns, "system": "s"}).messages == plain.messages
    assert alpaca.parse({"instruction": "q", "input": "", "output": "a", "system": "s"}).messages == plain.messages
    asked = alpaca.parse({"instruction": "Add.", "input": "1 2", "output": "3"}).messages[0]
    assert asked == {"role": "user", "content": "Add.\n\n1 2"}


def test_weight_zero_makes_an_answer_context_only() -> None:
    chat = messages.parse({"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]})
    assert chat.learnt == (False, False, False, True)
    assert all("weight" not in message for message in chat.messages)


def test_keys_that_templates_may_read_are_kept() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"}
    result = {"role": "tool", "content": "1", "tool_call_id": "x"}
    chat = messages.parse({"messages": [USER, answer, result, ANSWER], "tools": [{"type": "function"}]})
    assert chat == Conversation([USER, answer, result, ANSWER], (False, True, False, True), [{"type": "function"}])


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        pytest.param([], "is empty", id="no messages"),
        pytest.param("hello", "of type str", id="no list"),
        pytest.param(["hello"], "message 1 is of type str", id="message is text"),
        pytest.param(
            [USER, {"role": "assistant", "content": ""}], "message 2 is an empty assistant turn", id="empty answer"
        ),
        pytest.param([USER, {"role": "assistant", "content": " \n"}], "empty assistant turn", id="blank answer"),
        pytest.param([USER, {"role": "assistant", "content": None}], "message 2 has no content", id="null answer"),
        pytest.param([USER, {"role": "assistant"}], "message 2 has no content", id="content missing"),
        pytest.param([USER, {"role": "assistant", "content": 3}], "content of type int", id="content is a number"),
        pytest.param([USER], "last turn is by the user", id="no answer"),
        pytest.param([USER, ANSWER, USER], "last turn is by the user", id="last turn by the user"),
        pytest.param([{"content": "q"}, ANSWER], "message 1 has no role", id="role missing"),
        pytest.param([{"role": "asistant", "content": "q"}, ANSWER], "did you mean assistant", id="misspelt role"),
        pytest.param([USER, {**ANSWER, "weight": 0}], "weight 0", id="nothing learnt"),
        pytest.param([USER, {**ANSWER, "weight": 0.5}], "weight 0.5", id="odd weight"),
        pytest.param(
            [
                {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {}}]},
                ANSWER,
            ],
            "part of type 'image_url'",
            id="image",
        ),
        pytest.param([{"role": "user", "content": ["q"]}, ANSWER], "part of type 'str'", id="part is text"),
        pytest.param(
            [{"role": "user", "content": [{"type": "text"}]}, ANSWER], "text part without text", id="empty part"
        ),
    ],
)
def test_conversation_that_cannot_be_learnt_from_is_a_bad_row(chat: Any, words: str) -> None:
    with pytest.raises(BadRowError, match=words):
        messages.parse({"messages": chat})


def test_conversation_may_begin_with_the_assistant_or_have_two_answers_running() -> None:
    assert messages.parse({"messages": [ANSWER, USER, ANSWER, ANSWER]}).learnt == (True, False, True, True)


def test_plain_formats_and_their_bad_rows() -> None:
    assert prompt_completion.parse({"prompt": "", "completion": " x"}) == PromptCompletion("", " x")
    assert text.parse({"text": " x\n"}) == Document(" x\n")
    for format, row, words in (
        (prompt_completion, {"prompt": "x", "completion": ""}, "'completion' is empty"),
        (prompt_completion, {"prompt": None, "completion": "x"}, "'prompt' is of type NoneType"),
        (prompt_completion, {"prompt": [USER], "completion": [ANSWER]}, "one list under 'messages'"),
        (text, {"text": "\n"}, "'text' is empty"),
        (alpaca, {"instruction": "x", "output": 3}, "'output' is of type int"),
        (sharegpt, {"conversations": [{"from": "human", "value": "q"}]}, "last turn is by the user"),
        (sharegpt, {"conversations": [{"value": "q"}]}, "message 1 has no role"),
    ):
        with pytest.raises(BadRowError, match=words):
            format.parse(row)


def test_reasoning_goes_by_one_name_whatever_the_row_calls_it() -> None:
    expected = [USER, {**ANSWER, "reasoning_content": "r"}]
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert messages.parse({"messages": [USER, {**ANSWER, name: "r"}]}).messages == expected
    assert messages.parse({"messages": [USER, {**ANSWER, "thinking": "", "reasoning": None}]}).messages == [
        USER,
        ANSWER,
    ]
    with pytest.raises(BadRowError, match="message 2 has 'thinking' of type list"):
        messages.parse({"messages": [USER, {**ANSWER, "thinking": ["r"]}]})


def test_null_counts_as_not_given() -> None:
    answer = {**ANSWER, "tool_calls": None, "name": None, "weight": None}
    assert messages.parse({"messages": [USER, answer], "tools": None}).messages == [USER, ANSWER]


def test_tools_may_be_a_list_or_its_json() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for given in (tools, json.dumps(tools)):
        assert messages.parse({"messages": [USER, ANSWER], "tools": given}).tools == tools
    assert messages.parse({"messages": [USER, ANSWER], "tools": ""}).tools is None
    with pytest.raises(BadRowError, match="'tools' is a text, but no valid JSON"):
        messages.parse({"messages": [USER, ANSWER], "tools": "f(x)"})


def test_calls_and_results_of_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "21"},
        {"from": "gpt", "value": "21 degrees.", "weight": 0},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
    ]
    chat = sharegpt.parse({"conversations": turns, "tools": '[{"type": "function"}]'})
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert chat.messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert chat.messages[2] == {"role": "tool", "content": "21"}
    assert chat.learnt == (False, True, False, False, False, True)
    assert chat.tools == [{"type": "function"}]
    with pytest.raises(BadRowError, match="turn 2 is a function_call whose value is no JSON"):
        sharegpt.parse({"conversations": [turns[0], {"from": "function_call", "value": "weather(Rome)"}]})


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "audio", "video"])
def test_images_and_sound_are_refused_in_plain_words(kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: "x.png"}]
    with pytest.raises(BadRowError, match=f"message 1 has a part of type '{kind}'; pyggtrain trains on text only"):
        messages.parse({"messages": [{"role": "user", "content": parts}, ANSWER]})
