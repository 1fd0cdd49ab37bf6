"""A model whose layers are split over processes: the losses of one process, and an end instead of a hang."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyggtrain.errors import ConfigError
from pyggtrain.gguf import GGUFFile, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.pipeline import shares_of, split_layers
from pyggtrain.training.processes import Processes

_spec = importlib.util.spec_from_file_location("test_processes", Path(__file__).with_name("test_processes.py"))
processes_tests = importlib.util.module_from_spec(_spec)
sys.modules["test_processes"] = processes_tests
_spec.loader.exec_module(processes_tests)

SPLIT = {"split_mode": "layer", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ONE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.fixture(scope="module")
def deep_llama_path(tiny_llama_path, tmp_path_factory):
    """The tiny model with five layers."""
    file, path = GGUFFile.open(tiny_llama_path), tmp_path_factory.mktemp("deep") / "deep.gguf"
    generator = torch.Generator().manual_seed(4)
    tensors = [tensor for name, tensor in file.tensors.items() if not name.startswith("blk.")]
    for layer in range(5):
        for name, tensor in file.tensors.items():
            if name.startswith("blk.0."):
                values = torch.randn(tensor.shape, generator=generator) * 0.15 + (len(tensor.shape) == 1)
                tensors.append(quantize_tensor(name.replace("blk.0.", f"blk.{layer}."), values, "F32"))
    write_gguf(path, {**typed_metadata(file), "llama.block_count": 5}, tensors)
    return path


@pytest.fixture(scope="module")
def fork_server(deep_llama_path):
    yield from processes_tests.serve_forks(deep_llama_path)


@pytest.fixture
def run_processes(fork_server, tmp_path):
    return processes_tests.runner(fork_server, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "orpo", "pairs": True},
        {"method": "dpo", "pairs": True, "precompute_ref_log_probs": True},
        {"gradient_checkpointing": "layers"},
        {"gradient_checkpointing": "matmuls", "packing": True, "max_seq_length": 24},
    ],
    ids=str,
)
def test_layers_on_several_processes_compute_what_one_process_does(run_processes, settings):
    """Rows of many lengths that do not divide evenly, unequal parts, noise on embeddings."""
    settings = {"max_steps": 5, "neftune_noise_alpha": 5.0, "num_rows": 19, "num_held_out": 5, **settings}
    one = run_processes(1, **ONE, **settings)
    two = run_processes(2, **SPLIT, tensor_split=[3, 1], **settings)
    four = run_processes(4, **SPLIT, **settings)
    assert one.codes == [0] and two.codes == [0, 0] and four.codes == [0] * 4
    for several in (two, four):
        assert several.losses == pytest.approx(one.losses, rel=1e-5)
        assert several.eval_loss == pytest.approx(one.eval_loss, rel=1e-5)
        # The first process has the pairs of all layers in the end.
        torch.testing.assert_close(several.weights(0), one.weights(0), rtol=1e-3, atol=1e-5)
    assert one.losses[0] != one.losses[-1] and all(math.isfinite(loss) for loss in one.losses)


def test_fewer_micro_batches_than_processes_and_rows_without_learnt_tokens(run_processes):
    settings = {"max_steps": 3, "num_rows": 3, "masks_last": True, "per_device_train_batch_size": 1}
    one = run_processes(1, gradient_accumulation_steps=2, **settings)
    three = run_processes(3, gradient_accumulation_steps=2, split_mode="layer", **settings)
    assert three.codes == [0, 0, 0] and three.losses == pytest.approx(one.losses, rel=1e-5)


def test_clipping_is_by_the_norm_over_all_processes(run_processes):
    # With its usual epsilon AdamW does not see how large gradients are.
    settings = {"max_steps": 4, "max_grad_norm": 1e-2, "adam_epsilon": 1e-2}
    one, two = run_processes(1, **ONE, **settings), run_processes(2, **SPLIT, **settings)
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    norms = [
        [line["grad_norm"] for line in read_metrics(run.folder / "a.gguf.metrics.jsonl") if "loss" in line]
        for run in (one, two)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and min(norms[0]) > 1e-2


def test_a_stop_on_one_process_stops_all_and_they_resume_bit_for_bit(run_processes):
    settings = {**SPLIT, "max_steps": 6, "lora_dropout": 0.2, "load_best_model_at_end": True, "num_held_out": 4}
    straight = run_processes(3, folder="straight", **settings)
    stopped = run_processes(3, "stop", folder="stopped", **settings)
    assert stopped.codes == [130, 130, 130] and "--resume" in stopped.words(0)
    resumed = run_processes(3, folder="stopped", resume=True, **settings)
    assert resumed.codes == [0, 0, 0] and resumed.losses == straight.losses
    assert torch.equal(resumed.weights(0), straight.weights(0)) and resumed.eval_loss == straight.eval_loss
    cut = run_processes(3, folder="stopped", resume=True, **{**settings, "tensor_split": [3, 1, 1]})
    assert cut.codes == [2, 2, 2] and "layers of the processes: '0-2, 3-3, 4-4', the checkpoint has" in cut.words(0)


@pytest.mark.parametrize("scenario", ["kill", "raise", "fault"])
def test_a_process_that_ends_ends_all_with_a_message(run_processes, scenario):
    outcome = run_processes(3, scenario, **SPLIT)
    assert outcome.seconds < 60
    assert outcome.codes == {"kill": [2, -9, 2], "raise": [2, 2, 2], "fault": [2, 1, 2]}[scenario]
    for rank in (0, 2):
        assert f"process {rank} of 3: another process ended" in outcome.words(rank)
    if scenario == "fault":
        assert "ValueError: a fault of process 1" in outcome.words(1)


def test_a_process_that_hangs_is_given_up(run_processes):
    outcome = run_processes(2, "hang", timeout_s=5, **SPLIT)
    assert outcome.codes == [2, -9] and outcome.seconds < 60
    assert "did not answer within 5 s" in outcome.words(0)


@pytest.mark.parametrize(
    ("sizes", "shares", "layers"),
    [
        ([1] * 8, [1, 1], "0-3, 4-7"),
        ([1] * 8, [3, 1], "0-5, 6-7"),
        ([1] * 5, [1, 1, 1], "0-1, 2-2, 3-4"),
        ([1] * 3, [1, 100, 1], "0-0, 1-1, 2-2"),
        ([4, 1, 1, 1, 1], [1, 1], "0-0, 1-4"),
        ([1] * 4, [1], "0-3"),
    ],
)
def test_layers_are_cut_by_shares_and_no_process_is_left_without(sizes, shares, layers):
    assert str(split_layers(sizes, shares)) == layers


def test_settings_that_a_split_cannot_have_are_named():
    with pytest.raises(ConfigError, match="3 processes for 2 layers"):
        split_layers([1, 1], [1, 1, 1])
    needed = {"model": "m", "data": ("d",), "output": "o"}
    config = TrainConfig(**needed, split_mode="layer", tensor_split=(1, 1))
    with pytest.raises(ConfigError, match="2 shares for 3 processes"):
        shares_of(config, Processes(rank=0, count=3, is_split=True), None)
    with pytest.raises(ConfigError, match="tensor_split: has no effect without split_mode layer"):
        TrainConfig(**needed, tensor_split=(1, 1))
    with pytest.raises(ConfigError, match="needed: numbers above 0"):
        TrainConfig(**needed, split_mode="layer", tensor_split=(1, 0))


@pytest.mark.slow
def test_command_over_two_processes_writes_the_adapter_that_one_process_writes(smollm2_path, tmp_path):
    turns = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello, and good morning."}]
    data = tmp_path / "chat.jsonl"
    data.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    settings = ["--max-steps", "2", "--per-device-train-batch-size", "1", "--gradient-accumulation-steps", "2"]
    settings += ["--r", "4", "--num-threads", "1", "--verify-tokens", "20"]
    program = ["-c", "import sys; from pyggtrain.cli import main; sys.exit(main(sys.argv[1:]))"]
    script = tmp_path / "command.py"
    script.write_text(program[1])
    losses = []
    for name, start, extra in (
        ("one", [sys.executable, script], []),
        (
            "two",
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--", script],
            ["--split-mode", "layer", "--tensor-split", "1", "2"],
        ),
    ):
        output = tmp_path / f"{name}.gguf"
        command = [*start, "train", smollm2_path, data, "-o", output, *settings, *extra]
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in read_metrics(Path(f"{output}.metrics.jsonl")) if "loss" in line])
        assert "PARITY" not in done.stdout
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert "0-9, 10-29 on 2 processes" in done.stdout
    one, two = (GGUFFile.open(tmp_path / f"{name}.gguf").tensors for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        mine, theirs = (part.blocks.view(torch.float32) for part in (two[name], tensor))
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=1e-5)
