"""Masked diffusion on tiny models that llama.cpp samples by it: the formula, the draws, a whole run."""

import json
import signal
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain import api, models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.data.encode import Example
from pyggtrain.errors import ConfigError, UnsupportedError
from pyggtrain.gguf import GGUFFile, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.nn import Batch, Model
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.interrupts import TrainingInterrupted
from pyggtrain.training.masked_diffusion import MAX_FILL, MaskedDiffusion, masked_excerpts, objective_of
from pyggtrain.training.objectives import DPO, Supervised
from pyggtrain.training.progress import Progress

MASK, EOS = 95, 3
Make = Callable[..., Path]


@pytest.fixture
def make_file(tiny_llama_path: Path, tmp_path: Path) -> Make:
    """make_file(**keys): the tiny llama's weights as a model that fills in masked tokens."""

    def make(**keys: Any) -> Path:
        file = GGUFFile.open(tiny_llama_path)
        metadata = {key.replace("llama.", "dream."): value for key, value in typed_metadata(file).items()}
        own = {"tokenizer.ggml.mask_token_id": MASK, "tokenizer.ggml.eos_token_id": EOS}
        own |= {key.replace("__", "."): value for key, value in keys.items()}
        metadata |= {"general.architecture": "dream", **{key: value for key, value in own.items() if value is not None}}
        path = tmp_path / f"dream-{len(list(tmp_path.iterdir()))}.gguf"
        write_gguf(path, metadata, file.tensors.values())
        return path

    return make


