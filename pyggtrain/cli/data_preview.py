"""`pyggtrain data preview chat.jsonl --model model.gguf`: what is learnt in the first rows, and how long rows are."""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import islice

from pyggtrain.cli.data_check import data_config


def run(arguments: Sequence[str]) -> int:
    """Print rows with learnt, context and dropped tokens set off, then percentiles of all lengths; return 0."""
    parser = argparse.ArgumentParser(prog="pyggtrain data preview", add_help=False, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=3, help="how many rows to show (default: 3)")
    parser.add_argument("--skip", type=int, default=0, help="how many rows to pass over first")
    parser.add_argument("--tokens", action="store_true", help="show where tokens begin, by |")
    if {"-h", "--help"}.intersection(arguments):
        parser.print_help()
        sys.stdout.write("\nSettings of the data, as for training:\n\n")
    own, others = parser.parse_known_args(arguments)
    config = data_config(others, "pyggtrain data preview")

    from pyggtrain.cli.train import say
    from pyggtrain.data.encode import rows_with_format
    from pyggtrain.data.preview import length_table, preview_row
    from pyggtrain.data.row_encoder import RowEncoder
    from pyggtrain.data.sources import weighted_files
    from pyggtrain.gguf import GGUFFile, Tokenizer
    from pyggtrain.gguf.readable import check_readable
    from pyggtrain.training.data import data_settings, holds_pairs, longest_row, run_template, whole_lengths

    model = GGUFFile.open(config.model)
    check_readable(model.path)
    tokenizer = Tokenizer.from_gguf(config.model)
    limit = longest_row(config, model)
    template = run_template(config, tokenizer, datetime.now())
    encoder = RowEncoder(tokenizer, data_settings(config, limit), template, as_pairs=holds_pairs(config))
    paths = [file.path for file in weighted_files(config.data)]
    color = sys.stdout.isatty()
    for row, format in islice(rows_with_format(paths, config.format), own.skip, own.skip + own.rows):
        say(preview_row(row, format, encoder, tokenizer, color=color, show_tokens=own.tokens), "")
    say(*length_table(whole_lengths(config, tokenizer, template), limit))
    return 0
