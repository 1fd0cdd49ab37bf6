"""`pyggtrain train model.gguf chat.jsonl -o adapter.gguf`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyggtrain.cli import importing
from pyggtrain.cli.arguments import parse_settings
from pyggtrain.cli.tables import facts_table
from pyggtrain.gguf.readable import begin_check
from pyggtrain.training.config import TrainConfig, build_config

if TYPE_CHECKING:
    from pyggtrain.api import TrainResult


def run(arguments: Sequence[str]) -> int:
    """Show the plan, train, show the comparison with llama.cpp and how to serve the adapter; return 0."""
    settings, config_file, is_dry_run = parse_settings(arguments, "pyggtrain train")
    train(build_config(settings, config_file), is_dry_run=is_dry_run)
    return 0


def train(config: TrainConfig, *, is_dry_run: bool = False) -> "TrainResult | None":
    """Do what the settings say and show it; None after a dry run, and on all processes of a run but the first."""
    model = Path(config.model)
    if model.is_file():
        begin_check(model)
    # torch is imported only once the settings are known to be right.
    with importing():
        from pyggtrain import api
        from pyggtrain.training.progress import Progress, terminal_progress

    ready = api.prepare(config)
    if not ready.processes.is_first:
        if not is_dry_run:
            api.run(ready, progress=Progress())
        return None
    say(facts_table(ready.facts), *ready.data.lines())
    say("\nFirst row; what stands between « and » is learnt:\n", ready.preview(color=sys.stdout.isatty()), "")
    if is_dry_run:
        return None
    result = api.run(ready, progress=terminal_progress())
    if result.parity is not None:
        say("", result.parity.table())
    assert result.report is not None, "the first process has a report"
    say(f"\nadapter: {result.files.adapter}", f"report:  {result.files.report}", f"\n{result.report.serve}")
    say("", result.files.modelfile.read_text(encoding="utf-8").rstrip())
    return result


def say(*lines: str) -> None:
    """Write lines to stdout at once, so that they keep their order with what goes to stderr."""
    print(*lines, sep="\n", flush=True)
