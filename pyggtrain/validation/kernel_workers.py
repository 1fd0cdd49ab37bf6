"""The cases of the self-test shared among processes (`kernel_worker`), each with kernels of its own to compile.

A process that dies takes one task with it, and another one takes its place.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
from typing import IO, Any

import torch

from pyggtrain.kernels.reference.comparison import Comparison
from pyggtrain.validation.kernel_cases import Case, Outcome

# Memory of a card that a process takes for itself, with its kernels.
_WORKER_BYTES = 1 << 30
_MAX_WORKERS = 16

Report = Callable[[int, int], None]
"""Is called with how many tasks are done, and of how many."""

Task = dict[str, Any]


def num_workers_for(device: torch.device) -> int:
    """Processes for a card: one for each processor, as far as its memory goes."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(1, min(os.cpu_count() or 1, _MAX_WORKERS, free_bytes // _WORKER_BYTES))


def run_in_workers(
    cases_of: dict[str, list[Case]],
    products: Iterable[tuple[str, int, int, int]],
    *,
    device: torch.device,
    num_workers: int,
    report: Report,
) -> dict[str, list[Outcome]]:
    """Run all cases, and compile the kernels of some products.

    Args:
        cases_of: kernel -> its cases.
        products: type, N, K and rows of each.
        device: where they run.
        num_workers: processes at a time.
        report: is told about progress.

    Returns:
        kernel -> outcomes, in the order of its cases.
    """
    listed = _tasks(cases_of, products)
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[Task, list[Outcome]]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_serve, args=(tasks, answers, cases_of, device), daemon=True)
        for _ in range(min(num_workers, len(listed)))
    ]
    for task in chain(listed, [None] * len(threads)):
        tasks.put(task)
    for thread in threads:
        thread.start()
    found: dict[str, dict[int, Outcome]] = {kernel: {} for kernel in cases_of}
    for done in range(1, len(listed) + 1):
        task, outcomes = answers.get()
        if "kernel" in task:
            found[task["kernel"]].update(zip(task["cases"], outcomes, strict=True))
        report(done, len(listed))
    for thread in threads:
        thread.join()
    return {kernel: [outcomes[number] for number in sorted(outcomes)] for kernel, outcomes in found.items()}


def _tasks(cases_of: dict[str, list[Case]], products: Iterable[tuple[str, int, int, int]]) -> list[Task]:
    """What a process is asked at a time: a case in all its dtypes, or the short cases of one type. Kernels in turn, so
    that what comes last is of the kernel with most cases, not of the slowest.
    """
    by_kernel: list[list[Task]] = []
    for kernel, cases in cases_of.items():
        groups: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(cases):
            case = name.split()[0]
            groups.setdefault(case.rsplit("_", 1)[0] if kernel == "dequantize" else case, []).append(number)
        by_kernel.append([{"kernel": kernel, "cases": numbers} for numbers in groups.values()])
    by_kernel.append([{"product": list(product)} for product in products])
    return [task for turn in zip_longest(*by_kernel) for task in turn if task is not None]


def _serve(
    tasks: "queue.SimpleQueue[Task | None]",
    answers: "queue.SimpleQueue[tuple[Task, list[Outcome]]]",
    cases_of: dict[str, list[Case]],
    device: torch.device,
) -> None:
    """Hand tasks to a process until there are none, and start another one whenever it dies."""
    worker: subprocess.Popen[str] | None = None
    with tempfile.TemporaryFile("w+") as errors:
        while (task := tasks.get()) is not None:
            if worker is None or worker.poll() is not None:
                worker = subprocess.Popen(
                    [sys.executable, "-m", "pyggtrain.validation.kernel_worker", str(device)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            answers.put((task, _ask(worker, task, cases_of, errors)))
        if worker is not None:
            worker.communicate()


def _ask(
    worker: "subprocess.Popen[str]", task: Task, cases_of: dict[str, list[Case]], errors: IO[str]
) -> list[Outcome]:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(task) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        worker.wait()
        errors.seek(0)
        reason = f"its process ended with {worker.returncode}: {errors.read().strip()[-500:]}"
        return [Outcome(cases_of[task["kernel"]][number][0], (), reason) for number in task.get("cases", ())]
    return [
        Outcome(found["case"], tuple(Comparison(*one) for one in found["comparisons"]), found["failure"])
        for found in json.loads(line)
    ]
