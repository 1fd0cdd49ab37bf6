"""The loop on a tiny random model: order, resume, stop, held-out loss, metrics, seeds."""

import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.data.examples import Example
from pyggtrain.errors import ConfigError, GGUFError, UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.training.batches import count_steps
from pyggtrain.training.checkpoint import load_checkpoint
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.interrupts import TrainingInterrupted
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.objectives import OBJECTIVES
from pyggtrain.training.output import OutputFiles
from pyggtrain.training.pipeline import Pipeline, shares_of, split_layers
from pyggtrain.training.processes import Processes
from pyggtrain.training.progress import Progress
from pyggtrain.training.reference_log_probs import ReferenceModel
from pyggtrain.training.trainer import Trainer


def make_rows(count: int, seed: int = 5) -> list[Example]:
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        ids = [rng.randrange(96) for _ in range(rng.randrange(4, 12))]
        learnt = rng.randrange(1, len(ids))
        rows.append(Example(array("i", ids), array("i", [-100] * learnt + ids[learnt:]), f"row {index}"))
    return rows


ROWS = make_rows(11)


@dataclass(frozen=True)
class Pair:
    chosen: Example
    rejected: Example

    @property
    def num_tokens(self) -> int:
        return self.chosen.num_tokens + self.rejected.num_tokens

    @property
    def num_learnt(self) -> int:
        return self.chosen.num_learnt + self.rejected.num_learnt


def make_pairs(count: int) -> list[Pair]:
    return [Pair(*answers) for answers in zip(make_rows(count, seed=6), make_rows(count, seed=7), strict=True)]


def make_trainer(
    path: Path,
    folder: Path,
    *,
    rows=ROWS,
    held_out=(),
    resume: bool = False,
    progress=None,
    processes: Processes | None = None,
    **settings,
) -> Trainer:
    settings = {
        "r": 4,
        "learning_rate": 1e-2,
        "max_steps": 8,
        "gradient_accumulation_steps": 2,
        "save_steps": 0,
        **settings,
    }
    config = TrainConfig(model=str(path), data=("d",), output=str(folder / "a.gguf"), resume=resume, **settings)
    file, split, layers, pipeline = GGUFFile.open(path), None, None, None
    if config.split_mode == "layer":
        num_layers = file.metadata["llama.block_count"]
        split = split_layers([1] * num_layers, shares_of(config, processes, None))
        layers = split.layers(processes.rank)
    model = models.load(file, layers=layers)
    lora = LoraConfig(r=config.r, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout)
    adapter = attach(model, lora, seed=config.seed)
    model.neftune_noise_alpha = config.neftune_noise_alpha
    model.train()
    files = OutputFiles(folder / "a.gguf")
    parameters, others = {}, {}
    for name, pair in adapter.pairs.items():
        some = parameters if layers is None or int(name.split(".")[1]) in layers else others
        some[f"{name}.lora_a"], some[f"{name}.lora_b"] = pair.lora_a, pair.lora_b
    if split is not None:
        width = file.metadata["llama.embedding_length"]
        model.checkpoint_policy = "none" if config.gradient_checkpointing == "auto" else config.gradient_checkpointing
        pipeline = Pipeline(model, config, processes, torch.device("cpu"), width=width, dtype=torch.float32)
    rows, held_out = list(rows), list(held_out)
    if config.precompute_ref_log_probs:
        reference = ReferenceModel(
            model,
            base_sha256=str(folder),
            compute="",
            micro_batch_size=config.micro_batch_size,
            device=torch.device("cpu"),
            processes=processes or Processes(),
            pipeline=pipeline,
        )
        rows, held_out = reference.of(rows), reference.of(held_out)
    return Trainer(
        OBJECTIVES[config.method](model, config),
        parameters,
        rows,
        held_out,
        config=config,
        files=files,
        base_sha256="base",
        data_sha256="data",
        started="2026-01-02T03:04:05",
        resume_from=load_checkpoint(files.checkpoint) if resume else None,
        device=torch.device("cpu"),
        progress=progress or Progress(),
        processes=processes,
        pipeline=pipeline,
        other_parameters=others,
        layers=None if split is None else str(split),
    )


def weights(trainer: Trainer) -> torch.Tensor:
    parameters = {**trainer.parameters, **trainer.other_parameters}
    return torch.cat([parameters[name].detach().flatten() for name in sorted(parameters)])


def interrupt_at_call(trainer: Trainer, call: int, number: int = signal.SIGINT) -> None:
    """Send a signal to this process while micro-batch `call` (from 1) is computed."""
    compute, calls = trainer.objective.model.loss, iter(range(1, 10_000))

    def loss(batch):
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return compute(batch)

    trainer.objective.model.loss = loss


