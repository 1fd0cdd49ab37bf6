"""Most memory that a run on a CPU can take, from shapes alone: enough to see that memory is no question.

Rehearsing a step (`training.rehearse`) takes a second or more, and a small model on a large machine need not be
rehearsed to know that it fits. For hand-written models the activations of a step are bounded by the widths of the
products between which they lie; the bound is about twice the need, so it decides only where there is plenty. Everything
else, and every run with a limit, is rehearsed.
"""

from collections.abc import Callable

import torch

from pyggtrain import models
from pyggtrain.gguf import GGUFFile
from pyggtrain.ops import workspace
from pyggtrain.ops.linear_cross_entropy import MAX_CHUNK_BYTES
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.memory import (
    ALLOCATOR,
    ALLOCATOR_SHARE,
    PROGRAM,
    MemoryPlan,
    free_memory_bytes,
    program_bytes,
)
from pyggtrain.training.rehearse import ACTIVATIONS, ADAPTER, BASE, GRADIENTS, LOSS_CHUNK, OPTIMISER, WORKSPACE

# Nothing is recomputed: the fastest setting, which is the one to take where memory is plenty.
_POLICY = "none"
# A run is called small if its bound stays below this share of the free memory.
_PLENTY = 0.5
# Every activation has the width of what goes into a product or of what comes out of one, and no more than two of each
# are kept (k and rotated k, gate and its activation).
_COPIES = 2
# Logits, their gradient, and what comes and goes between them in the losses on pairs.
_LOGIT_COPIES = 4
_FLOAT = 4


def plan_with_plenty(
    file: GGUFFile, config: TrainConfig, device: torch.device, num_tokens: Callable[[int], int]
) -> MemoryPlan | None:
    """The fastest setting with an upper bound of what it takes, if that is far below the free memory.

    Args:
        file: the base.
        config: settings of the run.
        device: where it computes.
        num_tokens: number of rows -> tokens of the longest micro-batch of so many.

    Returns:
        None where this cannot be said: a rehearsal has to tell.
    """
    free_bytes = free_memory_bytes(device)
    is_known = file.architecture in models.ARCHITECTURES and config.model_impl != "graph"
    is_free = config.max_memory is None and config.gradient_checkpointing in ("auto", _POLICY)
    if device.type != "cpu" or free_bytes is None or not is_known or not is_free:
        return None
    tokens = num_tokens(config.micro_batch_size)
    plan = MemoryPlan(
        policy=_POLICY,
        micro_batch_size=config.micro_batch_size,
        num_tokens=tokens,
        device_type=device.type,
        parts=_parts(file, config, tokens),
        limit_bytes=None,
        free_bytes=free_bytes,
        degree="at most",
    )
    return plan if plan.new_bytes <= _PLENTY * free_bytes else None


def _parts(file: GGUFFile, config: TrainConfig, num_tokens: int) -> dict[str, int]:
    infos = file.tensor_infos.values()
    matrices = [info.shape for info in infos if len(info.shape) == 2 and info.name != "token_embd.weight"]
    num_vocab, width = file.tensor_infos["token_embd.weight"].shape
    rank = max(config.r, *config.rank_pattern.values()) if config.rank_pattern else config.r
    widths = sum(sum(shape) for shape in matrices)
    num_parameters = rank * widths
    per_token = _COPIES * (widths + rank * len(matrices)) + _LOGIT_COPIES * width
    parts = {
        BASE: sum(tensor.num_bytes for tensor in file.tensors.values()),
        ADAPTER: _FLOAT * num_parameters,
        OPTIMISER: 2 * _FLOAT * num_parameters,
        GRADIENTS: _FLOAT * num_parameters,
        ACTIVATIONS: _FLOAT * num_tokens * per_token,
        LOSS_CHUNK: _LOGIT_COPIES * max(MAX_CHUNK_BYTES, _FLOAT * num_vocab),
        WORKSPACE: workspace.limit_bytes(),
    }
    passing = sum(parts[name] for name in (GRADIENTS, ACTIVATIONS, LOSS_CHUNK, WORKSPACE))
    return {**parts, ALLOCATOR: round(ALLOCATOR_SHARE[_POLICY] * passing), PROGRAM: program_bytes(file.paths)}
