"""Everything that can go wrong before the first step, and the plan of the run that a person sees."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pyggtrain import models
from pyggtrain.adapters.gguf_adapter import restore
from pyggtrain.adapters.lora import LoraAdapter, LoraConfig, attach
from pyggtrain.cores import num_usable_cores
from pyggtrain.data.preview import preview
from pyggtrain.errors import ConfigError, UnsupportedError
from pyggtrain.gguf import GGUFFile, Tokenizer
from pyggtrain.gguf.finite import check_finite
from pyggtrain.gguf.hub import local_path
from pyggtrain.gguf.readable import check_readable
from pyggtrain.nn import LoraPair, Model, SplittableModel, activation_dtype
from pyggtrain.training.batches import count_steps
from pyggtrain.training.checkpoint import Checkpoint, load_checkpoint
from pyggtrain.training.config import GPU_COMPUTE, TrainConfig
from pyggtrain.training.data import RunData, load_data, longest_row, micro_batches
from pyggtrain.training.gpu_memory import num_vocab_of, plan_fused
from pyggtrain.training.init_adapter import read_init_adapter, taken_over
from pyggtrain.training.masked_diffusion import objective_of
from pyggtrain.training.memory import (
    MeasuredNeed,
    MemoryGuard,
    MemoryPlan,
    Planner,
    RehearsedNeed,
    free_memory_bytes,
    join_free_device_memory,
    limit_device_memory,
    mib,
    tune_allocator,
    with_a_workspace_that_fits,
)
from pyggtrain.training.memory_bound import plan_with_plenty
from pyggtrain.training.objectives import Document, Objective, Row
from pyggtrain.training.optimizers import check_optimizer
from pyggtrain.training.output import OutputFiles, check_free_space, check_output
from pyggtrain.training.pipeline import Pipeline, Split, shares_of, split_layers
from pyggtrain.training.processes import Processes, join_processes
from pyggtrain.training.progress import Progress
from pyggtrain.training.reference_log_probs import ReferenceModel
from pyggtrain.training.rehearse import ADAPTER, BASE, GRADIENTS, OPTIMISER, Rehearsal
from pyggtrain.training.schedule import num_warmup_steps
from pyggtrain.training.trackers import Together, check_trackers, make_trackers
from pyggtrain.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Preparation:
    """A run that is ready to start; nothing has been written.

    Attributes:
        config: settings.
        files: where it will write.
        base: the base file.
        tokenizer: of the base file.
        device: where it computes.
        max_length: longest row in tokens, the limit in force.
        data: encoded rows.
        model: with its adapter attached and its checkpoint policy set.
        adapter: what will be trained.
        memory: expected memory.
        checkpoint: state to continue from, None for a new run.
        started: when the run was started first (ISO 8601).
        processes: that share the rows, or the layers; the first one writes and tells.
        split: which layers each process has; None: all of them.
    """

    config: TrainConfig
    files: OutputFiles
    base: GGUFFile
    tokenizer: Tokenizer
    device: torch.device
    max_length: int
    data: RunData
    model: Model
    adapter: LoraAdapter
    memory: MemoryPlan
    checkpoint: Checkpoint | None
    started: str
    processes: Processes
    split: Split | None

    @cached_property
    def facts(self) -> dict[str, str]:
        """The plan, for a person: name -> value."""
        config, adapter, data = self.config, self.adapter, self.data
        pairs = adapter.pairs.values()
        num_processes = self.processes.num_replicas
        plan = micro_batches(config, data.rows, num_processes)
        num_steps = count_steps(config, plan.num_units, num_processes)
        step_rows = config.step_rows * num_processes
        shares = f"{num_processes} processes x " if num_processes > 1 else ""
        kinds = Counter(_kind(name) for name in adapter.pairs)
        facts = {
            "base": f"{self.base.path} ({self.base.architecture}, {mib(self.base.file_bytes)}), read only",
            "output": str(self.files.adapter),
            "trained": ", ".join(f"{kind} x {count}" for kind, count in kinds.items()),
            "trainable": f"{adapter.num_parameters:,} parameters in {len(adapter.pairs)} pairs; "
            f"r {_span(pair.rank for pair in pairs)}, factor {_span(pair.scale for pair in pairs)}",
        }
        if config.init_adapter is not None:
            facts["starts from"] = config.init_adapter
        if untouched := _layers_without_adapter(self.model, adapter):
            facts["untouched"] = (
                f"{len(untouched)} of {len(self.model.layers)} layers have no adapter: {_ranges(untouched)}"
            )
        facts |= {
            "rows": f"{len(data.rows)} to train on, {len(data.held_out)} held out; "
            f"at most {self.max_length} tokens each",
            "method": _method_text(config, self.model),
            "packing": f"{plan.num_units} packs of at most {config.max_seq_length} tokens, {100 * plan.fill:.1f} % full"
            if config.packing
            else "off",
            "steps": f"{num_steps} of {step_rows} {'packs' if config.packing else 'rows'} ({shares}"
            f"{config.micro_batch_size} x {config.gradient_accumulation_steps}), "
            f"{num_steps * step_rows / plan.num_units:.2f} epochs",
            "rate": f"{config.learning_rate:g}, {config.lr_scheduler_type}, "
            f"{num_warmup_steps(config, num_steps)} steps of warm-up",
            "device": f"{self.device}, {torch.get_num_threads()} threads, compute {config.compute}",
            "memory": self._memory_text(),
        }
        if self.split is not None:
            facts["layers"] = f"{self.split} on {self.processes.count} processes"
        if self.checkpoint is not None:
            facts["resume"] = f"after step {self.checkpoint.step}, started {self.started}"
        return facts

    def preview(self, *, color: bool) -> str:
        """The first training row as text, what is learnt set off."""
        return preview(self.data.rows.example(0), self.tokenizer, color=color)

    def trainer(self, progress: Progress) -> Trainer:
        """Return the loop for this run."""
        config, data = self.config, self.data
        parameters: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        for name, pair in self.adapter.pairs.items():
            some = parameters if self._is_own(name) else others
            some[f"{name}.lora_a"], some[f"{name}.lora_b"] = pair.lora_a, pair.lora_b
        pipeline = self._pipeline()
        rows: Sequence[Any] = data.rows
        held_out: Sequence[Any] = data.held_out
        if config.precompute_ref_log_probs:
            progress.message("computing what the base model thinks of all answers, or reading it from the cache")
            reference = ReferenceModel(
                self.model,
                base_sha256=self.base.sample_sha256,
                compute=f"{config.model_impl} {config.compute} {compute_dtype(config, self.device)}",
                micro_batch_size=config.micro_batch_size,
                device=self.device,
                processes=self.processes,
                pipeline=pipeline,
            )
            rows, held_out = reference.of(rows), reference.of(held_out)
        return Trainer(
            objective_of(self.model, config),
            parameters,
            rows,
            held_out,
            config=config,
            files=self.files,
            base_sha256=self.base.sample_sha256,
            data_sha256=data.sha256,
            held_out_sha256=data.held_out_report.sha256 if data.held_out_report is not None else None,
            started=self.started,
            resume_from=self.checkpoint,
            device=self.device,
            progress=Together([progress, *make_trackers(config, self.files)]),
            processes=self.processes,
            pipeline=pipeline,
            other_parameters=others,
            layers=None if self.split is None else str(self.split),
            check_base=self.base.check_unchanged,
            memory_excess=MemoryGuard(self.memory.limit_bytes, self.device).excess,
        )

    def whole_model(self) -> tuple[Model, dict[str, LoraPair]]:
        """The model with all its layers in one place, and the pairs of the adapter in it."""
        if self.split is None:
            return self.model, self.adapter.pairs
        # On the CPU, where every machine has room for the mapped file.
        model = models.load(self.base, compute=self.config.compute)
        pairs = {}
        for name, pair in self.adapter.pairs.items():
            moved = LoraPair(pair.lora_a.detach().cpu(), pair.lora_b.detach().cpu(), scale=pair.scale)
            pairs[name] = model.linears[name].lora = moved
        return model, pairs

    def _is_own(self, tensor: str) -> bool:
        """Whether this process trains the pair of a tensor: those of its layers, and on the last one the head's."""
        if self.split is None:
            return True
        layers, layer = self.split.layers(self.processes.rank), re.match(r"blk\.(\d+)\.", tensor)
        return int(layer[1]) in layers if layer else layers.stop == len(self.model.layers)

    def _pipeline(self) -> Pipeline | None:
        if self.split is None:
            return None
        assert isinstance(self.model, SplittableModel), "no other is loaded in parts (models.load)"
        return Pipeline(
            self.model,
            self.config,
            self.processes,
            self.device,
            width=self.base.tensor_infos["token_embd.weight"].shape[-1],
            dtype=compute_dtype(self.config, self.device),
        )

    def _memory_text(self) -> str:
        plan = self.memory
        parts = ", ".join(f"{name} {mib(num_bytes)}" for name, num_bytes in plan.parts.items() if num_bytes)
        text = f"{plan.degree} {mib(plan.total_bytes)} with {plan.num_tokens} tokens at a time, {plan.policy}: {parts}"
        if plan.host_bytes:
            text += f"; {mib(plan.host_bytes)} wait on the host"
        return f"{text}; {plan.bounds()}" if plan.bounds() else text


