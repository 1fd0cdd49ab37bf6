"""`pyggtrain data check chat.jsonl --model model.gguf`: read all rows as for training, and say what would be learnt."""

from collections.abc import Sequence
from datetime import datetime

from pyggtrain.cli.arguments import parse_settings
from pyggtrain.training.config import TrainConfig, build_config


def run(arguments: Sequence[str]) -> int:
    """Print the report on the rows; return 0. Rows that cannot be used, or nothing to learn, raise DataError."""
    config = data_config(arguments, "pyggtrain data check")

    from pyggtrain.cli.train import say
    from pyggtrain.gguf import GGUFFile, Tokenizer
    from pyggtrain.gguf.readable import check_readable
    from pyggtrain.training.data import holds_pairs, load_data, longest_row

    model = GGUFFile.open(config.model)
    check_readable(model.path)
    limit = longest_row(config, model)
    tokenizer = Tokenizer.from_gguf(config.model)
    data = load_data(config, tokenizer, max_length=limit, started=datetime.now(), as_pairs=holds_pairs(config))
    say(*data.lines())
    return 0


def data_config(arguments: Sequence[str], program: str) -> TrainConfig:
    """Settings of a run that would train on the data; nothing is written, so its output has any name."""
    settings, file, _ = parse_settings(arguments, program, has_model=False)
    return build_config({"output": "adapter.gguf", **settings}, file)
