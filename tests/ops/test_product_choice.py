"""The choice among ways to multiply on a GPU: measured once, kept, and never inside a CUDA graph."""

import json

import pytest
import torch

from pyggtrain.errors import ConfigError
from pyggtrain.ops import product_choice
from pyggtrain.ops.product_choice import Product, choose, class_of, measured

CARD = torch.device("cuda", 0)
PRODUCT = Product("forward", "Q4_K", 14336, 4096, "bfloat16", 16)


class Card:
    """Stands for a GPU: ways take the time that they return."""

    def __init__(self, monkeypatch, folder):
        self.runs = []
        self.is_capturing = False
        monkeypatch.setattr(product_choice, "file_of", lambda device: folder / "products" / "card.json")
        monkeypatch.setattr(product_choice, "_measured", self.measure)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def measure(self, way, device):
        return way()

    def ways(self, **times):
        def run(name):
            self.runs.append(name)
            return times[name]

        return {name: lambda name=name: run(name) for name in times}


@pytest.fixture
def card(monkeypatch, tmp_path):
    product_choice.forget()
    yield Card(monkeypatch, tmp_path)
    product_choice.forget()


def test_the_fastest_is_taken_and_measured_once(card, tmp_path):
    ways = card.ways(bf16=80.0, fused=25.0, mmq=30.0)
    assert [choose(PRODUCT, ways, CARD) for _ in range(3)] == ["fused"] * 3
    assert card.runs == ["bf16", "fused", "mmq"]
    stored = json.loads((tmp_path / "products" / "card.json").read_text())
    assert stored == {PRODUCT.key: {"bf16": 80.0, "fused": 25.0, "mmq": 30.0}}
    assert measured(CARD) == stored


def test_another_process_reads_what_was_measured(card):
    choose(PRODUCT, card.ways(bf16=1.0, fused=2.0), CARD)
    product_choice.forget()
    card.runs.clear()
    assert choose(PRODUCT, card.ways(bf16=9.0, fused=2.0), CARD) == "bf16"
    assert not card.runs


def test_a_new_way_is_measured_against_the_old(card):
    choose(PRODUCT, card.ways(bf16=3.0, fused=2.0), CARD)
    assert choose(PRODUCT, card.ways(bf16=3.0, fused=2.0, mmq=1.0), CARD) == "mmq"


def test_a_way_that_is_not_offered_is_not_taken(card):
    choose(PRODUCT, card.ways(bf16=3.0, fused=2.0, mmq=1.0), CARD)
    assert choose(PRODUCT, card.ways(bf16=3.0, fused=2.0), CARD) == "fused"


def test_nothing_is_measured_inside_a_graph(card):
    card.is_capturing = True
    assert choose(PRODUCT, card.ways(bf16=2.0, fused=1.0), CARD) == "bf16"
    assert not card.runs and not measured(CARD)
    card.is_capturing = False
    assert choose(PRODUCT, card.ways(bf16=2.0, fused=1.0), CARD) == "fused"
    card.is_capturing = True
    assert choose(PRODUCT, card.ways(bf16=2.0, fused=1.0), CARD) == "fused"


def test_the_only_way_costs_nothing(card):
    assert choose(PRODUCT, card.ways(bf16=1.0), CARD) == "bf16"
    assert not card.runs and not measured(CARD)


def test_files_of_two_processes_are_joined(card, tmp_path):
    choose(PRODUCT, card.ways(bf16=2.0, fused=1.0), CARD)
    path = tmp_path / "products" / "card.json"
    path.write_text(json.dumps({"theirs": {"bf16": 1.0}}))
    other = Product("backward", "Q4_K", 14336, 4096, "bfloat16", 16)
    choose(other, card.ways(bf16=2.0, fused=3.0), CARD)
    assert set(json.loads(path.read_text())) == {"theirs", PRODUCT.key, other.key}


def test_a_broken_file_is_named(card, tmp_path):
    path = tmp_path / "products" / "card.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"card\.json is not JSON .* Delete it"):
        choose(PRODUCT, card.ways(bf16=2.0, fused=1.0), CARD)


@pytest.mark.parametrize(("rows", "end"), [(1, 1), (2, 2), (3, 4), (128, 128), (129, 256), (100_000, 4096)])
def test_classes_of_rows_end_at_powers_of_two(rows, end):
    assert class_of(rows) == end
