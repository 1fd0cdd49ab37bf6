"""`pyggtrain info model.gguf`: what a file holds and what can be trained of it, from its header alone."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from pyggtrain.cli.tables import facts_table, table


def run(arguments: Sequence[str]) -> int:
    """Print what is in a file, as tables or JSON; return 0."""
    parser = argparse.ArgumentParser(
        prog="pyggtrain info",
        description="Show what a GGUF file holds and which of its tensors can carry LoRA. Reads the header only.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="GGUF file (any part, if it is split), or hf://owner/repo/file.gguf")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead (docs/gguf.md)")
    parser.add_argument(
        "--check", action="store_true", help="read all weights too; NaN or infinity among them is an error"
    )
    parsed = parser.parse_args(arguments)

    from pyggtrain.model_info import info

    found = info(parsed.model)
    if parsed.json:
        json.dump(found.to_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        tables = [found.type_rows(), found.untrainable_rows()] + ([found.tensor_rows()] if parsed.tensors else [])
        texts = [facts_table(found.facts()), *(table(rows) for rows in tables if len(rows) > 1)]
        sys.stdout.write("\n\n".join(texts) + "\n")
    if parsed.check:
        from pyggtrain.gguf import GGUFFile
        from pyggtrain.gguf.finite import check_finite

        check_finite(GGUFFile.open(found.path), num_threads=len(os.sched_getaffinity(0)))
        sys.stderr.write("All weights are finite.\n")
    return 0
