"""Command line flags made from `TrainConfig`: one flag for each setting, its docstring as help."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from pyggtrain.training.config import (
    ALIASES,
    describe_type,
    field_docs,
    field_types,
)
from pyggtrain.training.reference import default_text, sections

_SHORT = {"output": "-o"}
# A plan reads no rows and writes nothing; it takes the other settings of the run that it is for.
_USAGE = {
    "pyggtrain plan": "MODEL [--max-memory SIZE] [--max-seq-length N] [--setting value ...] [--json]",
    "pyggtrain data preview": "DATA [DATA ...] --model MODEL [--setting value ...]",
    "pyggtrain data check": "DATA [DATA ...] --model MODEL [--setting value ...]",
}


def train_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser for all settings. Values stay text: `build_config` reports all mistakes together."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} {_USAGE.get(program, 'MODEL DATA [DATA ...] -o ADAPTER [--setting value ...]')}",
        description="Train a LoRA adapter on an unchanged GGUF file; llama.cpp loads the result beside that file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("positional", nargs="*", metavar="MODEL DATA", help="the same as --model and --data")
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML or TOML file of settings; flags win over it")
    parser.add_argument("--dry-run", action="store_true", help="show plan and first row, then stop before training")
    parser.add_argument("--debug", action="store_true", help="show the Python trace of an error (all commands take it)")
    for heading, fields in sections().items():
        group = parser.add_argument_group(heading)
        for field in fields:
            _add_flag(group, field)
    return parser


def parse_settings(
    arguments: Sequence[str], program: str, *, has_model: bool = True
) -> tuple[dict[str, Any], str | None, bool]:
    """Read flags, without judging them: `build_config` names flags that do not exist together with all other mistakes.

    Args:
        has_model: whether the first argument without a flag is the model; else all of them are data.

    Returns:
        Settings as text, the configuration file, and whether only a dry run is wanted.
    """
    parsed, unknown = train_parser(program).parse_known_intermixed_args([_spelled(argument) for argument in arguments])
    settings: dict[str, Any] = vars(parsed)
    file, is_dry_run = settings.pop("config", None), settings.pop("dry_run", False)
    data = settings.pop("positional", [])
    if has_model and data:
        settings.setdefault("model", data.pop(0))
    if data:
        settings["data"] = data + settings.get("data", [])
    for flag in unknown:
        if flag.startswith("-"):
            settings[flag.lstrip("-").split("=")[0].replace("-", "_")] = None
    return settings, file, is_dry_run


def _spelled(argument: str) -> str:
    """Return a flag in the one spelling that the parser knows: peers write --max_length, most tools --max-length."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--"):
        return argument
    name = name[2:].replace("-", "_")
    return f"--{ALIASES.get(name, name).replace('_', '-')}{equals}{value}"


def _add_flag(group: argparse._ArgumentGroup, field: "dataclasses.Field[Any]") -> None:
    annotation = field_types()[field.name]
    flags = [_SHORT[field.name]] if field.name in _SHORT else []
    flags.append(f"--{field.name.replace('_', '-')}")
    text = field_docs()[field.name].replace("%", "%%")
    if default := default_text(field).replace("%", "%%"):
        text += f" (default: {default})"
    if annotation is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=text, dest=field.name)
    else:
        kind = describe_type(annotation).removesuffix(" or none")
        one = kind.removeprefix("one or more of: ")
        metavar = (
            one.removeprefix("one of ").replace(", ", "|") if one.startswith("one of") else one.split()[-1].upper()
        )
        if one == kind:
            group.add_argument(*flags, dest=field.name, metavar=metavar, help=text)
        else:
            # `--data a.jsonl b.jsonl` and `--data a.jsonl --data b.jsonl` mean the same.
            group.add_argument(*flags, dest=field.name, metavar=metavar, nargs="+", action="extend", help=text)