def test_steps_of_an_epoch_take_every_row_once(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path, gradient_accumulation_steps=2)
    assert trainer.batches.steps_per_epoch == 3
    for epoch in range(2):
        batches = [batch for step in range(3) for batch in trainer.batches.of_step(3 * epoch + step).micro_batches]
        assert [batch.num_documents for batch in batches] == [2, 2, 2, 2, 2, 1]
        seen = [
            tuple(batch.tokens_T[a:b].tolist())
            for batch in batches
            for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
        ]
        assert sorted(seen) == sorted(tuple(row.input_ids) for row in ROWS)
    first, second = (
        [batch.tokens_T.tolist() for batch in trainer.batches.of_step(step).micro_batches] for step in (0, 3)
    )
    assert first != second


def test_number_of_steps():
    config = {
        "model": "m",
        "data": ("d",),
        "output": "o",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
    }
    assert count_steps(TrainConfig(**config, num_train_epochs=2), 13) == 6
    assert count_steps(TrainConfig(**config, num_train_epochs=0.5), 13) == 2
    assert count_steps(TrainConfig(**config, num_train_epochs=2, max_steps=50), 13) == 50


def test_training_learns_and_every_pair_moves(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path, max_steps=30, lr_scheduler_type="constant")
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    summary = trainer.run()
    losses = [line["loss"] for line in read_metrics(trainer.files.metrics)]
    assert losses[-1] < 0.8 * losses[0] and summary.loss == pytest.approx(losses[-1])
    assert all(not torch.equal(before[name], parameter) for name, parameter in trainer.parameters.items())


