"""`pyggtrain adapter`, `pyggtrain merge`, and every command of docs/adapters.md."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyggtrain.adapters import gguf_adapter
from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.cli import main
from pyggtrain.cli.merge import scaled
from pyggtrain.errors import ParityError
from pyggtrain.gguf import GGUFFile
from pyggtrain.validation import merge_parity

MERGE_Q4_0 = ("merge", "model.gguf", "adapter.gguf", "m.gguf", "--type", "Q4_0", "--max-tokens", "24")
DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"


def write_adapter(path, base, *, seed, rank):
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, info in base.tensor_infos.items():
        if len(info.shape) == 2 and name != "token_embd.weight":
            num_out, num_in = info.shape
            lora_a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
            pairs[name] = lora_a, torch.randn(num_out, rank, generator=generator) * 0.1
    gguf_adapter.write(path, AdapterFile(path, base.architecture, float(rank), pairs, {}))


@pytest.fixture
def files(chat_model, chats, tmp_path, monkeypatch):
    """A folder with what the documentation's commands name, and the current one."""
    shutil.copy(chat_model, tmp_path / "model.gguf")
    shutil.copy(chats, tmp_path / "chat.jsonl")
    base = GGUFFile.open(chat_model)
    write_adapter(tmp_path / "adapter.gguf", base, seed=1, rank=4)
    write_adapter(tmp_path / "other.gguf", base, seed=2, rank=3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd, *words):
    code = main(list(words))
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def test_commands_of_the_documentation(files, capfd):
    commands = re.findall(r"^ {4}pyggtrain (.+)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(commands) == 10
    # Fewer tokens say the same, in less time.
    fewer = {"merge": ["--max-tokens", "24"], "train": ["--verify-tokens", "24", "--num-threads", "1"]}
    for command in commands:
        code, _, err = run(capfd, *shlex.split(command), *fewer.get(command.split()[0], []))
        assert code == 0, f"{command}\n{err}"
    assert (files / "again.gguf").read_bytes() == (files / "adapter.gguf").read_bytes()
    base, merged = GGUFFile.open("model.gguf"), GGUFFile.open("q8.gguf")
    assert {info.type for name, info in merged.tensor_infos.items() if "attn_v" in name} == {"F16"}
    assert merged.tensor_infos["blk.0.attn_q.weight"].type == "Q8_0" != base.tensor_infos["blk.0.attn_q.weight"].type
    trained = gguf_adapter.load("more.gguf")
    assert {lora_b.shape[-1] for _, lora_b in trained.pairs.values()} == {4} and trained.alpha == 4.0


def test_info_shows_kinds_ranks_factors_and_norms(files, capfd):
    code, out, _ = run(capfd, "adapter", "info", "adapter.gguf")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("attn_k.weight"))
    words = line.split()
    assert words[1:5] == ["2", "4", "1", f"{2 * 4 * (64 + 32):,}"] and float(words[5]) > 0


def test_cut_says_what_it_loses(files, capfd):
    code, out, _ = run(capfd, "adapter", "add", "adapter.gguf", "other.gguf", "small.gguf", "--rank", "2")
    lost = re.search(r"Cut to rank 2: ([\d.]+) % of the update's norm is lost", out)
    assert code == 0 and 20 < float(lost[1]) < 90
    assert {lora_b.shape[-1] for _, lora_b in gguf_adapter.load("small.gguf").pairs.values()} == {2}


def test_existing_output_is_refused_and_replaced_on_demand(files, capfd):
    for command in (
        ["adapter", "scale", "adapter.gguf", "2", "other.gguf"],
        ["adapter", "add", "adapter.gguf", "other.gguf"],
        ["merge", "model.gguf", "adapter.gguf", "other.gguf", "--no-verify"],
    ):
        before = (files / "other.gguf").read_bytes()
        code, _, err = run(capfd, *command)
        assert code == 2 and "exists already" in err
        assert (files / "other.gguf").read_bytes() == before
        assert run(capfd, *command, "--overwrite")[0] == 0
        assert (files / "other.gguf").read_bytes() != before


def test_merge_tells_what_was_rounded_and_compares(files, capfd):
    code, out, err = run(capfd, *MERGE_Q4_0, "--data", "chat.jsonl")
    assert code == 0, err
    assert re.search(r"^\s*15\s+F32\s+Q4_0\s+\d+\.\d+ %$", out, flags=re.MULTILINE)
    assert "5 tensors copied byte for byte" in out
    assert "Parity with llama.cpp: passed (statistical)" in out
    assert re.search(r"mean KL\(base \+ adapter \|\| merged\) +\S+ nats +<= \S+ nats +ok", out)


def test_merge_outside_its_bound_exits_with_3_and_keeps_the_file(files, capfd, monkeypatch):
    # As if the merge had noted a fiftieth of its rounding.
    honest = merge_parity._write_random_error

    def understate(path, base, rounding, adaptable):
        honest(path, base, {name: replace(r, rms=r.rms / 50) for name, r in rounding.items()}, adaptable)

    monkeypatch.setattr(merge_parity, "_write_random_error", understate)
    monkeypatch.setattr(merge_parity, "_with_head_error", lambda logits, inputs, rms: list(logits))
    code, out, _ = run(capfd, *MERGE_Q4_0)
    assert code == ParityError.exit_code and "FAILED" in out
    assert (files / "m.gguf").exists()


def test_merge_refuses_pairs_that_llama_cpp_ignores(files, capfd):
    base = GGUFFile.open("model.gguf")
    file = gguf_adapter.load("adapter.gguf")
    rows = base.tensor_infos["token_embd.weight"].shape[0]
    pairs = {**file.pairs, "token_embd.weight": (torch.ones(rows, 2), torch.ones(64, 2))}
    gguf_adapter.write("tied.gguf", replace(file, pairs=pairs))
    code, _, err = run(capfd, "merge", "model.gguf", "tied.gguf", "m.gguf")
    assert code == 2 and "token_embd.weight" in err and not (files / "m.gguf").exists()


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("a.gguf", ("a.gguf", 1.0)),
        ("a.gguf:0.5", ("a.gguf", 0.5)),
        ("C:/a.gguf", ("C:/a.gguf", 1.0)),
        ("C:/a.gguf:-2", ("C:/a.gguf", -2.0)),
        ("odd.gguf:3", ("odd.gguf:3", 1.0)),
    ],
)
def test_scale_after_a_colon(tmp_path, monkeypatch, text, meaning):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.gguf:3").touch()
    assert scaled(text) == meaning


@pytest.mark.parametrize("words", [["--tensor-type", "attn_v"], ["--type", "Q4_Z"], ["--imatrix", "none.dat"]])
def test_mistakes_are_told_without_a_trace(files, capfd, words):
    code, _, err = run(capfd, "merge", "model.gguf", "adapter.gguf", "m.gguf", *words)
    assert code == 2 and "Traceback" not in err and words[1] in err
