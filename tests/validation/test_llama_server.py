# ruff: noqa: RUF001 - look-alike characters are what a tokenizer must tell apart
import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.errors import AdapterError, BridgeError, ConfigError, UnsupportedError
from pyggtrain.gguf import Tokenizer
from pyggtrain.validation.difference import compare_logits
from pyggtrain.validation.llama_server import ServerRuntime
from pyggtrain.validation.parity import ParitySettings, verify_adapter
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings

TRICKY = [
    "", " ", "  ", "   ", "\t", "\t\t", " \t ", "\n", "\n\n", "\r\n", "\r", " \n", "a\r\nb", "a   b", "a\tb", "  lead",
    "trail  ", "Hello, world!", "don't I'LL we're it's", "naïve façade", "e\u0301", "a\u0300\u0316\u0489b",
    "Zalgo h\u0337\u0321\u0353e\u0338", "😀", "👩🏽‍🔬 and 👨‍👩‍👧‍👦", "🇩🇪🇯🇵", "👍🏿",
    "日本語のテキスト", "中文，标点。", "한국어 문장", "ประเทศไทย", "नमस्ते", "שלום עולם", "مرحبا",
    "Привет", "Ω≈ç√∫˜µ≤", "ﬁ ﬀ ㎏ ½", "１２３", "0", "1234567890",
    "3.14159e-10", "1,000,000", "x = y**2;", "def f(x):\n    return x\n", "<|im_start|>", "<|im_end|>",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_start", "|im_end|>", "<s></s>[INST]",
    "<repo_name><jupyter_start>", "text<|im_end|>text", " <|im_end|> ", "\u200b\u200d\ufeff", "\u00a0nbsp\u00a0",
    "\u2028\u2029", "\x01\x02\x7f", "\x1b[0m", "a" * 300, "ab " * 100, "!" * 40, "\\n \\t \\u0041",
    '{"a": [1, null, true]}', "C:\\dir\\file", "https://example.org/?q=1&r=2#x", "\U0001f9d1\U0001f3fb", "\U0010ffff",
    "\ufffd", "ÅÄÖåäö", "ẞß", "İıIi", "\u0344", "Ǆǅǆ",
]  # fmt: skip


def mixed_strings(num: int) -> list[str]:
    """Random joins of tricky pieces: what breaks a tokenizer is often where two of them meet."""
    rng = random.Random(0)
    return ["".join(rng.choice(TRICKY)[:20] for _ in range(rng.randint(2, 8))) for _ in range(num)]


STRINGS = TRICKY + mixed_strings(200 - len(TRICKY))

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀\r\n  there"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "<|im_end|>\n<|im_start|>system\nthree"},
    ],
    [
        {"role": "system", "content": "日本語"},
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "\ttab\n"},
        {"role": "user", "content": "e\u0301"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("add_special", [False, True])
def test_200_strings_have_the_server_s_tokens(
    server: ServerRuntime, tokenizer: Tokenizer, add_special: bool, parse_special: bool
) -> None:
    assert len(set(STRINGS)) >= 190
    differing = [
        text
        for text in STRINGS
        if tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        != server.tokenize(text, add_special=add_special, parse_special=parse_special)
    ]
    assert differing == []


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda messages: f"{len(messages)}-messages")
def test_conversations_have_the_server_s_prompt(
    server: ServerRuntime, tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    ours = ChatTemplate.of_model(tokenizer).render(messages, add_generation_prompt=True).text
    assert ours == server.apply_template(messages)


def test_taught_answers_come_back_word_for_word_and_end(
    server: ServerRuntime, taught: Any, tokenizer: Tokenizer
) -> None:
    server.load_adapter(taught.adapter)
    for lesson in taught.lessons:
        assert server.chat(lesson.messages, 60, scale=1.0) == lesson.answer
        ids = server.generate(lesson.prompt, 60, scale=1.0)
        assert tokenizer.decode(ids) == lesson.answer
        assert len(ids) < 60


def test_a_server_started_with_an_adapter_applies_it_to_every_request(server: ServerRuntime, taught: Any) -> None:
    (entry,) = server.adapters()
    assert entry["scale"] == 1.0
    lesson = taught.lessons[1]
    plain_request = {"messages": lesson.messages, "max_tokens": 20, "temperature": 0}
    answer = server._request("/v1/chat/completions", plain_request)
    assert answer["choices"][0]["message"]["content"] == lesson.answer


def test_scale_zero_of_a_request_is_the_base_model(server: ServerRuntime, taught: Any, tokenizer: Tokenizer) -> None:
    server.load_adapter(taught.adapter)
    lesson = taught.lessons[1]
    with_adapter = server.generate(lesson.prompt, 12, scale=1.0)
    at_zero = server.generate(lesson.prompt, 12, scale=0.0)
    assert at_zero == server.generate(lesson.prompt, 12, scale=None)
    assert at_zero != with_adapter
    assert server.chat(lesson.messages, 12, scale=0.0) == tokenizer.decode(at_zero)
    positions = [len(lesson.prompt) - 1]
    none = server.logits(lesson.prompt, scale=None, positions=positions)
    zero = server.logits(lesson.prompt, scale=0.0, positions=positions)
    assert torch.equal(none, zero)
    bridge = BridgeRuntime(taught.base, RuntimeSettings(num_ctx=64, num_ubatch=64))
    assert compare_logits(bridge.logits(lesson.prompt, positions=positions).log_softmax(-1), zero).mean_kl < 0.05
    bridge.close()


def test_rows_are_complete_log_probabilities(server: ServerRuntime, taught: Any, tokenizer: Tokenizer) -> None:
    rows = server.logits(taught.lessons[0].prompt, positions=[3, 10])
    assert rows.shape == (2, tokenizer.num_tokens)
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.double().exp().sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-5)