def test_one_row_in_eight_micro_batches_is_eight_rows_in_one(tiny_llama_path, tmp_path):
    eight = make_trainer(
        tiny_llama_path, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=8, max_steps=1
    )
    one = make_trainer(
        tiny_llama_path, tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=1
    )
    summaries = [eight.run(), one.run()]
    assert summaries[0].loss == pytest.approx(summaries[1].loss, rel=1e-5)
    norms = [next(read_metrics(trainer.files.metrics))["grad_norm"] for trainer in (eight, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_loss_is_the_mean_over_learnt_tokens_of_the_step(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path, max_steps=1)
    with torch.no_grad():
        sums = [trainer.objective.model.loss(batch) for batch in trainer.batches.of_step(0).micro_batches]
    expected = sum(float(loss) for loss, _ in sums) / sum(count for _, count in sums)
    assert trainer.run().loss == pytest.approx(expected, rel=1e-5)


def gradients(trainer: Trainer) -> tuple[float, torch.Tensor]:
    """Loss per learnt token and gradient of the first step."""
    step = trainer.batches.of_step(0)
    loss = torch.stack([trainer.objective.loss(batch)[0] / step.num_units for batch in step.micro_batches]).sum()
    loss.backward()
    parts = [parameter.grad.flatten() for parameter in trainer.parameters.values()]
    return float(loss.detach()), torch.cat(parts)


@pytest.mark.parametrize("method", ["sft", "dpo", "orpo"])
def test_packed_rows_give_the_loss_and_gradient_of_rows_one_by_one(tiny_llama_path, tmp_path, method):
    rows = make_rows(40) if method == "sft" else make_pairs(40)
    settings = {"rows": rows, "method": method, "max_seq_length": 32}
    alone = make_trainer(
        tiny_llama_path, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=40, **settings
    )
    packed = make_trainer(tiny_llama_path, tmp_path, packing=True, gradient_accumulation_steps=20, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # With lora_b at zero only half of the gradient would be compared.
        for one, other in zip(alone.parameters.values(), packed.parameters.values(), strict=True):
            one.copy_(torch.randn(one.shape, generator=generator) * 0.05)
            other.copy_(one)
    assert alone.batches.steps_per_epoch == packed.batches.steps_per_epoch == 1
    sizes = [batch.num_tokens for batch in packed.batches.of_step(0).micro_batches]
    assert len(sizes) < 20 and max(sizes) <= 2 * 32
    (loss, gradient), (packed_loss, packed_gradient) = gradients(alone), gradients(packed)
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    assert (packed_gradient - gradient).norm() < 1e-5 * gradient.norm()


def test_packed_run_resumes_in_the_same_bits(tiny_llama_path, tmp_path):
    settings = {"packing": True, "max_seq_length": 24, "max_steps": 9, "lora_dropout": 0.2, "rows": make_rows(23)}
    (tmp_path / "straight").mkdir()
    (tmp_path / "stopped").mkdir()
    straight = make_trainer(tiny_llama_path, tmp_path / "straight", **settings)
    straight.run()
    stopped = make_trainer(tiny_llama_path, tmp_path / "stopped", **settings)
    assert 1 < stopped.batches.steps_per_epoch < 6
    interrupt_at_call(stopped, 11)
    with pytest.raises(TrainingInterrupted):
        stopped.run()
    resumed = make_trainer(tiny_llama_path, tmp_path / "stopped", resume=True, **settings)
    resumed.run()
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize("call", [1, 26, 27, 33])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_resumed_run_ends_in_the_same_bits(tiny_llama_path, tmp_path, call, number):
    """Stopped at the start, inside and at the end of an accumulation window, in epoch 1 to 6, with dropout on."""
    settings = {
        "max_steps": 20,
        "lora_dropout": 0.3,
        "gradient_accumulation_steps": 2,
        "logging_steps": 3,
        "weight_decay": 0.1,
    }
    (tmp_path / "straight").mkdir()
    (tmp_path / "stopped").mkdir()
    straight = make_trainer(tiny_llama_path, tmp_path / "straight", **settings)
    expected = straight.run()

    stopped = make_trainer(tiny_llama_path, tmp_path / "stopped", **settings)
    interrupt_at_call(stopped, call, number)
    with pytest.raises(TrainingInterrupted, match="--resume"):
        stopped.run()
    torch.rand(17)
    resumed = make_trainer(tiny_llama_path, tmp_path / "stopped", resume=True, **settings)
    result = resumed.run()
    assert torch.equal(weights(resumed), weights(straight))
    assert result.loss == expected.loss
    assert {path.name for path in (tmp_path / "stopped").iterdir()} == {"a.gguf.checkpoint", "a.gguf.metrics.jsonl"}


def test_stop_writes_the_state_after_the_last_whole_step(tiny_llama_path, tmp_path):
    straight = make_trainer(tiny_llama_path, tmp_path, max_steps=8)
    states = []
    save = straight._save
    straight.config = TrainConfig(**{**straight.config.to_dict(), "save_steps": 1})
    straight._save = lambda done: (save(done), states.append(load_checkpoint(straight.files.checkpoint).parameters))
    straight.run()
    (tmp_path / "other").mkdir()
    stopped = make_trainer(tiny_llama_path, tmp_path / "other", max_steps=8)
    # Steps of an epoch have 2, 2 and 2 micro-batches: the first of step 4 is call 7.
    interrupt_at_call(stopped, 7)
    with pytest.raises(TrainingInterrupted, match="after step 3 of 8"):
        stopped.run()
    saved = load_checkpoint(stopped.files.checkpoint)
    assert saved.step == 3
    torch.testing.assert_close(saved.parameters, states[2], rtol=0, atol=0)


def test_stop_in_the_last_step_is_not_forgotten(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path, max_steps=2)
    interrupt_at_call(trainer, 4)
    with pytest.raises(TrainingInterrupted, match="after step 2 of 2"):
        trainer.run()
    assert load_checkpoint(trainer.files.checkpoint).step == 2


def test_run_that_takes_too_much_memory_stops_with_its_state_written(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path)
    answers = iter([None, None, "The process took 9 MiB, max_memory is 8 MiB."])
    trainer.memory_excess = lambda: next(answers)
    with pytest.raises(UnsupportedError, match=r"took 9 MiB.* Stopped after step 3 of 8; the state is in .*--resume"):
        trainer.run()
    assert load_checkpoint(trainer.files.checkpoint).step == 3


def test_handlers_of_signals_are_put_back(tiny_llama_path, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    make_trainer(tiny_llama_path, tmp_path, max_steps=1).run()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_second_interrupt_ends_at_once_and_keeps_the_old_checkpoint(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path, save_steps=2)
    compute, calls = trainer.objective.model.loss, iter(range(1, 100))

    def loss(batch):
        if next(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return compute(batch)

    trainer.objective.model.loss = loss
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.run()
    assert not isinstance(caught.value, TrainingInterrupted)
    assert load_checkpoint(trainer.files.checkpoint).step == 2


def test_changed_settings_are_refused_at_resume(tiny_llama_path, tmp_path):
    make_trainer(tiny_llama_path, tmp_path, max_steps=2).run()
    with pytest.raises(ConfigError, match="learning_rate: 0.5, the checkpoint has 0.01"):
        make_trainer(tiny_llama_path, tmp_path, max_steps=2, learning_rate=0.5, resume=True).run()


def test_finished_run_resumes_to_its_end_without_a_step(tiny_llama_path, tmp_path):
    first = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:2])
    expected = first.run()
    again = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:2], resume=True)
    result = again.run()
    assert torch.equal(weights(again), weights(first))
    assert (result.loss, result.eval_loss, result.first_eval_loss) == (
        expected.loss,
        expected.eval_loss,
        expected.first_eval_loss,
    )
    assert result.num_tokens == 0


def test_held_out_loss_makes_no_gradient_and_no_dropout(tiny_llama_path, tmp_path):
    trainer = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:3], lora_dropout=0.5, max_steps=6)
    compute, modes = trainer.objective.model.loss, []

    def loss(batch):
        modes.append((torch.is_grad_enabled(), trainer.objective.model.training))
        return compute(batch)

    trainer.objective.model.loss = loss
    summary = trainer.run()
    # At the start, after each epoch of 3 steps; 2 micro-batches each time.
    assert modes.count((False, False)) == 6 and modes.count((True, True)) == 12 and len(modes) == 18
    evals = [line for line in read_metrics(trainer.files.metrics) if "eval_loss" in line]
    assert [line["step"] for line in evals] == [0, 3, 6]
    assert (summary.first_eval_loss, summary.eval_loss) == (evals[0]["eval_loss"], evals[-1]["eval_loss"])
    with torch.no_grad():
        trainer.objective.model.eval()
        total, count = zip(*(compute(batch) for batch in trainer.batches.held_out()), strict=True)
    assert summary.eval_loss == pytest.approx(float(sum(total)) / sum(count), rel=1e-6)
    assert evals[0]["eval_tokens"] == sum(row.num_learnt for row in ROWS[:3])


