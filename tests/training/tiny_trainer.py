"""A trainer of a tiny random model, as several tests and the processes that they start want one."""

import random
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch

from pyggtrain import models
from pyggtrain.adapters.lora import LoraConfig, attach
from pyggtrain.data.examples import Example
from pyggtrain.gguf import GGUFFile
from pyggtrain.training.checkpoint import load_checkpoint
from pyggtrain.training.config import TrainConfig
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
