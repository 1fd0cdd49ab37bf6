"""Every architecture of the pinned llama.cpp is served as architectures.json, and so README and docs, says.

Each tiny model is made by llama.cpp's own test fixture and checked as tests/tiny_models/check.py describes. Two
processes work ahead, so that the tests mostly wait.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from sweep import RESULTS, Outcome, start
from tiny_models import table

from pyggtrain import _bridge

RECORDED = json.loads(RESULTS.read_text())


MODELS = [(architecture, kind) for architecture, found in RECORDED.items() for kind in found["models"]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], "Future[Outcome]"]]:
    """What becomes of the models that this run asks for."""
    asked = [item.callspec.params["model"] for item in request.session.items if _asks_for_a_model(item)]
    futures = start(asked)
    yield futures
    for future in futures.values():
        future.cancel()


def _asks_for_a_model(item: pytest.Item) -> bool:
    return item.path.name == Path(__file__).name and "model" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_it_is_served_as_recorded(model: tuple[str, str], outcomes: dict[tuple[str, str], "Future[Outcome]"]) -> None:
    architecture, kind = model
    why = outcomes[model].result().why
    recorded = RECORDED[architecture]["models"][kind]
    assert not why or recorded, why
    assert why or not recorded, "it works now: record it with tests/tiny_models/sweep.py"


def test_the_record_knows_every_architecture() -> None:
    assert set(MODELS) == set(table())
    assert set(RECORDED) == set(_bridge.architectures())


def test_no_architecture_that_was_served_is_lost() -> None:
    served = [name for name, found in RECORDED.items() if not all(found["models"].values())]
    assert len(served) >= 133