def prepare(config: TrainConfig) -> Preparation:
    """Check paths, read data, plan memory, load the model, attach the adapter. Writes nothing.

    Raises:
        OutputError: the output would overwrite something, or cannot be written.
        GGUFError, UnsupportedError: the base file, a weight that an adapter cannot train, a step that fits nowhere.
        DataError: the data.
        ConfigError: settings that do not fit model, data, device or installation.
        ProcessLostError: the run has several processes, and not all of them came.
    """
    check_optimizer(config)
    check_trackers(config)
    processes = join_processes(config.ddp_timeout, is_split=config.split_mode == "layer")
    config = replace(config, model=str(local_path(config.model)))
    files = OutputFiles(Path(config.output))
    check_output(files, Path(config.model), overwrite=config.overwrite, resume=config.resume)
    torch.set_num_threads(config.num_threads or max(1, num_usable_cores() // processes.local_count))
    checkpoint = load_checkpoint(files.checkpoint) if config.resume else None
    started = (
        checkpoint.started if checkpoint is not None else datetime.now().astimezone().isoformat(timespec="seconds")
    )
    base = GGUFFile.open(config.model)
    device = processes.device(choose_device(config.device))
    check_readable(base.path)
    check_finite(base, num_threads=torch.get_num_threads())
    tokenizer = Tokenizer.from_gguf(config.model)
    max_length = longest_row(config, base)
    data = load_data(
        config,
        tokenizer,
        max_length=max_length,
        started=datetime.fromisoformat(started),
        as_pairs=config.method != "sft",
    )
    if device.type == "cuda":
        join_free_device_memory()
    limit_device_memory(config.max_memory, device)
    split = _split(config, base, processes, device)
    # An adapter to start from brings its own ranks, which are known when it is read.
    planned = None if config.init_adapter or split is not None else _planned(config, base, device, data)
    if planned is not None:
        tune_allocator(planned.policy)
    model = models.load(
        base,
        implementation=config.model_impl,
        device=str(device),
        dtype=compute_dtype(config, device),
        compute="auto" if config.compute == "fp16" else config.compute,
        layers=None if split is None else split.layers(processes.rank),
    )
    check_fp8(config, base, is_fused=model.is_fused)
    start = None if config.init_adapter is None else read_init_adapter(config.init_adapter, base, model)
    if start is not None:
        config = taken_over(config, start, model)
    adapter = attach(model, lora_config(config), seed=config.seed)
    if start is not None:
        restore(adapter, start)
    model.neftune_noise_alpha = config.neftune_noise_alpha
    model.train()
    if split is not None:
        assert isinstance(model, SplittableModel), "no other is loaded in parts (models.load)"
        memory = _of_part(config, model, device, data)
        model.checkpoint_policy = memory.policy
    elif planned is None and model.is_fused:
        longest = _longest(config, data, objective_of(model, config))
        memory, model.kept = plan_fused(model, config, device, num_vocab_of(base), longest)
    else:
        # With an adapter to start from the plan follows its ranks; a GPU is measured.
        memory = planned or _planned(config, base, device, data) or _measured(config, model, device, data)
        tune_allocator(memory.policy)
        model.checkpoint_policy = memory.policy
    check_free_space(files, adapter.num_parameters, keeps_best=config.load_best_model_at_end)
    config = replace(
        config,
        per_device_train_batch_size=memory.micro_batch_size,
        gradient_accumulation_steps=config.step_rows // memory.micro_batch_size,
    )
    return Preparation(
        config,
        files,
        base,
        tokenizer,
        device,
        max_length,
        data,
        model,
        adapter,
        memory,
        checkpoint,
        started,
        processes,
        split,
    )


def lora_config(config: TrainConfig) -> LoraConfig:
    """Return the part of the settings that describes the adapter."""
    return LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform or None,
        use_rslora=config.use_rslora,
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
    )


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of activations: float32 on a CPU and with "exact", else bfloat16, or float16 if it is asked for.

    Raises:
        ConfigError: the device does not compute that way.
    """
    if config.compute in GPU_COMPUTE and device.type != "cuda":
        raise ConfigError(f"compute: found {config.compute!r} on {device}; needed: auto, exact or ggml, or a GPU")
    if config.compute == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"compute: found 'fp8', but {torch.cuda.get_device_name(device)} multiplies no 8-bit floats")
    if config.compute == "fp16":
        return torch.float16
    return torch.float32 if config.compute == "exact" else activation_dtype(device)


def check_fp8(config: TrainConfig, base: GGUFFile, *, is_fused: bool) -> None:
    """Refuse 8-bit floats for a model whose layers do not all run as halves.

    Raises:
        UnsupportedError: that is asked for.
    """
    if config.compute == "fp8" and not is_fused:
        raise UnsupportedError(
            f"compute='fp8': {base.architecture} does not run as fused halves of layers here (a bias, or a model from "
            "llama.cpp's graph). Use bf16."
        )


def choose_device(name: str) -> torch.device:
    """Return the device that a setting names; "auto" is a GPU if there is one that the operations support.

    Raises:
        ConfigError: no such device.
        UnsupportedError: the operations do not run there.
    """
    has_cuda_ops = torch._C._dispatch_has_kernel_for_dispatch_key("pyggtrain::lora_linear", "CUDA")
    if name == "auto":
        return torch.device("cuda" if has_cuda_ops and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device: found {name!r}; needed: "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device: found {name!r}, but torch {torch.__version__} sees no CUDA device; set device to cpu"
        )
    if device.type != "cpu" and not (device.type == "cuda" and has_cuda_ops):
        raise UnsupportedError(
            f"device: {name!r} is not supported by the operations of this version; set device to cpu"
        )
    return device


def _method_text(config: TrainConfig, model: Model) -> str:
    text = config.method if config.method == "sft" else f"{config.method}, beta {config.beta:g}"
    if model.diffusion is not None:
        text += f" by masked diffusion, mask token {model.diffusion.mask_token_id}"
    if config.neftune_noise_alpha > 0:
        text += f", noise on embeddings {config.neftune_noise_alpha:g}"
    ratio = "" if config.loraplus_lr_ratio == 1 else f", lora_b {config.loraplus_lr_ratio:g} times faster"
    return f"{text}; {config.optim}{ratio}"


def _planned(config: TrainConfig, base: GGUFFile, device: torch.device, data: RunData) -> MemoryPlan | None:
    """The plan made from the header alone; None on a GPU, where it is measured once the model is there."""
    if device.type == "cuda":
        return None
    longest = _longest_rows(config, data)
    plan = plan_with_plenty(base, config, device, lambda size: sum(row.num_tokens for row in longest(size)))
    if plan is not None:
        return plan
    rehearsal = Rehearsal(base, config, lora_config(config))
    return Planner(RehearsedNeed(rehearsal), config, device, _longest(config, data, rehearsal.objective)).choose()


def _split(config: TrainConfig, base: GGUFFile, processes: Processes, device: torch.device) -> Split | None:
    """Which layers each process gets; None where each has all of them.

    Raises:
        ConfigError: settings that a split model cannot have, or no processes to split it over.
    """
    if config.split_mode == "none":
        return None
    if processes.count == 1:
        raise ConfigError("split_mode: layer needs several processes; start them with torchrun, or set it to none.")
    if config.max_memory is not None:
        raise ConfigError(
            "max_memory: the memory of a part of a model is not planned yet; leave it out with split_mode."
        )
    if config.compute == "fp16":
        raise ConfigError("compute: fp16 scales its loss, which a split model does not do yet; needed: auto, or bf16")
    if config.gradient_checkpointing == "offload":
        raise ConfigError(
            "gradient_checkpointing: offload holds one micro-batch at a time, and a split model has several on the "
            "way; needed: none, matmuls or layers"
        )
    sizes: Counter[int] = Counter()
    for name, tensor in base.tensors.items():
        if layer := re.match(r"blk\.(\d+)\.", name):
            sizes[int(layer[1])] += tensor.num_bytes
    shares = shares_of(config, processes, free_memory_bytes(device) if device.type == "cuda" else None)
    return split_layers([sizes[index] for index in range(len(sizes))], shares)


def _of_part(config: TrainConfig, model: SplittableModel, device: torch.device, data: RunData) -> MemoryPlan:
    """What this process's part of a split model takes at least. The leanest policy is taken if none is set: as many
    micro-batches as there are processes are on the way at the same time.
    """
    own = [
        linear
        for name, linear in model.linears.items()
        if (layer := re.match(r"blk\.(\d+)\.", name)) is None or int(layer[1]) in model.own_layers
    ]
    num_parameters = sum(parameter.numel() for linear in own if linear.lora for parameter in linear.lora.parameters())
    longest = _longest_rows(config, data)(config.micro_batch_size)
    return MemoryPlan(
        policy="layers" if config.gradient_checkpointing == "auto" else config.gradient_checkpointing,
        micro_batch_size=config.micro_batch_size,
        num_tokens=sum(row.num_tokens for row in longest),
        device_type=device.type,
        parts={
            BASE: sum(linear.weight.numel() for linear in own),
            ADAPTER: 4 * num_parameters,
            OPTIMISER: 8 * num_parameters,
            GRADIENTS: 4 * num_parameters,
        },
        limit_bytes=None,
        free_bytes=free_memory_bytes(device),
        degree="at least",
    )


def _measured(config: TrainConfig, model: Model, device: torch.device, data: RunData) -> MemoryPlan:
    objective = objective_of(model, config, is_largest=True)
    longest = _longest(config, data, objective)
    return with_a_workspace_that_fits(
        lambda: Planner(MeasuredNeed(objective, model, device, config.optim), config, device, longest),
        lambda planner: planner.fastest() is not None,
    ).choose()


def _longest(config: TrainConfig, data: RunData, objective: Objective) -> Callable[[int], list[Document]]:
    """The longest micro-batch of so many rows (or packs), of those to train on and those held out."""
    longest = _longest_rows(config, data)
    return lambda size: [document for row in longest(size) for document in objective.documents(row)]


def _longest_rows(config: TrainConfig, data: RunData) -> Callable[[int], list[Row]]:
    plan = micro_batches(config, data.rows)

    def rows(size: int) -> list[Row]:
        longest_held_out = data.held_out.lengths.argsort()[::-1][:size]
        some: list[list[Row]] = [
            [data.rows[index] for index in plan.largest(size)],
            [data.held_out[int(index)] for index in longest_held_out],
        ]
        return max(some, key=lambda rows: sum(row.num_tokens for row in rows))

    return rows


def _kind(tensor: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", tensor).removesuffix(".weight")


def _layers_without_adapter(model: Model, adapter: LoraAdapter) -> list[int]:
    touched = {int(found[1]) for name in adapter.pairs if (found := re.match(r"blk\.(\d+)\.", name))}
    return [index for index in range(len(model.layers)) if index not in touched]


def _span(numbers: Iterable[float]) -> str:
    """Return one number, or the lowest and highest of several."""
    found = sorted(numbers)
    lowest, highest = found[0], found[-1]
    return f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)
