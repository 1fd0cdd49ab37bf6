"""`pyggtrain quantize model-f16.gguf model-q4.gguf --type Q4_K`: a copy of a model with other tensor types."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pyggtrain.cli.tables import printable, table
from pyggtrain.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """Write the copy, show what became of the tensors; return 0."""
    parser = argparse.ArgumentParser(
        prog="pyggtrain quantize",
        description="Write a copy of a GGUF model with other tensor types, quantised by ggml. The source stays as it "
        "is.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="GGUF file to read (any part, if it is split)")
    parser.add_argument("output", help="GGUF file to write")
    parser.add_argument(
        "--type", required=True, type=str.upper, help="type of all weights: Q4_K, IQ4_XS, Q8_0, F16, ..."
    )
    parser.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="PATTERN=TYPE",
        help="another type for the tensors whose names match (*attn_v*=Q6_K); may be repeated, the last match counts",
    )
    parser.add_argument("--imatrix", metavar="FILE", help="importance matrix made by llama-imatrix (GGUF or .dat)")
    parser.add_argument(
        "--allow-uniform",
        action="store_true",
        help="without an importance matrix, weigh all columns alike even for types that need one",
    )
    parser.add_argument("--allow-requantize", action="store_true", help="quantise weights that are quantised already")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads (default: all cores)")
    parsed = parser.parse_args(arguments)

    from pyggtrain.gguf import GGUFFile
    from pyggtrain.gguf.imatrix import read_imatrix
    from pyggtrain.gguf.requantize import Change, requantize
    from pyggtrain.training.output import explained_write_errors

    file = GGUFFile.open(parsed.model)
    num_done = 0

    def show(change: Change) -> None:
        nonlocal num_done
        num_done += 1
        if sys.stderr.isatty():
            text = f"{num_done}/{len(file.tensor_infos)} {change.name} {change.found} -> {change.made}"
            sys.stderr.write(f"\r\x1b[K{printable(text)}")

    with explained_write_errors(Path(parsed.output)):
        changes = requantize(
            file,
            parsed.output,
            parsed.type,
            tensor_types=dict(_override(text) for text in parsed.tensor_type),
            imatrix=None if parsed.imatrix is None else read_imatrix(parsed.imatrix),
            is_uniform_allowed=parsed.allow_uniform,
            is_requantize_allowed=parsed.allow_requantize,
            overwrite=parsed.overwrite,
            num_threads=parsed.num_threads or len(os.sched_getaffinity(0)),
            progress=show,
        )
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    made = Counter((change.found, change.made) for change in changes)
    print(table([["from", "to", "tensors"], *([*pair, str(count)] for pair, count in made.items())]))
    for (found, reason), count in Counter((c.made, c.reason) for c in changes if c.reason).items():
        print(f"{count} tensors became {found}: {reason}")
    print(f"{parsed.output}: {Path(parsed.output).stat().st_size / 2**20:,.1f} MiB")
    return 0


def _override(text: str) -> tuple[str, str]:
    pattern, equals, type = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(f"--tensor-type {text!r}: needed PATTERN=TYPE, for example '*attn_v*=Q6_K'.")
    return pattern, type.upper()
