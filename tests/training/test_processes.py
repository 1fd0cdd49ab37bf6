"""Several processes with gloo on one machine: the losses of one process, one writer, and an end instead of a hang."""

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.processes import Processes, join_processes

# One interpreter imports torch and forks the processes of all runs, which come as lines of JSON: otherwise importing
# would be most of the time. Optimisers import torch._dynamo.
FORK = """
import json, os, signal, sys, time, traceback
from array import array
from pathlib import Path
import torch, torch._dynamo, torch.distributed
from pyggtrain.data.examples import Example
from pyggtrain.errors import PyggtrainError
from pyggtrain.training.interrupts import TrainingInterrupted
from pyggtrain.training.processes import join_processes
torch.set_num_threads(1)
sys.path.append(sys.argv[1])
from tiny_trainer import make_pairs, make_rows, make_trainer, weights
model_path = sys.argv[2]

def run(rank, folder, scenario, settings):
    is_split = settings.get("split_mode") == "layer"
    processes = join_processes(settings.pop("timeout_s", 60), is_split=is_split)
    if scenario == "raise" and rank == 1:
        raise PyggtrainError("rank 1 cannot read its data")
    if scenario == "differ" and rank == 1:
        settings["learning_rate"] = 0.5
    rows = make_rows(settings.pop("num_rows", 11))
    if settings.pop("masks_last", False):
        last = rows[-1]
        rows[-1] = Example(last.input_ids, array("i", [-100] * last.num_tokens), last.source)
    num_held_out = settings.pop("num_held_out", 0)
    held_out = make_rows(num_held_out, seed=8)
    if settings.pop("pairs", False):
        rows, held_out = make_pairs(len(rows)), make_pairs(num_held_out)
    trainer = make_trainer(model_path, folder, rows=rows, held_out=held_out, processes=processes, **settings)
    # Where the model is split, the last process alone computes losses, and all of them run layers.
    model, name = trainer.objective.model, "run_own_layers" if is_split else "loss"
    compute, calls = getattr(model, name), iter(range(1, 10_000))
    def counted(*arguments):
        if next(calls) == 3 and rank == 1:
            if scenario == "fault":
                raise ValueError("a fault of process 1")
            if scenario == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if scenario == "hang":
                time.sleep(600)
            if scenario == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
        return compute(*arguments)
    setattr(model, name, counted)
    summary = trainer.run()
    torch.save({"weights": weights(trainer), "eval_loss": summary.eval_loss}, folder / f"{rank}.pt")

def start(rank, count, port, folder, scenario, settings):
    child = os.fork()
    if child:
        return child
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        run(rank, folder, scenario, settings)
        code = 0
    except TrainingInterrupted as error:
        (folder / f"{rank}.txt").write_text(str(error))
        code = 130
    except PyggtrainError as error:
        (folder / f"{rank}.txt").write_text(str(error))
        code = 2
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)

for line in sys.stdin:
    count, port, folder, scenario, settings = json.loads(line)
    children = [start(rank, count, port, Path(folder), scenario, settings) for rank in range(count)]
    codes = []
    for rank, child in enumerate(children):
        if scenario == "hang" and rank == 1:
            os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(codes), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """What the processes of a run did: exit codes, last words, seconds."""

    codes: list[int]
    folder: Path
    seconds: float

    def words(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text()

    def weights(self, rank: int) -> torch.Tensor:
        return torch.load(self.folder / f"{rank}.pt")["weights"]

    @property
    def eval_loss(self) -> float:
        return torch.load(self.folder / "0.pt")["eval_loss"]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in read_metrics(self.folder / "a.gguf.metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def fork_server(tiny_llama_path):
    yield from serve_forks(tiny_llama_path)


def serve_forks(model: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", FORK, str(Path(__file__).parent), str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def run_processes(fork_server, tmp_path):
    return runner(fork_server, tmp_path)


def runner(fork_server, tmp_path) -> Callable[..., Outcome]:
    """(number of processes, scenario, settings of `make_trainer`) -> what they did."""

    def run(count: int, scenario: str = "train", folder: str | None = None, **settings) -> Outcome:
        place = tmp_path / (folder or f"{count}-{scenario}")
        place.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = time.monotonic()
        fork_server.stdin.write(json.dumps([count, port, str(place), scenario, settings]) + "\n")
        fork_server.stdin.flush()
        return Outcome(json.loads(fork_server.stdout.readline()), place, time.monotonic() - started)

    return run


def test_several_processes_compute_what_one_does(run_processes):
    """Rows that do not divide evenly, dropout and noise on; 8 rows a step however many processes."""
    settings = {"max_steps": 6, "lora_dropout": 0.2, "neftune_noise_alpha": 5.0, "num_rows": 21, "num_held_out": 5}
    sizes = {"per_device_train_batch_size": 2}
    one = run_processes(1, gradient_accumulation_steps=4, **sizes, **settings)
    two = run_processes(2, gradient_accumulation_steps=2, **sizes, **settings)
    four = run_processes(4, gradient_accumulation_steps=1, **sizes, **settings)
    assert one.codes == [0] and two.codes == [0, 0] and four.codes == [0] * 4
    for several in (two, four):
        assert several.losses == pytest.approx(one.losses, rel=1e-5)
        assert several.eval_loss == pytest.approx(one.eval_loss, rel=1e-5)
        torch.testing.assert_close(several.weights(0), one.weights(0), rtol=1e-3, atol=1e-5)
        assert all(torch.equal(several.weights(rank), several.weights(0)) for rank in range(len(several.codes)))
    assert one.losses[0] != one.losses[-1]


def test_a_process_without_rows_or_without_learnt_tokens_keeps_nobody_waiting(run_processes):
    """3 rows for 2 processes, then the last process's row fully masked, and at times more processes than rows."""
    settings = {"max_steps": 4, "per_device_train_batch_size": 1, "num_rows": 3}
    one = run_processes(1, gradient_accumulation_steps=2, masks_last=True, **settings)
    two = run_processes(2, gradient_accumulation_steps=1, masks_last=True, **settings)
    assert two.codes == [0, 0]
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert all(math.isfinite(loss) for loss in two.losses)


