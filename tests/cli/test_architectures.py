"""`pyggtrain architectures` lists what llama.cpp knows, and the documents say what it says."""

import json
from pathlib import Path

import pytest

from pyggtrain import _bridge
from pyggtrain.cli import main
from pyggtrain.cli.architectures import full_table
from pyggtrain.models import ARCHITECTURES
from pyggtrain.models.served import REASONS

ROOT = Path(__file__).parents[2]


def test_json_holds_every_architecture_with_its_way_or_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["architectures", "--json"]) == 0
    items = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in items] == _bridge.architectures()
    for item in items:
        assert item["way"] in ("native", "graph", "not yet"), item
        assert item["way"] == "not yet" or item["name"] not in REASONS
        assert (item["way"] == "native") == (item["name"] in ARCHITECTURES)
        if item["way"] == "not yet":
            assert item["why"] and item["error"] is None
        else:
            assert not item["why"] and item["error"] < 1e-2 and item["trained"]


def test_the_page_of_the_documents_is_the_commands_output() -> None:
    assert "\n".join(full_table()) in (ROOT / "docs" / "architectures.md").read_text()
