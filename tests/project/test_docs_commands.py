"""Every command in README and docs runs, or stands here with the reason why it does not.

A page's commands run one after another in a folder that holds what people are told to have: model.gguf, rows, an
adapter. The model is tiny but has a real vocabulary and chat template.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyggtrain.cli import main
from pyggtrain.gguf import GGUFFile, QuantTensor, TypedValue, quantize_tensor, typed_metadata, write_gguf

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
# First words of an indented line that make it a command.
PROGRAMS = ("pyggtrain", "python", "python3", "torchrun", "llama-server", "ollama", "pip")
# Few, so that comparing logits takes little time.
NUM_TOKENS = 2048
NOT_RUN = {
    r"llama-server .*": "the user's own; tests/validation/test_llama_server.py serves adapters with one",
    r"ollama .*": "the user's own; tests/training/test_serving.py checks the Modelfile",
    r"pip install .*": "how these tests came to be here",
    r"python3 run.py .*": "run by .ci",
    r"python benchmarks/bench_(training|dequantise|kernels|processes)\.py.*": "needs a GPU",
    r"python benchmarks/.*": "measures for minutes",
    r".* --runtime http.*": "needs a running llama-server; tests/validation/test_llama_server.py has one",
    r".* --imatrix .*": "needs what llama-imatrix writes; tests/gguf/test_imatrix.py makes it",
    r"pyggtrain (plan|train) Qwen3.6-35B.*": "needs that file and a GPU",
    r"pyggtrain selftest.*": "minutes of kernels; tests/cli/test_selftest.py",
}
"""Pattern of a whole command -> why it does not run here."""


def commands_of(page: Path) -> list[str]:
    """Indented lines that begin with a program's name, without their comments."""
    pattern = rf"^ {{4}}((?:{'|'.join(PROGRAMS)}) .*)$"
    found = re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [re.sub(r"\s{2,}#.*", "", line).strip() for line in found]


def why_not_run(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.fullmatch(pattern, command)), None)


@pytest.fixture(scope="module")
def tiny_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of width 256 with the first tokens of SmolLM2's vocabulary, and its chat template; all in F16."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    generator = torch.Generator().manual_seed(1)

    def weight(name: str, *shape: int, type: str = "F16") -> QuantTensor:
        return quantize_tensor(name, torch.randn(*shape, generator=generator) * 0.05, type)

    width, ff, kv = 256, 512, 128
    metadata = typed_metadata(GGUFFile.open(smollm2_path))
    tokens, types, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    known = tokens.value[:NUM_TOKENS]
    vocabulary = {
        "tokenizer.ggml.tokens": TypedValue(tokens.type, known),
        "tokenizer.ggml.token_type": TypedValue(types.type, types.value[:NUM_TOKENS]),
        "tokenizer.ggml.merges": TypedValue(
            merges.type, [pair for pair in merges.value if {pair.replace(" ", ""), *pair.split(" ")} <= set(known)]
        ),
        "llama.vocab_size": NUM_TOKENS,
    }
    tensors = [
        weight("token_embd.weight", NUM_TOKENS, width),
        quantize_tensor("output_norm.weight", torch.ones(width), "F32"),
    ]
    for layer in range(2):
        for kind, shape in {
            "attn_q": (width, width),
            "attn_k": (kv, width),
            "attn_v": (kv, width),
            "attn_output": (width, width),
            "ffn_gate": (ff, width),
            "ffn_up": (ff, width),
            "ffn_down": (width, ff),
        }.items():
            tensors.append(weight(f"blk.{layer}.{kind}.weight", *shape))
        for kind in ("attn_norm", "ffn_norm"):
            tensors.append(quantize_tensor(f"blk.{layer}.{kind}.weight", torch.ones(width), "F32"))
    sizes = {
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": width,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 64,
    }
    write_gguf(path, {**metadata, **vocabulary, **sizes}, tensors)
    return path


def write_rows(folder: Path) -> None:
    def lines(rows) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    chats = [
        {"messages": [{"role": "user", "content": f"Where is {thing}?"}, {"role": "assistant", "content": "Here."}]}
        for thing in ("the lamp", "the chest", "the key", "the boat", "the log", "the rope")
    ]
    (folder / "chat.jsonl").write_text(lines(chats))
    (folder / "extra.jsonl").write_text(lines(chats[:4]))
    (folder / "completions.jsonl").write_text(
        lines({"prompt": "The lamp is", "completion": " here."} for _ in range(4))
    )
    pairs = [{"prompt": f"Where is it, {k}?", "chosen": " Here.", "rejected": " No idea at all."} for k in range(4)]
    (folder / "pairs.jsonl").write_text(lines(pairs))
    (folder / "extra.csv").write_text("prompt,completion\n" + "The lamp is, here.\n" * 4)
    (folder / "template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "run.yaml").write_text("model: model.gguf\ndata: [chat.jsonl]\noutput: adapter.gguf\nmax_steps: 1\n")


@pytest.fixture(scope="module", autouse=True)
def _one_core() -> Iterator[None]:
    """Threads of a tiny model wait for one another longer than they compute, on a busy machine much longer."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two trained adapters of the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    write_rows(folder)
    made = {}
    for name, seed in (("adapter.gguf", 1), ("other.gguf", 2)):
        command = ["train", tiny_model, folder / "chat.jsonl", "-o", folder / name, "--max-steps", 2, "--seed", seed]
        assert main([str(part) for part in [*command, "--r", 4, "--learning-rate", 1e-2]]) == 0
        made[name] = (folder / name).read_bytes()
    return made


@pytest.fixture
def workplace(tiny_model: Path, adapters: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_rows(tmp_path)
    for name in ("model.gguf", "model-f16.gguf"):
        os.link(tiny_model, tmp_path / name)
    for name, content in adapters.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, folder: Path) -> None:
    program, *arguments = shlex.split(command)
    if "train" in arguments and "--resume" not in arguments:
        # Each command is for a first run.
        output = arguments[arguments.index("-o") + 1] if "-o" in arguments else "adapter.gguf"
        for path in folder.glob(f"{output}*"):
            path.unlink()
    if program == "torchrun":
        started = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
        done = subprocess.run(started, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
        return
    assert program == "pyggtrain", command
    assert main(arguments) == 0, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_in_the_order_of_the_page(page: Path, workplace: Path) -> None:
    commands = [command for command in commands_of(page) if why_not_run(command) is None]
    if page.name in ("tutorial.md", "howto.md", "adapters.md", "data.md"):
        assert len(commands) >= 3
    for command in commands:
        if page.name == "training.md" and command.startswith("torchrun --nproc-per-node 4"):
            # Four processes take minutes on two cores.
            command = command.replace("4", "2", 1)
        run(command, workplace)


def test_reasons_are_needed_and_name_tests_that_exist() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    for pattern, reason in NOT_RUN.items():
        assert any(re.fullmatch(pattern, command) for command in commands), f"{pattern}: no such command"
        for path in re.findall(r"tests/\S+\.py", reason):
            assert (ROOT / path).exists(), path


def test_python_of_the_howto_runs(workplace: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto.md").read_text(encoding="utf-8"), re.DOTALL)
    (workplace / "adapter.gguf").unlink()
    exec(compile(source, "howto.md", "exec"), {})
    assert (workplace / "adapter.gguf").exists()
