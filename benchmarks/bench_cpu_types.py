"""Which way is faster on a CPU for each tensor type: decoding rows and torch ("exact"), or ggml's own product ("ggml").

    python benchmarks/bench_cpu_types.py --output benchmarks/results/cpu_types.jsonl
    python benchmarks/bench_cpu_types.py --table benchmarks/results/cpu_types.jsonl

y = x Wᵀ with W [1536, 1536] on one thread, x of 8 to 512 rows; the process's own CPU time, best of `--repeats`, so that
other work on the machine counts little. Both results are compared with float64 before they are timed. "auto" in
`pyggtrain.ops.quant_matmul` follows these numbers.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pyggtrain import _bridge
from pyggtrain.gguf import quantize_tensor
from pyggtrain.ops import dequantize, quant_linear
from pyggtrain.ops.quant_matmul import chosen_compute

SIZE = 1536
ROWS = (8, 32, 128, 512)


def best_ms(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    # The first call warms up.
    return round(1e3 * min(times[1:]), 3)


def measure(type: str, repeats: int) -> list[dict[str, Any]]:
    """One line for each number of rows."""
    generator = torch.Generator().manual_seed(0)
    imatrix = torch.ones(SIZE) if _bridge.quant_types()[type].needs_imatrix else None
    weight = quantize_tensor("w", torch.randn(SIZE, SIZE, generator=generator), type, imatrix=imatrix)
    values, lines = dequantize(weight).double(), []
    for num_rows in ROWS:
        x = torch.randn(num_rows, SIZE, generator=generator)
        line = {"type": type, "rows": num_rows}
        for compute, bound in (("exact", 1e-5), ("ggml", 2e-2)):
            y, exact = quant_linear(x, weight, compute=compute), x.double() @ values.t()
            error = float((y - exact).norm() / exact.norm())
            assert error < bound, f"{type}, {num_rows} rows, {compute}: error {error}"
            line[f"{compute}_ms"] = best_ms(
                lambda compute=compute, x=x: quant_linear(x, weight, compute=compute), repeats
            )
        lines.append(line)
    return lines


def environment() -> dict[str, str]:
    """What the numbers belong to."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(": ")[2] if models else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Time of "ggml" over that of "exact" as a Markdown table; what "auto" takes is in bold."""
    text = [f"| type | {' | '.join(f'{rows} rows' for rows in ROWS)} |", "|---" * (len(ROWS) + 1) + "|"]
    for type in dict.fromkeys(line["type"] for line in lines):
        cells = []
        for line in (line for line in lines if line["type"] == type):
            ratio = f"{line['ggml_ms'] / line['exact_ms']:.2f}"
            takes_ggml = chosen_compute("auto", type, line["rows"], torch.float32) == "ggml"
            cells.append(f"**{ratio}**" if takes_ggml else ratio)
        text.append(f"| {type} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(_bridge.quant_types()))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="jsonl file to append to")
    parser.add_argument("--table", type=Path, help="print the table of a jsonl file and stop")
    arguments = parser.parse_args()
    if arguments.table:
        print(table([json.loads(line) for line in arguments.table.read_text().splitlines()]))
        return
    torch.set_num_threads(1)
    for type in arguments.types:
        for line in measure(type, arguments.repeats):
            text = json.dumps({"benchmark": "cpu_types", **line, **environment()})
            print(text, flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
