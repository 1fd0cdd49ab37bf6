"""`pyggtrain merge model.gguf adapter.gguf merged.gguf`: an adapter written into a copy of its base."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pyggtrain.cli.tables import table
from pyggtrain.cli.train import say
from pyggtrain.errors import ConfigError, ParityError


def run(arguments: Sequence[str]) -> int:
    """Write the merged model, show what was rounded and how it compares; return 0, or 3 if a bound is broken."""
    parser = argparse.ArgumentParser(
        prog="pyggtrain merge",
        description="Write adapters into a copy of their base model, tensor by tensor, and compare it in llama.cpp.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="GGUF file of the base model; never changed")
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER[:SCALE]", help="GGUF adapters; a scale is 1 by default")
    parser.add_argument("output", help="GGUF file to write")
    parser.add_argument(
        "--type", default="keep", help="type of all weights (Q4_K, Q8_0, BF16, ...); keep: each its own (default)"
    )
    parser.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="PATTERN=TYPE",
        help="another type for tensors whose name matches, as '*attn_v*=Q6_K'; the last match counts",
    )
    parser.add_argument("--imatrix", metavar="FILE", help="importance matrix of llama-imatrix (GGUF or .dat)")
    parser.add_argument(
        "--allow-uniform", action="store_true", help="without an importance matrix weigh all columns alike"
    )
    parser.add_argument("--ignore-hash", action="store_true", help="accept adapters trained on another file")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="FILE", help="rows to compare on (default: a paragraph)"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens compared at most (default: 256)")
    parser.add_argument("--no-verify", action="store_true", help="do not compare in llama.cpp")
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads (default: all cores)")
    parsed = parser.parse_args(arguments)

    from pyggtrain import api

    result = api.merge(
        parsed.model,
        [scaled(text) for text in parsed.adapters],
        parsed.output,
        type=None if parsed.type == "keep" else parsed.type,
        tensor_types=dict(_pattern(text) for text in parsed.tensor_type),
        imatrix=parsed.imatrix,
        is_uniform_allowed=parsed.allow_uniform,
        ignore_hash=parsed.ignore_hash,
        overwrite=parsed.overwrite,
        data=parsed.data,
        verify=not parsed.no_verify,
        max_tokens=parsed.max_tokens,
        num_threads=parsed.num_threads,
    )
    by_types: dict[tuple[str, str], list[float]] = defaultdict(list)
    for rounded in result.merged.rounding.values():
        by_types[rounded.found, rounded.made].append(rounded.relative)
    rows = [[str(len(errors)), found, made, f"{100 * max(errors):.2f} %"] for (found, made), errors in by_types.items()]
    say(table([["tensors", "from", "to", "largest rounding"], *rows]))
    say(f"{result.merged.num_copied} tensors copied byte for byte", f"merged: {result.merged.path}")
    if result.parity is None:
        return 0
    say("", result.parity.table())
    return 0 if result.parity.passed else ParityError.exit_code


def scaled(text: str) -> tuple[str, float]:
    """("adapter.gguf", 0.5) of "adapter.gguf:0.5"; 1 without a scale. A file of the whole name comes first."""
    path, colon, scale = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, 1.0
    try:
        return path, float(scale)
    except ValueError:
        return text, 1.0


def _pattern(text: str) -> tuple[str, str]:
    pattern, equals, type = text.rpartition("=")
    if not equals or not pattern or not type:
        raise ConfigError(f"--tensor-type: found {text!r}; needed: PATTERN=TYPE, for example '*attn_v*=Q6_K'.")
    return pattern, type
