"""Runs cases of the self-test in a process of its own: `python -m pyggtrain.validation.kernel_worker DEVICE`.

A kernel takes seconds to compile, and compiling keeps one processor busy, so a self-test on a GPU has many of these.
One line of JSON in, one out:

    {"kernel": "rope", "cases": [3, 4]}                      ->  [{"case": ..., "comparisons": [[name, error, bound]],
                                                                   "failure": null}, ...]
    {"product": ["Q4_K", 14336, 4096, 16]}                   ->  []; its kernels are compiled then

After an error of the card nothing runs in this process any more, so it says so and ends.
"""

import json
import sys
from typing import Any

import torch

from pyggtrain.kernels.reference.cases import poisoned_memory
from pyggtrain.validation.kernel_cases import compile_product, gpu_cases, run_case


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    device = torch.device(sys.argv[1])
    cases = gpu_cases(device)
    answers = sys.stdout
    # What a kernel prints is not an answer.
    sys.stdout = sys.stderr
    with poisoned_memory():
        for line in sys.stdin:
            task: dict[str, Any] = json.loads(line)
            if "product" in task:
                compile_product(*task["product"], device=device)
                outcomes = []
            else:
                outcomes = [run_case(cases[task["kernel"]][number]) for number in task["cases"]]
            found = [
                {
                    "case": outcome.case,
                    "comparisons": [[one.name, one.error, one.bound] for one in outcome.comparisons],
                    "failure": outcome.failure,
                }
                for outcome in outcomes
            ]
            print(json.dumps(found), file=answers, flush=True)
            if any("CUDA error" in (outcome.failure or "") for outcome in outcomes):
                return


if __name__ == "__main__":
    main()