def test_an_error_on_one_process_ends_all_with_a_message(run_processes):
    outcome = run_processes(3, "raise")
    assert outcome.codes == [2, 2, 2] and outcome.seconds < 60
    assert outcome.words(1) == "rank 1 cannot read its data"
    assert "process 0 of 3: another process ended" in outcome.words(0) and "--resume" in outcome.words(2)


def test_a_killed_process_ends_all_with_a_message(run_processes):
    outcome = run_processes(3, "kill", save_steps=1)
    assert outcome.codes == [2, -9, 2] and outcome.seconds < 60
    assert "process 2 of 3: another process ended" in outcome.words(2)


def test_a_process_that_hangs_is_given_up(run_processes):
    outcome = run_processes(2, "hang", timeout_s=5)
    assert outcome.codes == [2, -9] and outcome.seconds < 60
    assert "did not answer within 5 s" in outcome.words(0)


def test_processes_with_different_settings_do_not_start(run_processes):
    outcome = run_processes(2, "differ")
    assert outcome.codes == [2, 2]
    assert "learning_rate: process 1 has 0.5, process 0 has 0.01" in outcome.words(0)
    assert not (outcome.folder / "a.gguf.metrics.jsonl").exists()


def test_a_stop_on_one_process_stops_all_at_the_same_step_and_they_resume_bit_for_bit(run_processes):
    settings = {"max_steps": 6, "per_device_train_batch_size": 1, "lora_dropout": 0.2}
    straight = run_processes(2, folder="straight", **settings)
    stopped = run_processes(2, "stop", folder="stopped", **settings)
    assert stopped.codes == [130, 130]
    # 2 micro-batches a step on each process; the signal came in the third.
    assert all("after step 1 of 6" in stopped.words(rank) for rank in range(2))
    resumed = run_processes(2, folder="stopped", resume=True, **settings)
    assert resumed.codes == [0, 0] and resumed.losses == straight.losses
    assert torch.equal(resumed.weights(0), straight.weights(0)) and torch.equal(resumed.weights(1), straight.weights(0))


def test_another_number_of_processes_does_not_resume(run_processes):
    run_processes(2, folder="same", max_steps=2)
    outcome = run_processes(1, folder="same", max_steps=2, resume=True)
    assert outcome.codes == [2] and "number of processes: 1, the checkpoint has 2" in outcome.words(0)


def test_a_process_alone_stays_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_processes(1) == Processes()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert join_processes(1) == Processes()


def test_each_process_gets_its_own_gpu_unless_one_was_named():
    second = Processes(rank=1, count=2, local_rank=1)
    assert str(second.device(torch.device("cuda"))) == "cuda:1"
    assert str(second.device(torch.device("cuda:0"))) == "cuda:0"
    assert str(second.device(torch.device("cpu"))) == "cpu"
    assert str(Processes().device(torch.device("cuda"))) == "cuda"
