"""`pyggtrain plan model.gguf --max-memory 16GiB`: what a run would need, from the file's header alone."""

import json
from collections.abc import Sequence

from pyggtrain.cli.arguments import parse_settings
from pyggtrain.cli.tables import facts_table, table
from pyggtrain.cli.train import say
from pyggtrain.errors import UnsupportedError
from pyggtrain.training.config import build_config

# A plan reads no rows and writes nothing.
_NOT_ASKED = {"data": "none", "output": "none.gguf"}


def run(arguments: Sequence[str]) -> int:
    """Show each part's memory, every setting and the one to take; return 0, or 2 if none fits."""
    wants_json = "--json" in arguments
    settings, config_file, _ = parse_settings(
        [argument for argument in arguments if argument != "--json"], "pyggtrain plan"
    )
    config = build_config({**_NOT_ASKED, **settings}, config_file)

    from pyggtrain.training.plan import plan_run

    plan = plan_run(config)
    if wants_json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        say(facts_table(plan.facts()), "", table(plan.part_rows()), "", table(plan.setting_rows()), "")
    if plan.chosen is None:
        raise UnsupportedError(plan.verdict())
    if not wants_json:
        say(plan.verdict())
    return 0
