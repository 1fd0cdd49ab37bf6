"""Adapters for models of experts that end llama.cpp's process, or that it applies wrongly: none reaches it.

Each case is refused with its reason where adapters are read, by every way in, and once more by the bridge. That the
danger is real is shown on a llama-server, which dies of the worst ones.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from dense_models import WIDTH
from expert_models import EXPERTS, FF, write_experts

import pyggtrain
from pyggtrain import _bridge, api
from pyggtrain.adapters import gguf_adapter
from pyggtrain.errors import PyggtrainError
from pyggtrain.gguf import GGUFFile, TypedValue, quantize_tensor, write_gguf
from pyggtrain.training.progress import Progress
from pyggtrain.validation.llama_server import ServerRuntime

STACK, ROUTER, EMBEDDING = "blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight", "token_embd.weight"
SHARED, RANK = "blk.0.ffn_up_shexp.weight", 4
A, B = (EXPERTS, RANK, WIDTH), (EXPERTS, FF, RANK)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """An adapter of one pair.

    Attributes:
        said: part of what a person is told.
        name: tensor that the pair is on.
        lora_a, lora_b: shapes; -1 stands for the size of the vocabulary.
        metadata: keys besides the usual ones, or instead of them; None leaves one out.
        base: its architecture; "qwen3moe" has no head of its own here.
    """

    said: str
    name: str = STACK
    lora_a: Shape = A
    lora_b: Shape = B
    metadata: dict[str, object] = field(default_factory=dict)
    base: str = "qwen2moe"


NEEDED = r"needed lora_a \[4, 4, 64\] and lora_b \[4, 64, 4\]"
# llama.cpp aborts, or reads beyond the adapter's end: when it loads them, or in the first decode.
DEADLY = {
    "one pair for all experts": Case(NEEDED, lora_a=A[1:], lora_b=B[1:]),
    "half of the experts": Case(NEEDED, lora_a=(2, RANK, WIDTH), lora_b=(2, FF, RANK)),
    "half of lora_a's experts": Case(NEEDED, lora_a=(2, RANK, WIDTH)),
    "experts side by side in a matrix": Case(
        r"needed lora_a \[4, 16, 64\]", lora_a=(EXPERTS * RANK, WIDTH), lora_b=(FF, EXPERTS * RANK)
    ),
    "two adapters in one": Case("does not fit", lora_a=(2, *A), lora_b=(2, *B)),
    "experts of a router": Case("does not fit", ROUTER, (2, RANK, WIDTH), (2, EXPERTS, RANK)),
    "experts of the shared one": Case("does not fit", SHARED, A, B),
    "tied embedding": Case("llama.cpp aborts", EMBEDDING, (-1, RANK), (WIDTH, RANK), base="qwen3moe"),
    "alpha is a whole number": Case("of type u32", metadata={"adapter.lora.alpha": TypedValue("u32", 8)}),
    "alpha is a text": Case("of type str", metadata={"adapter.lora.alpha": "8"}),
    "type is a number": Case("adapter.type", metadata={"adapter.type": TypedValue("u32", 1)}),
    "general type is a number": Case("general.type", metadata={"general.type": TypedValue("u32", 1)}),
    "architecture is a number": Case("of type u32", metadata={"general.architecture": TypedValue("u32", 1)}),
}
# llama.cpp refuses some with its own words, and takes others and computes something.
WRONG = {
    "half of lora_b's experts": Case(NEEDED, lora_b=(2, FF, RANK)),
    "more experts than there are": Case(NEEDED, lora_a=(8, RANK, WIDTH), lora_b=(8, FF, RANK)),
    "experts come last": Case("does not fit", lora_a=(RANK, WIDTH, EXPERTS), lora_b=(FF, RANK, EXPERTS)),
    "halves turned round": Case("does not fit", lora_a=(EXPERTS, WIDTH, RANK), lora_b=(EXPERTS, RANK, FF)),
    "halves of two ranks": Case("does not fit", lora_a=(EXPERTS, RANK + 1, WIDTH)),
    "a layer that is not there": Case("there is no such tensor", "blk.7.ffn_up_exps.weight"),
    "head of a tied model": Case("tied", "output.weight", (RANK, WIDTH), (-1, RANK), base="qwen3moe"),
    "no type": Case("adapter.type = None", metadata={"adapter.type": None}),
    "no general type": Case("general.type = None", metadata={"general.type": None}),
    "no architecture": Case("general.architecture", metadata={"general.architecture": None}),
    "another architecture": Case("is for architecture 'llama'", metadata={"general.architecture": "llama"}),
}
CASES = DEADLY | WRONG


@pytest.fixture(scope="module")
def bases(smollm2: GGUFFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> the model."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        name: write_experts(folder / f"{name}.gguf", name, smollm2, "Q8_0", is_tied=name == "qwen3moe")
        for name in ("qwen2moe", "qwen3moe")
    }


@pytest.fixture(scope="module")
def hostile(smollm2: GGUFFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The cases' files."""
    folder = tmp_path_factory.mktemp("hostile")
    vocabulary = smollm2.tensors[EMBEDDING].shape[0]
    generator = torch.Generator().manual_seed(0)
    paths = {}
    for label, case in CASES.items():
        keys: dict[str, object] = {
            "general.type": "adapter",
            "general.architecture": case.base,
            "adapter.type": "lora",
            "adapter.lora.alpha": TypedValue("f32", 8.0),
            **case.metadata,
        }
        halves = []
        for half, shape in (("lora_a", case.lora_a), ("lora_b", case.lora_b)):
            sizes = [vocabulary if size < 0 else size for size in shape]
            values = 0.1 * torch.randn(sizes, generator=generator)
            halves.append(quantize_tensor(f"{case.name}.{half}", values, "F32"))
        paths[label] = folder / f"{label}.gguf"
        write_gguf(paths[label], {key: value for key, value in keys.items() if value is not None}, halves)  # type: ignore[misc]
    return paths


