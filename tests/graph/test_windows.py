"""A window of w tokens: position p sees w keys, itself among them, here as in llama.cpp; and so does each document of a
batch. One layer is looked at, since stacked ones pass on what each of them sees.
"""

from pathlib import Path

import pytest
import torch
from dense_models import DENSE, HEAD, HEAD_NORMS, WIDTH, write_two_layers
from expert_models import layer_of

from pyggtrain import _bridge
from pyggtrain.gguf import GGUFFile
from pyggtrain.graph.model import ImportedModel
from pyggtrain.nn import Batch

WINDOW, PLACE = 8, 15
GEMMA_NORMS = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
SIZES = {"attention.key_length": HEAD, "attention.value_length": HEAD}
MODELS = {
    "gemma3": ({"attention.sliding_window": WINDOW, **SIZES}, DENSE | HEAD_NORMS | GEMMA_NORMS),
    "gpt-oss": layer_of("gpt-oss"),
}
TOKENS = torch.randint(1, 96, (30,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_layers(
        tmp_path_factory.mktemp("window") / f"{request.param}.gguf", request.param, *MODELS[request.param]
    )


def changed(place: int) -> list[int]:
    tokens = list(TOKENS)
    tokens[place] = (tokens[place] + 1) % 96
    return tokens


def first_layer(model: ImportedModel, batch: Batch) -> torch.Tensor:
    """What layer 0 hands on, [T, D]."""
    found: list[torch.Tensor] = []
    hook = model.layers[0].register_forward_hook(lambda module, x, y: found.append(y))
    with torch.no_grad():
        model.logits(batch)
    hook.remove()
    return found[0]


@pytest.mark.parametrize("before", [[], [5, 6, 7]], ids=["alone", "packed"])
def test_a_position_sees_as_many_keys_as_the_window_has(path: Path, before: list[int]) -> None:
    model = ImportedModel(GGUFFile.open(path), compute="exact")

    def row(tokens: list[int]) -> torch.Tensor:
        documents = [(ids, ids) for ids in (before, tokens) if ids]
        return first_layer(model, Batch.from_documents(documents)).reshape(-1, WIDTH)[len(before) + PLACE]

    usual = row(TOKENS)
    change = {
        distance: float((row(changed(PLACE - distance)) - usual).norm() / usual.norm())
        for distance in (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, PLACE)
    }
    # Not to the bit: an expert that gets one token more multiplies another shape.
    assert all((effect > 1e-3) if distance < WINDOW else (effect < 1e-6) for distance, effect in change.items()), change


def test_llama_cpp_sees_the_same_keys(path: Path) -> None:
    session = _bridge.Session(str(path), num_ctx=64, num_ubatch=64, num_threads=1, kv_type="F32")

    def row(tokens: list[int]) -> torch.Tensor:
        ((_, _, value),) = session.eval_tensors(tokens, ["l_out-0"])
        return torch.from_dlpack(value).clone()[PLACE]

    usual = row(TOKENS)
    assert torch.equal(row(changed(PLACE - WINDOW)), usual)
    assert not torch.equal(row(changed(PLACE - WINDOW + 1)), usual)
    session.close()


def test_logits_three_windows_on_are_llama_cpps(path: Path) -> None:
    session = _bridge.Session(str(path), num_ctx=64, num_ubatch=64, num_threads=1, kv_type="F32")
    wanted = torch.from_dlpack(session.logits(TOKENS))[3 * WINDOW :]
    session.close()
    with torch.no_grad():
        model = ImportedModel(GGUFFile.open(path), compute="exact")
        found = model.logits(Batch.from_documents([(TOKENS, TOKENS)]))[3 * WINDOW :]
    # gemma's GELU comes from a table of half-precision numbers in llama.cpp.
    bound = 5e-3 if path.stem == "gemma3" else 1e-5
    assert float((found - wanted).norm()) < bound * float(wanted.norm())
