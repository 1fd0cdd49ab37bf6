"""`pyggtrain architectures`: every architecture of the pinned llama.cpp, how it is served, and what was verified.

README's table is the output of `--summary`, docs/architectures.md's that without options.
"""

import argparse
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict


def run(arguments: Sequence[str]) -> int:
    """Print the table; return 0."""
    parser = argparse.ArgumentParser(prog="pyggtrain architectures", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the same as JSON, one object for each architecture")
    form.add_argument("--summary", action="store_true", help="a few lines with types of tensors and devices")
    options = parser.parse_args(arguments)
    if options.json:
        from pyggtrain.models.served import served

        print(json.dumps([asdict(item) for item in served()], indent=1))
    else:
        print("\n".join(markdown_table() if options.summary else full_table()))
    return 0


def markdown_table() -> list[str]:
    """Lines of the summary: hand-written architectures, those of the graph, and how many are missing."""
    from pyggtrain.models import ARCHITECTURES
    from pyggtrain.models.served import served
    from pyggtrain.ops.dequantize import block_sizes

    types = ", ".join(sorted(block_sizes()))
    lines = ["| architecture | which models | tensor types | devices |", "|---|---|---|---|"]
    for name, model in ARCHITECTURES.items():
        first_line = (inspect.getdoc(inspect.getmodule(model)) or "").splitlines()[0]
        description = first_line.removeprefix(f"`{name}`: ").rstrip(".")
        lines.append(f"| `{name}` | {description} | {types} | CPU, CUDA |")
    items = served()
    graph = [f"`{item.name}`" for item in items if item.way == "graph"]
    missing = [f"`{item.name}`" for item in items if item.way == "not yet"]
    lines.append(
        f"| {len(graph)} more | from llama.cpp's own graph: {', '.join(graph)} | all of these | CPU, CUDA |",
    )
    lines.append(f"| not yet | {', '.join(missing)} (docs/architectures.md says why) | | |")
    return lines


def full_table() -> list[str]:
    """Lines of the whole table: one row for each architecture."""
    from pyggtrain.models.served import served

    lines = [
        "| architecture | served | logits | with adapters | trained kinds of weight, or what is in the way |",
        "|---|---|---|---|---|",
    ]
    for item in served():
        numbers = ["" if value is None else f"{value:.1e}" for value in (item.error, item.adapter_error)]
        what = ", ".join(item.trained) or item.why.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{item.name}` | {item.way} | {numbers[0]} | {numbers[1]} | {what} |")
    return lines
