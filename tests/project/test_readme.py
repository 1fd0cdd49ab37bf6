"""README says what the registries say, and its commands are commands."""

import re
from pathlib import Path

from pyggtrain.cli import COMMANDS
from pyggtrain.cli.architectures import markdown_table

ROOT = Path(__file__).parents[2]


def test_table_is_the_output_of_pyggtrain_architectures() -> None:
    assert "\n".join(markdown_table()) in (ROOT / "README.md").read_text()


def test_commands_and_files_that_the_documents_name_exist() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = document.read_text()
        for command in re.findall(r"^ {4}pyggtrain (\w+)", text, flags=re.MULTILINE):
            assert command in COMMANDS, f"{document.name}: pyggtrain {command}"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
        for script in re.findall(r"^ {4}python3? ((?:benchmarks|examples|tests)/\S+\.py)", text, flags=re.MULTILINE):
            assert (ROOT / script).exists(), f"{document.name}: {script}"
