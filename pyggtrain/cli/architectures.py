"""`pyggtrain architectures`: what can be trained, read from the registries; README's table is this command's output."""

import argparse
import inspect
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Print a Markdown table of architectures, tensor types and devices; return 0."""
    parser = argparse.ArgumentParser(prog="pyggtrain architectures", description=__doc__)
    parser.parse_args(arguments)
    print("\n".join(markdown_table()))
    return 0


def markdown_table() -> list[str]:
    """Lines of the table: one row for each architecture."""
    from pyggtrain.models import ARCHITECTURES
    from pyggtrain.ops.dequantize import block_sizes

    types = ", ".join(sorted(block_sizes()))
    lines = ["| architecture | which models | tensor types | devices |", "|---|---|---|---|"]
    for name, model in ARCHITECTURES.items():
        first_line = (inspect.getdoc(inspect.getmodule(model)) or "").splitlines()[0]
        description = first_line.removeprefix(f"`{name}`: ").rstrip(".")
        lines.append(f"| `{name}` | {description} | {types} | CPU |")
    return lines