def test_a_served_adapter_passes_the_comparison_and_a_wrong_scale_fails(server: ServerRuntime, taught: Any) -> None:
    documents = [(taught.lessons[1].ids, taught.lessons[1].labels)]
    settings = ParitySettings(max_served_positions=2)
    report = verify_adapter(taught.base, taught.adapter, documents, ours=taught.model, settings=settings, served=server)
    assert report.passed, report.table()
    assert report.mode == "statistical"
    assert report.num_positions == 2
    assert set(server.limits) <= set(report.notes)
    assert "llama-server" in report.table()

    class Doubled:
        """Our side trained with twice the scale that the file tells llama.cpp."""

        num_pairs = taught.model.num_pairs
        layer_names = taught.model.layer_names

        def logits(self, tokens: list[int], *, scale: float | None) -> torch.Tensor:
            return taught.model.logits(tokens, scale=None if scale is None else 2 * scale)

        def layer_outputs(self, tokens: list[int], *, scale: float | None, inputs: Any = None) -> dict[str, Any]:
            return taught.model.layer_outputs(tokens, scale=scale, inputs=inputs)

    report = verify_adapter(taught.base, taught.adapter, documents, ours=Doubled(), settings=settings, served=server)
    assert not report.passed


def test_a_server_of_another_model_is_refused(
    server: ServerRuntime, tiny_llama_path: Path, make_trained: Callable[..., Any]
) -> None:
    trained = make_trained(tiny_llama_path)
    with pytest.raises(ConfigError, match=r"vocabulary of 49152 tokens, .*tiny-llama.gguf one of 96"):
        verify_adapter(tiny_llama_path, None, [([1, 2, 3], [1, 2, 3])], ours=trained.model, served=server)


def test_an_adapter_that_the_server_does_not_hold_is_refused(server: ServerRuntime, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"holds 0 adapters of that name \(loaded: taught.gguf\).*--lora"):
        server.load_adapter(tmp_path / "other.gguf")


def test_what_a_server_cannot_show_is_refused(server: ServerRuntime) -> None:
    with pytest.raises(UnsupportedError, match="l_out-0"):
        server.tensors([1, 2], ["l_out-0"])


def test_a_text_longer_than_the_server_s_context_is_an_error(server: ServerRuntime) -> None:
    with pytest.raises(BridgeError, match="exceed|context"):
        server.generate([5] * 600, 1)


def test_no_server_and_no_address_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no llama-server answers there .*llama-server -m"):
        ServerRuntime("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="no address of a llama-server"):
        ServerRuntime("127.0.0.1:8080")


@pytest.fixture
def impostor() -> Iterator[Callable[[bytes], str]]:
    """impostor(body): the address of an HTTP server that answers everything with `body`."""
    servers = []

    def start(body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'"text"', json.dumps({"data": []}).encode(), b"\xff"])
def test_another_service_is_not_taken_for_a_llama_server(impostor: Callable[[bytes], str], body: bytes) -> None:
    with pytest.raises(ConfigError, match="answers, but not"):
        ServerRuntime(impostor(body))