def test_stop_during_the_held_out_loss_is_obeyed_and_made_up_for(tiny_llama_path, tmp_path):
    straight = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:4], max_steps=6)
    expected = straight.run()
    (tmp_path / "other").mkdir()
    stopped = make_trainer(tiny_llama_path, tmp_path / "other", held_out=ROWS[:4], max_steps=6)
    # 2 held-out micro-batches, 6 of the first epoch, then the first held-out one after it.
    interrupt_at_call(stopped, 9)
    with pytest.raises(TrainingInterrupted, match="after step 3"):
        stopped.run()
    resumed = make_trainer(tiny_llama_path, tmp_path / "other", held_out=ROWS[:4], max_steps=6, resume=True)
    assert resumed.run().eval_loss == expected.eval_loss
    steps = [line["step"] for line in read_metrics(resumed.files.metrics) if "eval_loss" in line]
    assert steps == [0, 3, 6]


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


def evaluations_of(trainer: Trainer, losses: list[float]) -> None:
    """Let the held-out loss be what is given."""
    values = iter(losses)
    trainer._held_out_means = lambda stop_requested: [next(values)]


def test_training_stops_early_and_keeps_the_best_weights(tiny_llama_path, tmp_path):
    settings = {"eval_steps": 1, "early_stopping_patience": 2, "load_best_model_at_end": True, "save_steps": 1}
    trainer = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:2], max_steps=8, **settings)
    evaluations_of(trainer, [5.0, 4.0, 3.0, 3.5, 3.2, 1.0])
    seen = {}
    save = trainer._save
    trainer._save = lambda done: (save(done), seen.setdefault(done, weights(trainer)))
    summary = trainer.run()
    assert (summary.num_steps, summary.num_planned_steps, summary.best_step) == (4, 8, 2)
    assert (summary.first_eval_loss, summary.eval_loss) == (5.0, 3.0)
    assert torch.equal(weights(trainer), seen[2]) and not torch.equal(weights(trainer), seen[4])

    again = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:2], max_steps=8, resume=True, **settings)
    assert again.run() == dataclasses.replace(summary, num_tokens=0, seconds=0.0)
    assert torch.equal(weights(again), seen[2])


