"""The whole road on a tiny random model with a real tokenizer: files, refusals, stop and resume, parity, odd paths."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import pyggtrain
from pyggtrain import api
from pyggtrain.cli import main
from pyggtrain.errors import ConfigError, DataError, ParityError
from pyggtrain.gguf import GGUFFile, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.training.output import OutputError
from pyggtrain.training.progress import Progress

FOLDER_NAME = "тест 日本 é"


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / FOLDER_NAME
    path.mkdir()
    return path


SHORT = {"r": 4, "learning_rate": 1e-2, "max_steps": 4, "num_threads": 1, "verify_tokens": 32, "eval_split": 0.1}
FLAGS = [word for name, value in SHORT.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def qwen2_model(tmp_path_factory, chat_model) -> Path:
    """The same as a qwen2 with its biases: an architecture that has no hand-written model here."""
    path = tmp_path_factory.mktemp(FOLDER_NAME) / "qwen2.gguf"
    llama = GGUFFile.open(chat_model)
    renamed = {name.replace("llama.", "qwen2."): value for name, value in typed_metadata(llama).items()}
    tensors = list(llama.tensors.values())
    for layer in range(2):
        for name, size in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32)):
            bias = torch.randn(size, generator=torch.Generator().manual_seed(layer)) * 0.1
            tensors.append(quantize_tensor(f"blk.{layer}.{name}.bias", bias, "F32"))
    write_gguf(path, {**renamed, "general.architecture": "qwen2"}, tensors)
    return path


def test_an_architecture_without_a_hand_written_model_is_trained_through_llama_cpps_graph(
    qwen2_model, chats, folder, capfd
):
    output = folder / "adapter.gguf"
    code = main(["train", str(qwen2_model), str(chats), "-o", str(output), *FLAGS])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "qwen2: model imported from llama.cpp's own graph" in captured.err
    assert "Parity with llama.cpp: passed" in captured.out
    adapter = GGUFFile.open(output)
    assert adapter.architecture == "qwen2" and len(adapter.tensors) == 2 * 2 * 7
    other = folder / "other.gguf"
    assert main(["train", str(qwen2_model), str(chats), "-o", str(other), "--model-impl", "native"]) == 2
    assert "no hand-written model" in capfd.readouterr().err


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(model: Path, data: Path, folder: Path, **settings) -> api.TrainResult:
    return pyggtrain.train(
        model, str(data), folder / "адаптер.gguf", progress=Progress(), **{**SHORT, "verify": False, **settings}
    )


def test_command_writes_adapter_record_metrics_and_report(chat_model, chats, folder, capfd):
    before = sha256(chat_model)
    output = folder / "adapter.gguf"
    code = main(["train", str(chat_model), str(chats), "-o", str(output), *FLAGS, "--sample-prompts", "Count to 3."])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert sha256(chat_model) == before

    for expected in (
        "attn_q x 2, attn_k x 2, attn_v x 2, attn_output x 2, ffn_gate x 2, ffn_up x 2, ffn_down x 2",
        "22 to train on, 2 held out; at most 256 tokens each",
        "tokens at a time, none: base file",
        "«one<|im_end|>»",
        "Parity with llama.cpp: passed",
        "llama-server -m",
        "llama-cli -m",
        "ollama create adapter -f",
    ):
        assert expected in captured.out, expected
    assert "step 4/4" in captured.err and "held-out loss" in captured.err

    names = {path.name.removeprefix("adapter.gguf") for path in folder.iterdir()}
    assert names == {"", ".json", ".metrics.jsonl", ".checkpoint", ".report.html", ".Modelfile"}
    modelfile = (folder / "adapter.gguf.Modelfile").read_text(encoding="utf-8")
    assert f"FROM {chat_model}\nADAPTER {output}\nTEMPLATE " in modelfile and modelfile.rstrip() in captured.out
    adapter = GGUFFile.open(output)
    assert adapter.metadata["general.type"] == "adapter" and len(adapter.tensors) == 28
    record = json.loads((folder / "adapter.gguf.json").read_text(encoding="utf-8"))
    assert record["settings"]["r"] == 4 and record["settings"]["model"] == str(chat_model)
    assert record["adapter"]["sha256"] == sha256(output) and record["data"]["files"][str(chats)] == sha256(chats)
    assert record["base"]["header_sha256"] == GGUFFile.open(chat_model).header_sha256
    assert record["parity"]["passed"] is True and record["result"]["num_steps"] == 4
    assert record["command"].startswith("pyggtrain train ") and "--learning-rate 0.01" in record["command"]
    assert {"pyggtrain", "torch", "python"} <= record["versions"].keys()
    page = (folder / "adapter.gguf.report.html").read_text(encoding="utf-8")
    text = "".join(ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n")).itertext())
    assert "Count to 3." in text and "Passed" in text and "logits that scale 0 changes" in text

    assert (
        main(
            [
                "verify",
                str(chat_model),
                str(output),
                "--max-tokens",
                "32",
                "--num-threads",
                "1",
                "--json",
                str(folder / "p.json"),
            ]
        )
        == 0
    )
    assert json.loads((folder / "p.json").read_text(encoding="utf-8"))["passed"] is True


def test_recorded_command_gives_the_same_settings(chat_model, chats, folder):
    import shlex

    from pyggtrain.cli.arguments import parse_settings
    from pyggtrain.training.config import build_config
    from pyggtrain.training.record import train_command

    config = build_config(
        {
            **SHORT,
            "model": chat_model,
            "data": [str(chats), "b c.jsonl"],
            "output": folder / "a.gguf",
            "use_rslora": True,
            "verify": False,
            "rank_pattern": {"attn_v": 8},
            "layers_to_transform": [1],
            "chat_template_kwargs": '{"enable_thinking": false}',
            "sample_prompts": ["it's?"],
        }
    )
    program, command, *words = shlex.split(train_command(config))
    settings, file, _ = parse_settings(words, "pyggtrain train")
    assert (program, command, file) == ("pyggtrain", "train", None)
    assert build_config(settings) == config


def test_dry_run_shows_the_plan_and_writes_nothing(chat_model, chats, folder, capfd):
    layers = ["--layers-to-transform", "1", "--rank-pattern", "attn_v=8", "--use-rslora"]
    assert main(["train", str(chat_model), str(chats), "-o", str(folder / "a.gguf"), *FLAGS, *layers, "--dry-run"]) == 0
    text = capfd.readouterr().out
    assert "in 7 pairs; r 4 to 8, factor 5.65685 to 8" in text
    assert "1 of 2 layers have no adapter: 0" in text
    assert list(folder.iterdir()) == []


def test_second_run_is_refused_and_overwrite_allows_it(chat_model, chats, folder, capfd):
    first = train(chat_model, chats, folder, max_steps=1)
    adapter = sha256(first.files.adapter)
    arguments = ["train", str(chat_model), str(chats), "-o", str(first.files.adapter), *FLAGS, "--no-verify"]
    assert main(arguments) == 2
    message = capfd.readouterr().err
    assert "адаптер.gguf: exists already" in message and "--overwrite" in message and "Traceback" not in message
    assert sha256(first.files.adapter) == adapter
    train(chat_model, chats, folder, max_steps=2, overwrite=True)
    assert sha256(first.files.adapter) != adapter


def test_base_or_a_link_to_it_is_no_output(chat_model, chats, folder):
    before = sha256(chat_model)
    link = folder / "адаптер.gguf"
    link.symlink_to(chat_model)
    with pytest.raises(OutputError, match="base file itself"):
        train(chat_model, chats, folder, overwrite=True)
    assert sha256(chat_model) == before


def test_same_seed_same_bytes_other_seed_other_bytes(chat_model, chats, tmp_path):
    hashes = []
    for number, seed in enumerate([1, 1, 2]):
        (tmp_path / str(number)).mkdir()
        hashes.append(sha256(train(chat_model, chats, tmp_path / str(number), seed=seed).files.adapter))
    assert hashes[0] == hashes[1] != hashes[2]


def test_settings_from_a_file_and_from_a_config_object(chat_model, chats, folder):
    config = folder / "run.yaml"
    lines = {**SHORT, "model": str(chat_model), "data": [str(chats)], "output": str(folder / "a.gguf"), "verify": False}
    config.write_text(json.dumps(lines), encoding="utf-8")
    result = pyggtrain.train(config=config, max_steps=1, progress=Progress())
    assert result.summary.num_steps == 1
    again = pyggtrain.TrainConfig(**{**lines, "data": (str(chats),), "overwrite": True})
    assert sha256(pyggtrain.train(config=again, max_steps=1, progress=Progress()).files.adapter) == sha256(
        result.files.adapter
    )
    with pytest.raises(ConfigError, match="learning_rte: no such setting"):
        pyggtrain.train(config=config, learning_rte=1)


def test_only_rows_whose_prompt_fills_the_window_is_an_error_before_training(chat_model, folder):
    data = folder / "long.jsonl"
    long = {"messages": [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "yes"}]}
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    data.write_text("".join(json.dumps(row) + "\n" for row in [*[good] * 9, long]), encoding="utf-8")
    settings = {"max_seq_length": 48, "too_long": "truncate", "bad_rows": "skip", "max_steps": 2}
    ready = api.prepare(
        pyggtrain.TrainConfig(model=str(chat_model), data=(str(data),), output=str(folder / "a.gguf"), **settings)
    )
    assert len(ready.data.rows) == 9
    assert any("long.jsonl:10" in line and "limit 48" in line for line in ready.data.lines())
    assert train(chat_model, data, folder, **settings).summary.loss > 0
    data.write_text(json.dumps(long) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"long\.jsonl:1: no learnt token is left"):
        train(chat_model, data, folder, overwrite=True, **settings)


def test_disagreement_with_llama_cpp_exits_with_3_and_keeps_everything(chat_model, chats, folder, monkeypatch, capfd):
    compare = api.verify_adapter

    def worse(*arguments, **named):
        report = compare(*arguments, **named)
        return replace(
            report, checks=(*report.checks, replace(report.checks[0], name="a broken bound", value=1.0, bound=0.0))
        )

    monkeypatch.setattr(api, "verify_adapter", worse)
    output = folder / "a.gguf"
    assert main(["train", str(chat_model), str(chats), "-o", str(output), *FLAGS]) == ParityError.exit_code == 3
    message = capfd.readouterr().err
    assert "a.gguf: llama.cpp computes something else than what was trained" in message and "a broken bound" in message
    assert output.exists() and "a broken bound" in (folder / "a.gguf.PARITY-FAILED.txt").read_text(encoding="utf-8")
    assert json.loads((folder / "a.gguf.json").read_text(encoding="utf-8"))["parity"]["passed"] is False
    assert "Failed:" in (folder / "a.gguf.report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(api, "verify_adapter", compare)
    assert main(["train", str(chat_model), str(chats), "-o", str(output), *FLAGS, "--overwrite"]) == 0
    assert not (folder / "a.gguf.PARITY-FAILED.txt").exists()


def start(*arguments: str, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pyggtrain", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    )


def test_ctrl_c_and_resume_end_in_the_same_adapter(chat_model, chats, folder, tmp_path, capfd):
    (tmp_path / "straight").mkdir()
    settings = {"max_steps": 60, "lora_dropout": 0.1}
    straight = train(chat_model, chats, tmp_path / "straight", **settings)
    output = folder / "a.gguf"
    arguments = [
        "train",
        str(chat_model),
        str(chats),
        "-o",
        str(output),
        *FLAGS,
        "--max-steps",
        "60",
        "--lora-dropout",
        "0.1",
        "--no-verify",
    ]
    process = start(*arguments, folder=folder)
    metrics, deadline = folder / "a.gguf.metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("grad_norm") >= 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Continue with the same command and --resume" in errors and "Traceback" not in errors
    assert {path.name for path in folder.iterdir()} == {"a.gguf.checkpoint", "a.gguf.metrics.jsonl"}

    assert main(arguments) == 2
    assert "not finished" in capfd.readouterr().err
    resumed = start(*arguments, "--resume", folder=folder)
    _, errors = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, errors
    assert sha256(output) == sha256(straight.files.adapter)


def test_full_disk_at_the_adapter_is_told_and_the_checkpoint_remains(chat_model, chats, folder):
    code = f"""
