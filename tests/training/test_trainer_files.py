"""What a run writes: lines of metrics, and checkpoints that what goes wrong does not spoil."""

import math

import pytest
import torch
from tiny_trainer import ROWS, make_trainer, weights

from pyggtrain.errors import GGUFError
from pyggtrain.gguf import GGUFFile
from pyggtrain.training.checkpoint import load_checkpoint
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.progress import Progress


def test_metrics_lines_sum_up_the_steps_between_them(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path, max_steps=6, logging_steps=3)
    trainer.run()
    lines = list(read_metrics(trainer.files.metrics))
    assert [line["step"] for line in lines] == [3, 6]
    assert lines[0]["tokens"] == sum(row.num_tokens for row in ROWS)
    assert lines[0]["supervised_tokens"] == sum(row.num_learnt for row in ROWS)
    assert lines[0]["epoch"] == 1.0 and lines[1]["eta_seconds"] == 0


def test_skipped_step_is_told_and_training_goes_on(tiny_llama_path, tmp_path):
    told = []

    class Listener(Progress):
        def step(self, metrics):
            told.append(metrics)

    trainer = make_trainer(tiny_llama_path, tmp_path, max_steps=4, progress=Listener())
    compute, calls = trainer.objective.model.loss, iter(range(1, 100))
    trainer.objective.model.loss = lambda batch: (
        compute(batch)[0] * (math.nan if next(calls) == 3 else 1),
        batch.num_targets,
    )
    summary = trainer.run()
    assert summary.num_skipped == 1 and torch.isfinite(weights(trainer)).all()
    assert [metrics.skipped_tensor is None for metrics in told] == [True, False, True, True]
    assert [line["loss"] is None for line in read_metrics(trainer.files.metrics)] == [False, True, False, False]


def test_checkpoint_that_cannot_be_written_leaves_the_older_one(tiny_llama_path, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_llama_path, tmp_path, save_steps=2)

    def save(state, file):
        if state["step"] == 4:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        torch_save(state, file)

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(Exception, match=r"a\.gguf\.checkpoint: writing failed after 4 bytes"):
        trainer.run()
    assert load_checkpoint(trainer.files.checkpoint).step == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf.checkpoint", "a.gguf.metrics.jsonl"}


def test_a_base_that_changes_stops_the_run_and_spoils_no_checkpoint(tiny_llama_path, tmp_path):
    base = tmp_path / "base.gguf"
    base.write_bytes(tiny_llama_path.read_bytes())
    file = GGUFFile.open(base)

    class Listener(Progress):
        def step(self, metrics):
            if metrics.step == 3:
                with base.open("ab") as more:
                    more.write(b"x")

    trainer = make_trainer(base, tmp_path, save_steps=1, progress=Listener())
    trainer.check_base = file.check_unchanged
    with pytest.raises(GGUFError, match="Something writes to it while it is in use"):
        trainer.run()
    # The third step may have read what was written.
    assert load_checkpoint(trainer.files.checkpoint).step == 2