def test_a_resumed_run_stops_early_where_it_would_have_stopped(tiny_llama_path, tmp_path):
    settings = {"eval_steps": 1, "early_stopping_patience": 2, "load_best_model_at_end": True, "max_steps": 8}
    losses = [5.0, 3.0, 4.0, 4.0, 1.0]
    (tmp_path / "straight").mkdir()
    straight = make_trainer(tiny_llama_path, tmp_path / "straight", held_out=ROWS[:2], **settings)
    evaluations_of(straight, losses)
    expected = straight.run()
    stopped = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:2], **settings)
    evaluations_of(stopped, losses)
    # Two micro-batches a step, and the third step is cut short.
    interrupt_at_call(stopped, 5)
    with pytest.raises(TrainingInterrupted, match="after step 2"):
        stopped.run()
    resumed = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:2], resume=True, **settings)
    evaluations_of(resumed, losses[3:])
    result = resumed.run()
    assert (result.num_steps, result.best_step) == (expected.num_steps, expected.best_step) == (3, 1)
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "adamw_8bit", "r": 32, "loraplus_lr_ratio": 4.0},
        {"optim": "muon"},
        {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "wsd", "neftune_noise_alpha": 5.0},
        {"method": "dpo", "neftune_noise_alpha": 5.0},
        {"method": "orpo", "optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_kind_of_run_learns_and_resumes_in_the_same_bits(tiny_llama_path, tmp_path, settings):
    """With dropout, held-out losses in between, and a stop inside an accumulation window."""
    rows = make_pairs(9) if "method" in settings else ROWS
    settings = {"max_steps": 9, "lora_dropout": 0.1, "eval_steps": 2, "weight_decay": 0.01, **settings}
    (tmp_path / "straight").mkdir()
    straight = make_trainer(tiny_llama_path, tmp_path / "straight", rows=rows, held_out=rows[:3], **settings)
    before = weights(straight)
    expected = straight.run()
    assert expected.eval_loss < expected.first_eval_loss
    assert not torch.equal(weights(straight), before)

    stopped = make_trainer(tiny_llama_path, tmp_path, rows=rows, held_out=rows[:3], **settings)
    take_step, calls = stopped.optimizer.step, iter(range(1, 100))

    def step(*args, **arguments):
        if next(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return take_step(*args, **arguments)

    stopped.optimizer.step = step
    with pytest.raises(TrainingInterrupted, match="after step 5"):
        stopped.run()
    resumed = make_trainer(tiny_llama_path, tmp_path, rows=rows, held_out=rows[:3], resume=True, **settings)
    result = resumed.run()
    assert torch.equal(weights(resumed), weights(straight))
    assert (result.loss, result.eval_loss) == (expected.loss, expected.eval_loss)


def test_evaluating_changes_no_bit_of_a_schedule_free_run(tiny_llama_path, tmp_path):
    settings = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "max_steps": 6}
    with_evaluation = make_trainer(tiny_llama_path, tmp_path, held_out=ROWS[:2], eval_steps=1, **settings)
    with_evaluation.run()
    without = make_trainer(tiny_llama_path, tmp_path, **settings)
    without.run()
    assert torch.equal(weights(with_evaluation), weights(without))


def test_preferences_are_learnt_and_told(tiny_llama_path, tmp_path):
    pairs = make_pairs(4)
    trainer = make_trainer(
        tiny_llama_path, tmp_path, rows=pairs, held_out=pairs, method="dpo", max_steps=20, lr_scheduler_type="constant"
    )
    summary = trainer.run()
    lines = list(read_metrics(trainer.files.metrics))
    first, *_, last = [line for line in lines if "loss" in line]
    assert first["loss"] == pytest.approx(math.log(2)) and first["rewards/margins"] == 0
    assert last["loss"] < 0.1 and last["rewards/accuracies"] == 1 and last["rewards/chosen"] > last["rewards/rejected"]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert evaluated[0]["eval_loss"] == pytest.approx(math.log(2)) and evaluated[-1]["eval_rewards/accuracies"] == 1
    assert summary.eval_loss == evaluated[-1]["eval_loss"]


def test_rows_without_a_rejected_answer_are_refused_for_preferences(tiny_llama_path, tmp_path):
    with pytest.raises(ConfigError, match="row 0 has none"):
        make_trainer(tiny_llama_path, tmp_path, method="dpo")


FRESH_PROCESS = """
import sys, importlib.util
from pathlib import Path
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("test_trainer", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
torch.rand(int(sys.argv[5]))
model, folder, seed = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
trainer = module.make_trainer(model, folder, seed=seed, max_steps=5, lora_dropout=0.1)
start = module.weights(trainer)
trainer.run()
sys.stdout.write(start.numpy().tobytes().hex() + " " + module.weights(trainer).numpy().tobytes().hex())
"""


def test_fresh_processes_agree_bit_for_bit_and_the_seed_decides(tiny_llama_path, tmp_path):
    running = []
    for number, seed in enumerate([1, 1, 2]):
        (tmp_path / str(number)).mkdir()
        command = [
            sys.executable,
            "-c",
            FRESH_PROCESS,
            __file__,
            str(tiny_llama_path),
            str(tmp_path / str(number)),
            str(seed),
            str(number),
        ]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    (start_1, end_1), (start_2, end_2), (start_3, end_3) = (
        process.communicate(timeout=300)[0].split() for process in running
    )
    assert start_1 == start_2 and end_1 == end_2 and start_1 != end_1
    assert start_1 != start_3 and end_1 != end_3


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
