"""`pyggtrain verify model.gguf adapter.gguf [data.jsonl ...]`: does llama.cpp compute what pyggtrain computes?"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pyggtrain.cli.train import say
from pyggtrain.errors import ParityError


def run(arguments: Sequence[str]) -> int:
    """Print the comparison; return 0, or 3 if a bound is broken."""
    parser = argparse.ArgumentParser(
        prog="pyggtrain verify",
        description="Compare pyggtrain with llama.cpp on a base file and an adapter.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="GGUF file of the base model")
    parser.add_argument("adapter", help="GGUF adapter, whoever wrote it")
    parser.add_argument("data", nargs="*", help="rows to compare on; a built-in paragraph by default")
    parser.add_argument(
        "--runtime", default="bridge", help='"bridge" (built in), or the http address of a llama-server'
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens compared at most (default: 256)")
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads (default: all cores)")
    parser.add_argument("--ignore-hash", action="store_true", help="accept another base than the one trained on")
    parser.add_argument("--hash-base", action="store_true", help="compare the hash of the whole base file as well")
    parser.add_argument("--json", metavar="FILE", help="write the report to FILE as well")
    parsed = parser.parse_args(arguments)

    from pyggtrain import api
    from pyggtrain.training.output import write_text

    report = api.verify(
        parsed.model,
        parsed.adapter,
        parsed.data,
        runtime=parsed.runtime,
        max_tokens=parsed.max_tokens,
        num_threads=parsed.num_threads,
        ignore_hash=parsed.ignore_hash,
        hash_base=parsed.hash_base,
    )
    if parsed.json is not None:
        write_text(Path(parsed.json), report.to_json() + "\n")
    say(report.table())
    return 0 if report.passed else ParityError.exit_code
