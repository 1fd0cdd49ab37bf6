"""benchmarks/expert_tiles.py: its products are what training computes, and its candidates fit a card."""

from dataclasses import replace

import pytest
import torch
from expert_tiles import LAYERS, PRODUCTS, Product, candidates, inputs
from pyggtrain.kernels.grouped_matmul import FLOAT32_TILES


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_torch(device: torch.device, name: str) -> None:
    layer = replace(LAYERS[-1], experts=4, chosen=2, width=96, feed_forward=80, slice=1)
    given = inputs(Product(layer, name), 9, device.type, torch.float32)
    exact = given.exact()
    assert len(exact) == int(given.routing.bounds[given.of.slice])
    assert given.error(FLOAT32_TILES, exact) < 1e-5


def test_candidates_are_few_and_fit() -> None:
    for layer in LAYERS:
        for name in PRODUCTS:
            product = Product(layer, name)
            found = candidates(product)
            assert found[0] == product.tiles_in_use
            assert 20 <= len(found) == len(set(found)) <= 40
            for tiles in found:
                assert 2 * tiles.terms * (tiles.rows + tiles.columns) * tiles.num_stages <= 220 * 1024
                assert tiles.rows * tiles.columns <= 128 * 32 * tiles.num_warps