def config_of(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m.gguf", data=("d.jsonl",), output="a.gguf", **settings)


def loaded(path: Path) -> Model:
    """The model with an adapter that does something."""
    model = models.load(GGUFFile.open(path), compute="exact")
    adapter = attach(model, LoraConfig(r=4), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for pair in adapter.pairs.values():
            pair.lora_b.copy_(torch.randn(pair.lora_b.shape, generator=generator) * 0.2)
    return model.train()


def row(prompt: list[int], answer: list[int]) -> Example:
    return Example(array("i", prompt + answer), array("i", [-100] * len(prompt) + answer), "row 1")


ROWS = [row([5, 6, 7], [8, 9, 10, 11]), row([12, 13], [14, 15, 16]), row([20], [21, 22, 23, 24, 25])]


def batch_of(objective: MaskedDiffusion, rows: list[Example] = ROWS) -> Batch:
    return Batch.from_documents([document for row in rows for document in objective.documents(row)])


@pytest.mark.parametrize("shifts", [True, False], ids=["shifted logits", "logits in place"])
def test_the_loss_and_its_gradient_are_the_papers_formula(make_file: Make, shifts: bool) -> None:
    model = loaded(make_file(diffusion__shift_logits=shifts))
    objective = MaskedDiffusion(model, config_of())
    batch = batch_of(objective)
    torch.manual_seed(7)
    found, _ = objective.loss(batch)
    torch.manual_seed(7)
    drawn, numbers = torch.rand(3), torch.rand(batch.num_tokens)
    ratios = 1e-3 + 0.999 * drawn.double()
    # Token by token, each document alone.
    wanted, num_masked = torch.zeros((), dtype=torch.float64), 0
    for index, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        ids, learnt = batch.tokens_T[start:end].tolist(), batch.targets_T[start:end].tolist()
        places = [
            place
            for place in range(1, end - start)
            if learnt[place - 1] != -100 and numbers[start + place - 1] < ratios[index]
        ]
        seen = [MASK if place in places else token for place, token in enumerate(ids)]
        logits = model.logits(Batch.from_documents([(seen, seen)])).double().log_softmax(-1)
        for place in places:
            wanted = wanted - logits[place - 1 if shifts else place, ids[place]] / ratios[index]
        num_masked += len(places)
    assert 0 < num_masked < sum(item.num_learnt for item in ROWS) + 3 * MAX_FILL
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for got, want in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=1e-5)


def test_a_prompt_is_never_masked_and_a_masked_token_is_not_seen(make_file: Make) -> None:
    objective = MaskedDiffusion(loaded(make_file()), config_of(), masks_all=True)
    batch = batch_of(objective)
    masked = objective._masked(batch, batch.targets_T != -100)
    is_prompt = torch.cat([torch.tensor([True]), batch.targets_T[:-1] == -100])
    assert torch.equal(masked.tokens_T[is_prompt], batch.tokens_T[is_prompt])
    assert (masked.tokens_T[~is_prompt] == MASK).all()


def test_tokens_see_the_whole_document_and_nothing_else(make_file: Make) -> None:
    model = loaded(make_file()).eval()
    first, second = [1, 2, 3, 4], [5, 6, 7]
    together = model.logits(Batch.from_documents([(first, first), (second, second)]))
    torch.testing.assert_close(together[:4], model.logits(Batch.from_documents([(first, first)])))
    changed = model.logits(Batch.from_documents([([1, 2, 3, 9], first), (second, second)]))
    assert not torch.allclose(together[0], changed[0]) and torch.equal(together[4:], changed[4:])


def test_the_mean_over_many_draws_is_the_exact_sum_over_masks(make_file: Make) -> None:
    """Weights of 1 / t make the expectation that of the paper: with all masks of two tokens written out."""
    model = loaded(make_file(tokenizer__ggml__eos_token_id=None)).eval()
    objective = MaskedDiffusion(model, config_of())
    batch = batch_of(objective, [row([5, 6], [7, 8])])

    @torch.no_grad()
    def log_p(masks: tuple[bool, bool]) -> float:
        seen = [5, 6, MASK if masks[0] else 7, MASK if masks[1] else 8]
        logits = model.logits(Batch.from_documents([(seen, seen)])).log_softmax(-1)
        return float(
            sum(logits[place - 1, token] for place, token, is_mask in ((2, 7, masks[0]), (3, 8, masks[1])) if is_mask)
        )

    # One of two is masked with t (1 - t), both with t²; the integral of each over t, divided by t, is 1/2.
    wanted = -0.5 * (log_p((True, False)) + log_p((False, True)) + log_p((True, True)))
    model.train()
    torch.manual_seed(0)
    with torch.no_grad():
        losses = [float(objective.loss(batch)[0]) for _ in range(3000)]
    mean, spread = torch.tensor(losses).mean(), torch.tensor(losses).std() / len(losses) ** 0.5
    assert abs(float(mean) - wanted) < 4 * float(spread) < 0.15 * wanted


def test_held_out_rows_are_masked_alike_each_time_and_in_every_batch(make_file: Make) -> None:
    model = loaded(make_file()).eval()
    objective = MaskedDiffusion(model, config_of())
    with torch.no_grad():
        once = objective.loss(batch_of(objective))[0]
        torch.manual_seed(99)
        assert torch.equal(once, objective.loss(batch_of(objective))[0])
        alone = sum(objective.loss(batch_of(objective, [item]))[0] for item in ROWS)
    torch.testing.assert_close(once, alone)


def test_an_answer_is_followed_by_a_drawn_number_of_end_tokens_that_count(make_file: Make) -> None:
    objective = MaskedDiffusion(loaded(make_file()), config_of())
    rows = [row([5], [index, index + 1]) for index in range(10, 60)]
    fills = []
    for item in rows:
        ((ids, labels),) = objective.documents(item)
        fill = len(ids) - item.num_tokens
        assert ids == [*item.input_ids, *[EOS] * fill] and labels == [*item.labels, *[EOS] * fill]
        fills.append(fill)
    assert min(fills) >= 0 and max(fills) <= MAX_FILL and len(set(fills)) > 20
    assert objective.num_units(rows) == sum(fills) + 2 * len(rows)
    unfinished = Example(array("i", [1, 2, 3]), array("i", [-100, 2, -100]), "row 1")
    assert objective.documents(unfinished) == [([1, 2, 3], [-100, 2, -100])]


def test_what_does_not_fit_is_refused(make_file: Make, tiny_llama_path: Path) -> None:
    model = loaded(make_file())
    with pytest.raises(ConfigError, match="method: dpo compares the likelihoods of whole answers, and dream fills in"):
        objective_of(model, config_of(method="dpo"))
    with pytest.raises(ConfigError, match="sample_prompts: asks for answers token by token"):
        objective_of(model, config_of(sample_prompts=("Hello",)))
    with pytest.raises(ConfigError, match="runtime: asks for answers token by token"):
        objective_of(model, config_of(runtime="http://127.0.0.1:1"))
    with pytest.raises(UnsupportedError, match="the file names no mask token"):
        objective_of(loaded(make_file(tokenizer__ggml__mask_token_id=None)), config_of())
    causal = models.load(GGUFFile.open(tiny_llama_path))
    assert isinstance(objective_of(causal, config_of()), Supervised)
    assert isinstance(objective_of(causal, config_of(method="dpo")), DPO)


@pytest.mark.parametrize("shifts", [True, False])
def test_excerpts_hold_masks_and_ask_for_what_is_under_them(make_file: Make, shifts: bool) -> None:
    model = loaded(make_file(diffusion__shift_logits=shifts))
    ((tokens, labels),) = masked_excerpts(model, [([1, 2, 3, 4, 5, 6], [-100, -100, 3, 4, 5, 6])])
    assert tokens == [1, 2, 3, MASK, 5, MASK]
    assert labels == ([-100, -100, -100, 4, -100, 6] if shifts else [-100, -100, -100, -100, 4, -100])


def small_with_a_tokenizer(smollm2: GGUFFile, path: Path) -> Path:
    """A random LLaDA of one layer with SmolLM2's tokenizer, all F32."""
    generator = torch.Generator().manual_seed(0)
    vocab, width, ff = smollm2.tensors["token_embd.weight"].shape[0], 32, 48
    shapes = {"token_embd": (vocab, width), "output": (vocab, width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width, width) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {"blk.0.ffn_gate": (ff, width), "blk.0.ffn_up": (ff, width), "blk.0.ffn_down": (width, ff)}
    shapes |= {"blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    tensors = [
        quantize_tensor(
            f"{name}.weight",
            torch.ones(shape) if "norm" in name else 0.2 * torch.randn(shape, generator=generator),
            "F32",
        )
        for name, shape in shapes.items()
    ]
    kept = ("tokenizer.",)
    metadata = {key: value for key, value in typed_metadata(smollm2).items() if key.startswith(kept)}
    metadata |= {
        "general.architecture": "llada",
        "llada.block_count": 1,
        "llada.context_length": 256,
        "llada.embedding_length": width,
        "llada.feed_forward_length": ff,
        "llada.attention.head_count": 2,
        "llada.attention.layer_norm_rms_epsilon": 1e-5,
        "llada.rope.dimension_count": 16,
        "tokenizer.ggml.mask_token_id": 5,
        "diffusion.shift_logits": False,
    }
    write_gguf(path, metadata, tensors)
    return path


def test_a_run_learns_is_verified_resumes_to_the_same_bytes_and_says_how_it_is_sampled(
    smollm2: GGUFFile, tmp_path: Path
) -> None:
    model = small_with_a_tokenizer(smollm2, tmp_path / "llada.gguf")
    data = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"Say {word}", "completion": f" {word} {word}"} for word in ("one", "two", "six", "ten") * 3]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"prompt": "Say two", "completion": " two two"}) + "\n")
    settings: dict[str, Any] = {
        "model": str(model),
        "data": [str(data)],
        "r": 8,
        "lora_alpha": 16.0,
        "learning_rate": 0.02,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 12,
        "eval_data": [str(held_out)],
        "save_steps": 6,
        "num_threads": 1,
    }
    result = api.train(output=str(tmp_path / "whole.gguf"), **settings)
    assert result.parity is not None and result.parity.passed and result.parity.mode == "strict"
    assert result.summary.eval_loss < 0.8 * result.summary.first_eval_loss
    record = json.loads(result.files.record.read_text())
    assert "llama-diffusion-cli" in record["serve"] and "pyggtrain merge" in record["serve"]
    assert "cannot be run" in result.files.modelfile.read_text()

    class Interrupted(Progress):
        def step(self, metrics: Any) -> None:
            if metrics.step == 7:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted):
        api.train(output=str(tmp_path / "resumed.gguf"), progress=Interrupted(), **settings)
    resumed = api.train(output=str(tmp_path / "resumed.gguf"), resume=True, **settings)
    assert resumed.files.adapter.read_bytes() == result.files.adapter.read_bytes()