@pytest.mark.parametrize("label", CASES)
def test_it_is_refused_where_adapters_are_read(label: str, hostile: dict[str, Path], bases: dict[str, Path]) -> None:
    case = CASES[label]
    with pytest.raises(PyggtrainError, match=case.said) as caught:
        gguf_adapter.check_against_base(gguf_adapter.load(hostile[label]), GGUFFile.open(bases[case.base]))
    assert str(hostile[label]) in str(caught.value)


# A process of its own: what gets through would end it.
TRY_ALL = """
import json, sys
import torch
from pyggtrain import _bridge
from pyggtrain.errors import PyggtrainError

for base, adapters in json.load(sys.stdin):
    session = _bridge.Session(base, num_ctx=32, num_ubatch=32, num_threads=1)
    logits = torch.from_dlpack(session.logits([1, 2, 3]))
    for adapter in adapters:
        print(adapter, flush=True)
        try:
            session.set_adapters([(session.load_adapter(adapter), 1.0)])
        except PyggtrainError:
            continue
        session.logits([1, 2, 3])
        sys.exit("was taken")
    assert torch.equal(torch.from_dlpack(session.logits([1, 2, 3])), logits)
print("all were refused")
"""


def test_the_bridge_refuses_all_of_them_and_goes_on(hostile: dict[str, Path], bases: dict[str, Path]) -> None:
    tasks = [
        (str(base), [str(hostile[label]) for label, case in CASES.items() if case.base == name])
        for name, base in bases.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    assert done.stdout.endswith("all were refused\n"), f"{done.returncode}: {done.stdout[-200:]}{done.stderr[-500:]}"


@pytest.mark.slow
@pytest.mark.parametrize("label", ["one pair for all experts", "tied embedding", "alpha is a whole number"])
def test_a_llama_server_dies_of_it(
    label: str,
    hostile: dict[str, Path],
    bases: dict[str, Path],
    start_server: Callable[[Path, Path], AbstractContextManager[ServerRuntime]],
) -> None:
    # It tries its model with one decode before it says that it is ready.
    with (
        pytest.raises(pytest.fail.Exception, match=r"llama-server did not start \(exit status -"),
        start_server(bases[CASES[label].base], hostile[label]),
    ):
        pass


WAYS: dict[str, Callable[[Path, Path, Path], object]] = {
    "verify": lambda base, adapter, folder: pyggtrain.verify(base, adapter, ignore_hash=True),
    "merge": lambda base, adapter, folder: api.merge(base, [(adapter, 1.0)], folder / "out.gguf"),
    "exact_matches": lambda base, adapter, folder: api.exact_matches(base, adapter, folder / "chat.jsonl", max_rows=1),
    "train": lambda base, adapter, folder: pyggtrain.train(
        base, str(folder / "chat.jsonl"), folder / "out.gguf", init_adapter=str(adapter), progress=Progress()
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_in_hands_one_to_llama_cpp(
    way: str, hostile: dict[str, Path], bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = {"messages": [{"role": "user", "content": "Define."}, {"role": "assistant", "content": "Enough."}]}
    (tmp_path / "chat.jsonl").write_text(20 * (json.dumps(chat) + "\n"))

    def refuse(*arguments: object) -> None:
        raise AssertionError("llama.cpp was given the adapter")

    monkeypatch.setattr(_bridge.Session, "load_adapter", refuse)
    for label in ("half of the experts", "tied embedding", "alpha is a whole number"):
        case = CASES[label]
        with pytest.raises(PyggtrainError, match=case.said):
            WAYS[way](bases[case.base], hostile[label], tmp_path)
    assert not (tmp_path / "out.gguf").exists()
