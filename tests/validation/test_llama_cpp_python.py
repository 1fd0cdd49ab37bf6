"""llama-cpp-python, the way most people run a GGUF file from Python: the same words, and at peace in one process."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# One process: our runtime and llama-cpp-python, imported in the order of the first argument, both asked the same.
SCRIPT = """
import json, sys

order, base, adapter, questions = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])

def ours():
    from pathlib import Path
    from pyggtrain.data.chat_template import ChatTemplate
    from pyggtrain.gguf import Tokenizer
    from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings
    tokenizer = Tokenizer.from_gguf(base)
    template = ChatTemplate.of_model(tokenizer)
    runtime = BridgeRuntime(Path(base), RuntimeSettings(num_ctx=256, num_ubatch=256, kv_type="F16"))
    runtime.load_adapter(Path(adapter))
    def ask(question, scale):
        prompt = template.render([{"role": "user", "content": question}], add_generation_prompt=True).text
        return tokenizer.decode(runtime.generate(tokenizer.encode(prompt, parse_special=True), 24, scale=scale))
    return ask

def theirs():
    from llama_cpp import Llama
    options = {"model_path": base, "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with_adapter = Llama(lora_path=adapter, lora_scale=1.0, **options)
    without = Llama(**options)
    def ask(question, scale):
        llama = without if scale is None else with_adapter
        messages = [{"role": "user", "content": question}]
        answer = llama.create_chat_completion(messages, max_tokens=24, temperature=0.0)
        return answer["choices"][0]["message"]["content"]
    return ask

if order == "ours first":
    ask_us = ours()
    ask_them = theirs()
else:
    ask_them = theirs()
    ask_us = ours()
# Both engines stay loaded and take turns.
sides = (ask_us, ask_them)
print(json.dumps([[ask(question, scale) for ask in sides] for question in questions for scale in (None, 1.0)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_llama_cpp_python_says_the_same_in_the_same_process(taught: Any, tmp_path: Path, order: str) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed; docs/parity.md has the command that builds only what is needed")
    questions = [lesson.question for lesson in taught.lessons[:2]]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, order, str(taught.base), str(taught.adapter), json.dumps(questions)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == 4
    for our_answer, their_answer in answers:
        assert our_answer == their_answer
    assert [answers[1][0], answers[3][0]] == [lesson.answer for lesson in taught.lessons[:2]]
    assert answers[0][0] != answers[1][0]
