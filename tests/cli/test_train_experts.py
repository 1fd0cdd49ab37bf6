"""The whole road for mixtures of experts: the plan, its memory, the run, the proof, and the same bytes again."""

import subprocess
import sys
from pathlib import Path

import pytest
from expert_models import EXPERTS, LAYERS, write_experts

from pyggtrain.adapters import gguf_adapter
from pyggtrain.cli import main
from pyggtrain.gguf import GGUFFile

SHORT = {"--r": "4", "--learning-rate": "1e-2", "--max-steps": "2", "--num-threads": "1", "--verify-tokens": "32"}
FLAGS = [word for pair in SHORT.items() for word in pair]


@pytest.fixture(scope="module")
def expert_model(smollm2: GGUFFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("experts") / "qwen2moe.gguf", "qwen2moe", smollm2, "Q8_0")


def arguments(model: Path, chats: Path, output: Path, *more: str) -> list[str]:
    return ["train", str(model), str(chats), "-o", str(output), *FLAGS, *more]


def test_every_kind_is_counted_trained_and_proven_within_the_memory_allowed(
    expert_model: Path, chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.gguf"
    code = main(arguments(expert_model, chats, output, "--max-memory", "2GiB"))
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "Parity with llama.cpp: passed" in captured.out
    for kind in ("gate", "up", "down"):
        assert f"ffn_{kind}_exps x {LAYERS}" in captured.out and f"ffn_{kind}_shexp x {LAYERS}" in captured.out
    pairs = gguf_adapter.load(output).pairs
    assert not any("ffn_gate_inp" in name for name in pairs), "a router was trained without being asked for"
    for name, (lora_a, lora_b) in pairs.items():
        assert lora_a.shape[:-2] == ((EXPERTS,) if name.endswith("_exps.weight") else ()), name
        assert lora_b.flatten(-2).any(-1).all(), f"{name}: not every expert learnt"


def test_the_same_seed_gives_the_same_bytes_in_a_fresh_process(expert_model: Path, chats: Path, tmp_path: Path) -> None:
    running = {}
    for label, seed in (("once", "3"), ("again", "3"), ("other", "4")):
        folder = tmp_path / label
        folder.mkdir()
        more = ("--seed", seed, "--no-verify", "--lora-dropout", "0.1")
        command = [sys.executable, "-m", "pyggtrain", *arguments(expert_model, chats, folder / "a.gguf", *more)]
        running[label] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    written = {}
    for label, process in running.items():
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        written[label] = (tmp_path / label / "a.gguf").read_bytes()
    assert written["once"] == written["again"] != written["other"]
