"""DPO's reference computed once is the one that is computed in each step, and is computed once."""

import pytest
import torch
from tiny_trainer import make_pairs, make_trainer, weights

from pyggtrain.cache_folder import cache_folder
from pyggtrain.errors import ConfigError, DataError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.reference_log_probs import ReferenceModel

DPO = {"method": "dpo", "max_steps": 4, "lora_dropout": 0.1}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PYGGTRAIN_CACHE_DIR", str(tmp_path / "cache"))


def losses(trainer) -> list[dict[str, float]]:
    wanted = ("loss", "eval_loss", "rewards/margins", "rewards/chosen")
    return [{name: line[name] for name in wanted if name in line} for line in read_metrics(trainer.files.metrics)]


def test_losses_are_those_of_a_reference_in_each_step(tiny_llama_path, tmp_path):
    pairs, held_out = make_pairs(9), make_pairs(3)
    found = []
    for name, settings in (
        ("each", {}),
        ("once", {"precompute_ref_log_probs": True}),
        ("again", {"precompute_ref_log_probs": True}),
    ):
        folder = tmp_path / name.replace("again", "once")
        folder.mkdir(exist_ok=True)
        trainer = make_trainer(tiny_llama_path, folder, rows=pairs, held_out=held_out, **DPO, **settings)
        calls = []
        compute = trainer.objective._model.log_probs
        trainer.objective._model.log_probs = lambda batch, calls=calls, compute=compute: (
            calls.append(1) or compute(batch)
        )
        trainer.run()
        found.append((losses(trainer), len(calls), weights(trainer)))
    (each, num_each, _), (once, num_once, weights_once), (again, num_again, weights_again) = found
    assert num_each == 2 * num_once == 2 * num_again
    for one, other in zip(each, once, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    # From the cache come the same bits.
    assert again == once and torch.equal(weights_once, weights_again)
    assert len(list((cache_folder() / "reference").glob("*.npy"))) == 2


def test_what_is_cached_is_read_and_not_computed(tiny_llama_path, tmp_path, monkeypatch):
    pairs = make_pairs(5)
    settings = {**DPO, "precompute_ref_log_probs": True}
    first = make_trainer(tiny_llama_path, tmp_path, rows=pairs, **settings)
    reference = [row.reference for row in first.batches._rows]
    monkeypatch.setattr(ReferenceModel, "_computed", lambda *arguments: pytest.fail("computed again"))
    again = make_trainer(tiny_llama_path, tmp_path, rows=pairs, **settings)
    assert [row.reference for row in again.batches._rows] == reference
    with pytest.raises(pytest.fail.Exception):
        make_trainer(tiny_llama_path, tmp_path, rows=make_pairs(6), **settings)


def test_damage_in_the_cache_is_told_and_mended(tiny_llama_path, tmp_path, caplog):
    settings = {**DPO, "precompute_ref_log_probs": True, "rows": make_pairs(5)}
    first = make_trainer(tiny_llama_path, tmp_path, **settings)
    (path,) = (path for path in (cache_folder() / "reference").glob("*.npy") if path.stat().st_size > 150)
    path.write_bytes(b"not an array")
    again = make_trainer(tiny_llama_path, tmp_path, **settings)
    assert "is damaged" in caplog.text
    assert [row.reference for row in again.batches._rows] == [row.reference for row in first.batches._rows]


def test_a_cache_that_cannot_be_written_is_an_error(tiny_llama_path, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYGGTRAIN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be written.*PYGGTRAIN_CACHE_DIR"):
        make_trainer(tiny_llama_path, tmp_path, rows=make_pairs(3), **DPO, precompute_ref_log_probs=True)


def test_only_dpo_has_a_reference():
    needed = {"model": "m", "data": ("d",), "output": "o"}
    with pytest.raises(ConfigError, match="only dpo has a reference, and method is orpo"):
        TrainConfig(**needed, method="orpo", precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match="dpo with split_mode layer needs precompute_ref_log_probs"):
        TrainConfig(**needed, method="dpo", split_mode="layer")