import resource, sys
from pyggtrain.cli import main
from pyggtrain.adapters import gguf_adapter
save = gguf_adapter.save
def on_full_disk(*arguments, **named):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    save(*arguments, **named)
gguf_adapter.save = on_full_disk
output = {str(folder / "a.gguf")!r}
sys.exit(main(["train", {str(chat_model)!r}, {str(chats)!r}, "-o", output, *{FLAGS!r}, "--no-verify"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    assert (
        "a.gguf: writing failed" in done.stderr and "bytes are free" in done.stderr and "Traceback" not in done.stderr
    )
    assert {path.name for path in folder.iterdir()} == {"a.gguf.checkpoint", "a.gguf.metrics.jsonl"}


@pytest.mark.parametrize("targets", [("attn_q", "attn_v"), ("all-linear",)])
@pytest.mark.parametrize("policy", ["none", "matmuls", "layers"])
def test_three_steps_on_the_cpu_with_every_policy(chat_model, chats, folder, targets, policy):
    result = train(chat_model, chats, folder, max_steps=3, target_modules=targets, gradient_checkpointing=policy)
    assert result.summary.loss > 0 and result.summary.num_skipped == 0


def test_targets_that_cannot_be_trained_are_refused_before_training(chat_model, chats, folder):
    with pytest.raises(pyggtrain.PyggtrainError, match="tied"):
        train(chat_model, chats, folder, target_modules=("output",))
    assert list(folder.iterdir()) == []


def test_torchrun_trains_one_adapter_with_two_processes(chat_model, chats, folder):
    """What one process does with twice the micro-batches; one writer, one plan on the screen, one comparison."""
    arguments = ["train", str(chat_model), str(chats), *FLAGS, "--per-device-train-batch-size", "2"]
    alone = ["-o", str(folder / "one.gguf"), "--gradient-accumulation-steps", "2"]
    assert main([*arguments, *alone]) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = [
        "-m",
        "--",
        "pyggtrain",
        *arguments,
        "-o",
        str(folder / "two.gguf"),
        "--gradient-accumulation-steps",
        "1",
    ]
    done = subprocess.run([*launcher, *together], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes x 2 x 1") == 1
    assert done.stdout.count("Parity with llama.cpp: passed") == 1
    records = [json.loads((folder / f"{name}.gguf.json").read_text(encoding="utf-8")) for name in ("one", "two")]
    losses, held_out = ([record["result"][name] for record in records] for name in ("loss", "eval_loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    assert records[1]["command"].startswith("torchrun --nproc-per-node 2 -m -- pyggtrain train ")
    assert {path.name.removeprefix("two.gguf") for path in folder.glob("two*")} == {
        path.name.removeprefix("one.gguf") for path in folder.glob("one*")
    }


def test_settings_reach_the_run_from_the_command_line(chat_model, chats, folder, capfd):
    """The further controls together, on the whole road, with parity of what is saved."""
    flags = [
        *("--method", "sft", "--neftune-noise-alpha", "5", "--optim", "schedule_free_adamw", "--eval-steps", "1"),
        *("--lr-scheduler-type", "constant", "--loraplus-lr-ratio", "4", "--load-best-model-at-end"),
        *("--early-stopping-patience", "3", "--report-to", "tensorboard"),
    ]
    output = folder / "adapter.gguf"
    assert main(["train", str(chat_model), str(chats), "-o", str(output), *FLAGS, *flags]) == 0
    captured = capfd.readouterr()
    assert "sft, noise on embeddings 5; schedule_free_adamw, lora_b 4 times faster" in captured.out
    assert "Parity with llama.cpp: passed" in captured.out
    assert list((folder / "adapter.gguf.tensorboard").glob("events.*"))
    record = json.loads((folder / "adapter.gguf.json").read_text(encoding="utf-8"))
    assert record["result"]["best_step"] is not None
    assert record["result"]["eval_loss"] <= record["result"]["first_eval_loss"]


def test_base_with_an_equal_header_and_other_weights_is_not_resumed(chat_model, chats, folder, tmp_path, capfd):
    base = tmp_path / "base.gguf"
    base.write_bytes(chat_model.read_bytes())
    arguments = ["train", str(base), str(chats), "-o", str(folder / "a.gguf"), *FLAGS, "--no-verify"]
    assert main(arguments) == 0
    content = bytearray(base.read_bytes())
    content[-1] ^= 1
    base.write_bytes(content)
    assert main([*arguments, "--resume"]) == 2
    assert "model: hash of the file" in capfd.readouterr().err


def test_run_that_cannot_fit_is_refused_before_anything_is_loaded(chat_model, chats, folder, monkeypatch):
    loaded = []
    load = api.models.load
    monkeypatch.setattr(
        api.models,
        "load",
        lambda *given, **named: loaded.append(named.get("is_checked", True)) or load(*given, **named),
    )
    with pytest.raises(pyggtrain.PyggtrainError, match=r"needs about .*max_memory is 1 MiB.* Lower"):
        train(chat_model, chats, folder, max_memory="1MiB")
    # Only the rehearsal was loaded, which has no memory.
    assert loaded == [False] and list(folder.iterdir()) == []


def test_micro_batch_follows_the_memory_and_the_step_stays(chat_model, chats, folder):
    result = train(chat_model, chats, folder, max_memory="1TiB", max_steps=1)
    settings = json.loads(result.files.record.read_text())["settings"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8
    assert settings["per_device_train_batch_size"] == 8


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_preferences_are_trained_from_a_file_and_served_by_llama_cpp(chat_model, folder, capfd, method):
    pairs = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"Count to {number}.", "chosen": [{"role": "assistant", "content": " one" * number}]}
        | {"rejected": [{"role": "assistant", "content": " two" * number}]}
        for number in range(1, 25)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    output = folder / "adapter.gguf"
    flags = ["--method", method, "--max-steps", "12"]
    assert main(["train", str(chat_model), str(pairs), "-o", str(output), *FLAGS, *flags]) == 0
    captured = capfd.readouterr()
    assert f"{method}, beta 0.1" in captured.out and "Parity with llama.cpp: passed" in captured.out
    lines = [json.loads(line) for line in (folder / "adapter.gguf.metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval_rewards/accuracies"] for line in lines if "eval_loss" in line]
    assert accuracies[-1] == 1
    assert "Preferences" in (folder / "adapter.gguf.report.html").read_text(encoding="utf-8")
    assert main(["train", str(chat_model), str(pairs), "-o", str(folder / "sft.gguf"), *FLAGS]) == 2
