"""`pyggtrain info model.gguf`: what a file holds, from its header alone."""

import argparse
import sys
from collections.abc import Sequence

from pyggtrain.cli.tables import facts_table, table


def run(arguments: Sequence[str]) -> int:
    """Print metadata and tensor types of a file; return 0."""
    parser = argparse.ArgumentParser(
        prog="pyggtrain info", description="Show what a GGUF file holds.", allow_abbrev=False
    )
    parser.add_argument("model", help="GGUF file (the first file, if it is split)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parsed = parser.parse_args(arguments)

    from pyggtrain.model_info import info

    found = info(parsed.model)
    sys.stdout.write(facts_table(found.facts()) + "\n\n" + table(found.type_rows()) + "\n")
    if parsed.tensors:
        sys.stdout.write("\n" + table(found.tensor_rows()) + "\n")
    return 0
