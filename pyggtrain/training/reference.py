"""All settings in groups: what `--help` and docs/training.md are made from."""

import dataclasses
from typing import Any

from pyggtrain.training.config import TrainConfig, describe_type, field_docs, field_types, is_needed

SECTIONS = {
    "Files": "model",
    "Adapter": "r",
    "Objective": "method",
    "Optimiser": "optim",
    "Data": "max_seq_length",
    "Compute": "device",
    "Progress": "logging_steps",
    "Check against llama.cpp": "verify",
}
"""Heading -> first field below it, in the order of the fields: how `--help` and the docs group them."""


def sections() -> dict[str, list[dataclasses.Field[Any]]]:
    """Return heading -> settings below it."""
    first_of = {first: heading for heading, first in SECTIONS.items()}
    grouped: dict[str, list[dataclasses.Field[Any]]] = {}
    heading = ""
    for field in dataclasses.fields(TrainConfig):
        heading = first_of.get(field.name, heading)
        grouped.setdefault(heading, []).append(field)
    return grouped


def settings_reference() -> str:
    """Return all settings as Markdown tables, one for each group."""
    parts = []
    for heading, fields in sections().items():
        parts += [f"### {heading}", "", "| setting | value | default | meaning |", "|---|---|---|---|"]
        for field in fields:
            kind = describe_type(field_types()[field.name]).removesuffix(" or none")
            meaning = field_docs()[field.name].replace("|", "\\|")
            default = "needed" if is_needed(field) else f"`{default_text(field)}`".replace("``", "")
            parts.append(f"| `{field.name}` | {kind} | {default} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


def default_text(field: "dataclasses.Field[Any]") -> str:
    """Return the default as a person would type it; empty where nothing is the default."""
    if is_needed(field) or field.default in (None, (), dataclasses.MISSING):
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return " ".join(field.default) if isinstance(field.default, tuple) else str(field.default)
