"""The loop on a tiny random model: order of rows, losses and gradients of a step, held-out loss, seeds."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_trainer import ROWS, make_pairs, make_rows, make_trainer, weights

from pyggtrain.errors import ConfigError
from pyggtrain.training.batches import count_steps
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.metrics import read_metrics
from pyggtrain.training.trainer import Trainer


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
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.append(sys.argv[1])
from tiny_trainer import make_trainer, weights
torch.rand(int(sys.argv[5]))
model, folder, seed = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
trainer = make_trainer(model, folder, seed=seed, max_steps=5, lora_dropout=0.1)
start = weights(trainer)
trainer.run()
sys.stdout.write(start.numpy().tobytes().hex() + " " + weights(trainer).numpy().tobytes().hex())
"""


def test_fresh_processes_agree_bit_for_bit_and_the_seed_decides(tiny_llama_path, tmp_path):
    running = []
    for number, seed in enumerate([1, 1, 2]):
        (tmp_path / str(number)).mkdir()
        command = [
            sys.executable,
            "-c",
            FRESH_PROCESS,
            str(Path(__file__).parent),
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
