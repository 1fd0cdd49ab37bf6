"""A run that is stopped, or stops early, goes on as if it had not been."""

import dataclasses
import os
import signal

import pytest
import torch
from tiny_trainer import ROWS, make_pairs, make_rows, make_trainer, weights

from pyggtrain.errors import ConfigError, UnsupportedError
from pyggtrain.training.checkpoint import load_checkpoint
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.interrupts import TrainingInterrupted
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.trainer import Trainer


def interrupt_at_call(trainer: Trainer, call: int, number: int = signal.SIGINT) -> None:
    """Send a signal to this process while micro-batch `call` (from 1) is computed."""
    compute, calls = trainer.objective.model.loss, iter(range(1, 10_000))

    def loss(batch):
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return compute(batch)

    trainer.objective.model.loss = loss


def evaluations_of(trainer: Trainer, losses: list[float]) -> None:
    """Let the held-out loss be what is given."""
    values = iter(losses)
    trainer._held_out_means = lambda stop_requested: [next(values)]


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
