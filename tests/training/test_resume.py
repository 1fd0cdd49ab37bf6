"""A run that is killed at random moments, as often as it likes, ends in the bits of one that never was."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyggtrain.training.checkpoint import load_checkpoint
from pyggtrain.training.metrics import read_metrics

# One interpreter imports torch and forks a child for each life of a run: importing would be most of the time otherwise.
FORK = """
import json, os, resource, signal, sys, threading, time, traceback
from pathlib import Path
import torch, torch._dynamo
from pyggtrain.errors import PyggtrainError
from pyggtrain.training import trackers
from pyggtrain.training.interrupts import TrainingInterrupted
torch.set_num_threads(1)
sys.path.append(sys.argv[1])
from tiny_trainer import ROWS, make_trainer, weights
model = sys.argv[2]

def at_call(owner, name, call, act, after=False):
    function, calls = getattr(owner, name), iter(range(1, 100_000))
    def wrapped(*args, **arguments):
        is_due = next(calls) == call
        if is_due and not after:
            act(*args)
        result = function(*args, **arguments)
        if is_due and after:
            act(*args)
        return result
    setattr(owner, name, wrapped)

def half_a_line(metrics_file, metrics):
    with metrics_file._path.open("a") as file:
        file.write('{"step": ')
    kill()

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def arrange(trainer, kind, when):
    model = trainer.objective.model
    if kind == "loss":
        at_call(model, "loss", when, kill)
    elif kind == "update":
        at_call(trainer.optimizer._optimizer, "step", when, kill, after=True)
    elif kind in ("fsync", "replace", "replaced"):
        at_call(os, kind.removesuffix("d"), when, kill, after=kind == "replaced")
    elif kind == "metrics":
        at_call(trackers.MetricsFile, "_append", when, half_a_line)
    elif kind in ("SIGTERM", "SIGINT"):
        at_call(model, "loss", when, lambda *_: os.kill(os.getpid(), getattr(signal, kind)))
    elif kind == "time":
        threading.Timer(when / 1000, kill).start()
    elif kind == "full disk":
        limit = lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
        at_call(model, "loss", when, limit)

for line in sys.stdin:
    folder, kind, when, settings = json.loads(line)
    folder = Path(folder)
    child = os.fork()
    if child:
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
        continue
    code = 1
    try:
        resume = (folder / "a.gguf.checkpoint").exists()
        trainer = make_trainer(model, folder, held_out=ROWS[:3], resume=resume, **settings)
        arrange(trainer, kind, when)
        summary = trainer.run()
        torch.save({"weights": weights(trainer), "eval_loss": summary.eval_loss}, folder / "end.pt")
        code = 0
    except TrainingInterrupted:
        code = 130
    except PyggtrainError as error:
        (folder / "error.txt").write_text(str(error))
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
"""

SETTINGS = {
    "max_steps": 12,
    "save_steps": 2,
    "eval_steps": 3,
    "lora_dropout": 0.2,
    "neftune_noise_alpha": 5.0,
    "load_best_model_at_end": True,
    "weight_decay": 0.1,
}
# Kind of end -> exit code, and the largest number of its moment: calls, or milliseconds.
ENDS = {
    "loss": (-9, 24),
    "update": (-9, 12),
    "fsync": (-9, 8),
    "replace": (-9, 8),
    "replaced": (-9, 8),
    "metrics": (-9, 14),
    "time": (-9, 1500),
    "SIGTERM": (130, 24),
    "SIGINT": (130, 24),
    "full disk": (2, 24),
}


@pytest.fixture(scope="module")
def live(tiny_llama_path):
    """(folder, kind of end, when) -> exit code of one life of a run."""
    command = [sys.executable, "-c", FORK, str(Path(__file__).parent), str(tiny_llama_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def life(folder: Path, kind: str, when: int) -> int:
            server.stdin.write(json.dumps([str(folder), kind, when, SETTINGS]) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield life
        server.stdin.close()


@pytest.fixture(scope="module")
def straight(live, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    assert live(folder, "never", 0) == 0
    return folder


def same_ends(folder: Path, straight: Path) -> None:
    found, expected = (torch.load(place / "end.pt") for place in (folder, straight))
    assert torch.equal(found["weights"], expected["weights"]) and found["eval_loss"] == expected["eval_loss"]
    lines = [
        [
            (line["step"], line.get("loss"), line.get("eval_loss"))
            for line in read_metrics(place / "a.gguf.metrics.jsonl")
        ]
        for place in (folder, straight)
    ]
    assert lines[0] == lines[1]
    names = {path.name for path in folder.iterdir()} - {"error.txt"}
    assert names == {"a.gguf.checkpoint", "a.gguf.metrics.jsonl", "end.pt"}, "something is left behind"


@pytest.mark.parametrize("seed", range(6))
def test_random_ends_change_no_bit(live, straight, tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(12):
        kind = rng.choice(list(ENDS))
        code, most = ENDS[kind]
        found = live(tmp_path, kind, rng.randrange(1, most + 1))
        # A run that was nearly at its end may reach it first.
        assert found in (code, 0), kind
        if (tmp_path / "a.gguf.checkpoint").exists():
            load_checkpoint(tmp_path / "a.gguf.checkpoint")
        if found == 0:
            break
    else:
        assert live(tmp_path, "never", 0) == 0
    same_ends(tmp_path, straight)


@pytest.mark.parametrize("kind", list(ENDS))
def test_each_kind_of_end_changes_no_bit(live, straight, tmp_path, kind):
    code, most = ENDS[kind]
    # Late enough that something is saved; a timer's moment depends on the machine.
    found = live(tmp_path, kind, most // 2)
    assert found == code or (kind == "time" and found == 0)
    assert live(tmp_path, "never", 0) == 0
    same_ends(tmp_path, straight)


def test_a_full_disk_is_told_and_the_older_checkpoint_kept(live, tmp_path):
    # Held-out losses take two calls each, so the ninth comes after step 3.
    assert live(tmp_path, "full disk", 9) == 2
    text = (tmp_path / "error.txt").read_text()
    assert "a.gguf.checkpoint: writing failed after" in text and "bytes are free" in text
    assert load_checkpoint(tmp_path / "a.gguf.checkpoint").step == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf.checkpoint", "a.gguf.metrics.jsonl", "error.txt"}
