"""What a step takes on a GPU, and how much of a fused model's activations may be kept for what memory there is.

The buffers of a fused layer are few and known (`ops.fused`), so the peak is found by walking over a step in the order
in which it makes and frees them: quick enough to try hundreds of choices. Any model's step can be rehearsed instead
(`RehearsedOnGpu`), from the header alone. Everything is in bytes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.nn import GPU_POLICIES, FusedLayer, Model, QuantLinear, goes_to_host, kept_by, pinned_bytes
from pyggtrain.ops import workspace
from pyggtrain.ops.fused import Kept
from pyggtrain.ops.fused.feed_forward import MAX_TOKENS
from pyggtrain.ops.fused.linear_group import padding_of
from pyggtrain.ops.linear_cross_entropy import IGNORED, gpu_chunk
from pyggtrain.training.config import TrainConfig, size_in_bytes
from pyggtrain.training.memory import (
    ALLOCATOR,
    USABLE,
    MemoryPlan,
    fastest_of,
    free_memory_bytes,
    host_free_bytes,
    micro_batch_sizes,
    relative_time,
    with_a_workspace_that_fits,
)
from pyggtrain.training.objectives import Document
from pyggtrain.training.optimizers import PAGED, device_bytes, host_bytes
from pyggtrain.training.rehearse import ACTIVATIONS, ADAPTER, BASE, GRADIENTS, OPTIMISER, Rehearsal, Trace
from pyggtrain.training.step_graph import POOL_FACTOR

logger = logging.getLogger(__name__)

_HALF = 2
# torch's allocator rounds sizes up and cannot join all that is free; the libraries' own workspaces lie there too.
# Measured on an H200 with expandable segments: 0.05 to 0.3 GiB between allocated and reserved, 1.3 with decoded weights
# of 31 layers kept (docs/performance.md).
_SLACK = 1.01
# Time that not keeping gate and up, decoded weights, and what attention keeps costs, of a step that keeps all. The
# first two estimated from the settings of docs/performance.md, the last from its share of the products; only the order
# counts.
_GATE_UP_TIME, _WEIGHTS_TIME, _ATTENTION_TIME = 0.13, 0.02, 0.06
# That of computing layers again as a whole: the feed-forward half once more, one and a half times gate and up.
# Estimated.
_HALVES_TIME = 0.2
# Time that activations of all layers take to the host and back, though copies run beside the products. Least squares
# over six pairs of runs on an H200 (Llama-3.1-8B, 4 and 1 x 2048 tokens, 6.3 to 36 GiB; activations of 3 to 32 layers
# on the card against none, up to 17 decoded weights given up for them at the price above) say 2.3 %; single runs vary
# by 1 to 1.5 %.
_HOST_TIME = 0.02
# The libraries' workspaces, and tensors that are not named here; fitted to the same eight settings.
_FIXED = 160 << 20
GRAPH = "CUDA graph"
_LEANEST = Kept(attention=False, on_host=True, halves=False)


@dataclass(frozen=True)
class FusedSizes:
    """Sizes of one layer and of the head; all layers are alike.

    Attributes:
        width, ff: D and F.
        qkv: numbers of q, k and v of a token. attention: numbers of attention's output.
        num_heads: query heads.
        paddings: columns behind x for the low-rank products of qkv, output, gate and up, down.
        num_vocab: rows of the head.
        num_layers: L.
        is_fp8: whether big products are of 8-bit floats.
    """

    width: int
    ff: int
    qkv: int
    attention: int
    num_heads: int
    paddings: tuple[int, int, int, int]
    num_vocab: int
    num_layers: int
    is_fp8: bool = False

    @classmethod
    def of(cls, layers: Sequence[FusedLayer], num_vocab: int) -> "FusedSizes":
        """Those of a model's layers, pairs attached."""
        attention, feed_forward = layers[0].attention, layers[0].feed_forward

        def padding(*linears: QuantLinear) -> int:
            return padding_of(sum(linear.lora.rank for linear in linears if linear.lora is not None))

        return cls(
            width=attention.output.shape[0],
            ff=feed_forward.down.shape[1],
            qkv=sum(linear.shape[0] for linear in attention.qkv),
            attention=attention.output.shape[1],
            num_heads=attention.num_heads,
            paddings=(
                padding(*attention.qkv),
                padding(attention.output),
                padding(*feed_forward.gate_up),
                padding(feed_forward.down),
            ),
            num_vocab=num_vocab,
            num_layers=len(layers),
            is_fp8=attention.output.compute == "fp8",
        )

    def weights(self) -> tuple[int, int, int, int]:
        """Bytes of the extended weights of qkv, output, gate and up, down."""
        p = self.paddings
        return (
            (self.qkv + p[0]) * (self.width + p[0]) * _HALF,
            (self.width + p[1]) * (self.attention + p[1]) * _HALF,
            (2 * self.ff + p[2]) * (self.width + p[2]) * _HALF,
            (self.width + p[3]) * (self.ff + p[3]) * _HALF,
        )


@dataclass(frozen=True)
class StepSizes:
    """What a step brings along.

    Attributes:
        num_tokens, num_targets: of the micro-batch.
        resident: bytes that are there all the time: base, adapter, optimiser.
        gradients: bytes of all pairs' gradients.
    """

    num_tokens: int
    num_targets: int
    resident: int
    gradients: int


def _saved(sizes: FusedSizes, one: Kept, num_tokens: int) -> tuple[list[int], list[int]]:
    """Bytes of each tensor that an attention half and a feed-forward half save, beside gate and up and weights; of a
    layer that is computed again as a whole, those of its input.
    """
    x = sizes.width * _HALF
    low_rank = [padding * _HALF for padding in sizes.paddings]
    # q, k and v in one tensor, attention's output, and its sums in float32.
    of_attention = [sizes.qkv * _HALF, sizes.attention * _HALF, sizes.num_heads * 4] if one.attention else []
    attention, feed_forward = [x, *low_rank[:2], *of_attention], [x, *low_rank[2:]]
    if not one.halves:
        attention, feed_forward = [x], []
    return [num_tokens * size for size in attention], [num_tokens * size for size in feed_forward]


def fused_peak(sizes: FusedSizes, kept: Sequence[Kept], step: StepSizes) -> int:
    """Most bytes that a step has at the same time.

    Args:
        sizes: of the model.
        kept: of each layer.
        step: the micro-batch, and what is there beside it.
    """
    t, d, num_targets = step.num_tokens, sizes.width * _HALF, step.num_targets
    w_qkv, w_output, w_gate_up, w_down = sizes.weights()
    p = sizes.paddings
    part = min(t, -(-t // -(-t // MAX_TOKENS)))
    gate_up = (2 * sizes.ff + p[2]) * _HALF

    # By layer, what each half leaves on the GPU until its backward, and what both keep that has not yet gone to the
    # host, or is back already. Where layers on the card follow, these are the last two halves that use the host: none
    # behind them asks for their memory (`HostStash.part`).
    kept_bytes, of_feed_forward, on_the_way, moving = [], [], [], 0
    for one in kept:
        attention, feed_forward = _saved(sizes, one, t)
        if one.on_host:
            # Of whole layers two are under way, each with one tensor.
            moving = sum(filter(goes_to_host, attention + feed_forward)) * (1 if one.halves else 2)
        on_the_way.append(moving)
        staying = [
            sum(size for size in saved if not (one.on_host and goes_to_host(size)))
            for saved in (attention, feed_forward)
        ]
        if one.halves:
            staying[0] += w_qkv + w_output if one.weights else 0
            staying[1] += (w_gate_up + w_down if one.weights else 0) + (t * gate_up if one.gate_up else 0)
        kept_bytes.append(sum(staying))
        of_feed_forward.append(staying[1])
    total = sum(kept_bytes)
    # Backward of attention: dy, d_h, gradients of q, k, v, and in the library that of q once more in float32, and where
    # heads of q share those of k and v, gradients of these for each of q's.
    attending = t * (d + sizes.attention * (_HALF + 4) + sizes.qkv * _HALF)
    if sizes.qkv < 3 * sizes.attention:
        attending += 2 * t * sizes.attention * _HALF
    computed_again = t * (sizes.qkv + sizes.attention) * _HALF + t * sizes.num_heads * 4
    # What halves of a layer that is computed again as a whole keep until their backward, which follows.
    again = [sum(saved) for saved in _saved(sizes, Kept(), t)]
    again[0] -= t * d
    # Loss: rows of the head's input, those with a target and their gradient; logits of a chunk; a decoded part of the
    # head; a chunk's gradient in float32, twice.
    rows = workspace.rows_per_chunk(sizes.num_vocab, sizes.width, torch.bfloat16, "cuda")
    chunk = min(num_targets, gpu_chunk(sizes.num_vocab, num_targets, torch.bfloat16))
    loss = 2 * t * d + 2 * num_targets * d + chunk * (sizes.num_vocab * _HALF + sizes.width * 8)
    loss += rows * sizes.width * _HALF + on_the_way[-1]
    peak = step.resident + total + loss
    done = 0
    for index in reversed(range(sizes.num_layers)):
        one = kept[index]
        share = step.gradients * (sizes.num_layers - index) // sizes.num_layers
        keeps_weights = one.halves and one.weights
        decoded = 0 if keeps_weights else w_gate_up + w_down
        # Backward of the feed-forward half, the largest unless tokens are many: norm(x) and dz beside their low-rank
        # products, the gradients of norm(x) and of the activation; dz and dx whole.
        working = part * ((d + p[2] * _HALF) + (d + p[3] * _HALF) + d + sizes.ff * _HALF) + 2 * t * d
        working += 0 if one.halves and one.gate_up else part * gate_up
        if sizes.is_fp8:
            # Gradients of gate and up, and their weight, rounded to a byte each.
            working += part * gate_up // _HALF + w_gate_up // _HALF
        there = step.resident + total - done + share + on_the_way[index]
        peak = max(peak, there + decoded + working + (0 if one.halves else sum(again)))
        # Then that of attention, whose output's weight is there.
        working = attending + (0 if keeps_weights else w_output)
        if not one.halves:
            working += again[0]
        elif not one.attention:
            working += computed_again
        peak = max(peak, there - of_feed_forward[index] + working)
        done += kept_bytes[index]
    return int(peak * _SLACK) + _FIXED


def fitting(sizes: FusedSizes, limit: int, step: StepSizes, host: int | None = None) -> list[Kept] | None:
    """The fastest choice whose peak stays below a limit, None if even the leanest does not.

    Computing gate and up again costs the most time for its memory, copies to the host and back, beside the products,
    cost less, decoding weights again the least. So memory goes to gate and up of as many layers as it bears, then to
    activations on the card instead of the host, then to weights; last layers first. What the host has no room for is on
    the card in any case. If that is not enough, of as few first layers as can be the inputs of halves are kept alone,
    and at last of as few only the layers' own: half as much of the host.

    Args:
        sizes: of the model.
        limit: bytes.
        step: the micro-batch, and what is there beside it.
        host: bytes that may wait there; None: any number.
    """
    count = sizes.num_layers

    def choice(kind: tuple[int, int], gate_up: int, on_card: int, weights: int) -> list[Kept]:
        attention, halves = kind
        return [
            Kept(
                attention=layer >= count - attention,
                gate_up=layer >= count - gate_up,
                weights=layer >= count - weights,
                on_host=layer < count - on_card,
                halves=layer >= count - halves,
            )
            for layer in range(count)
        ]

    def fits(kind: tuple[int, int], gate_up: int, on_card: int, weights: int = 0) -> bool:
        return fused_peak(sizes, choice(kind, gate_up, on_card, weights), step) <= limit

    numbers = range(count + 1)
    # Of how many layers what attention keeps is there, and of how many the inputs of both halves.
    kinds = [
        *((attention, count) for attention in reversed(numbers)),
        *((0, halves) for halves in reversed(range(count))),
    ]
    for kind in kinds:
        least = next(
            number
            for number in numbers
            if host is None or kept_on_host(sizes, choice(kind, 0, number, 0), step.num_tokens) <= host
        )
        if fits(kind, 0, least):
            of_halves = numbers[: kind[1] + 1]
            gate_up = max(number for number in of_halves if fits(kind, number, least))
            on_card = max(number for number in numbers[least:] if fits(kind, gate_up, number))
            weights = max(number for number in of_halves if fits(kind, gate_up, on_card, number))
            return choice(kind, gate_up, on_card, weights)
    return None


def least_on_host(sizes: FusedSizes, limit: int, step: StepSizes) -> list[Kept] | None:
    """The choice that needs least of the host among those whose peak stays below a limit; as `fitting`."""
    count = sizes.num_layers
    choices = ([replace(_LEANEST, on_host=layer < number) for layer in range(count)] for number in range(count + 1))
    return next((choice for choice in choices if fused_peak(sizes, choice, step) <= limit), None)


def kept_on_host(sizes: FusedSizes, kept: Sequence[Kept], num_tokens: int) -> int:
    """Bytes that activations take of the host's memory between forward and backward."""
    saved = [_saved(sizes, one, num_tokens) for one in kept if one.on_host]
    return sum(pinned_bytes(size) for halves in saved for half in halves for size in half if goes_to_host(size))


@dataclass(frozen=True)
class FusedSetting:
    """A way to run a fused model.

    Attributes:
        plan: what it takes.
        kept: by each layer; None: even the leanest choice does not fit, and `plan` is that one's.
        time: of a token, relative to keeping all without cutting a step up.
    """

    plan: MemoryPlan
    kept: list[Kept] | None
    time: float


def fused_settings(
    sizes: FusedSizes,
    config: TrainConfig,
    longest: Callable[[int], Sequence[Document]],
    *,
    base: int,
    num_parameters: int,
    free: int | None,
    host_free: int | None = None,
) -> list[FusedSetting]:
    """The settings of a fused model that a run may take: one for each size of a micro-batch, the fastest first.

    Args:
        sizes: of the model.
        config: settings; "auto" and unset ones are chosen here.
        longest: number of rows -> documents of the longest micro-batch of so many.
        base: bytes of the loaded base.
        num_parameters: trained numbers.
        free: bytes of the card that are free beside base and adapter; None: not known.
        host_free: free bytes of the host; None: not known.
    """
    limit = None if config.max_memory is None else size_in_bytes(config.max_memory)
    resident = base + 4 * num_parameters
    room = None if free is None else resident + int(USABLE * free)
    bounds = [bound for bound in (limit, room) if bound is not None]
    assert bounds, "nothing says how much memory there is"
    gradients, optimiser = device_bytes(config.optim, num_parameters)
    paged = host_bytes(config.optim, num_parameters)
    host_room = None if host_free is None else max(0, int(USABLE * host_free) - paged)

    def setting(size: int) -> FusedSetting:
        documents = longest(size)
        num_tokens = sum(len(ids) for ids, _ in documents)
        num_targets = sum(label != IGNORED for _, labels in documents for label in labels[1:])
        step = StepSizes(num_tokens, max(1, num_targets), resident + optimiser, gradients)
        if config.gradient_checkpointing == "auto":
            kept = fitting(sizes, min(bounds), step, host_room) or least_on_host(sizes, min(bounds), step)
        else:
            kept = kept_by(config.gradient_checkpointing, sizes.num_layers)
        shown = kept or [_LEANEST] * sizes.num_layers
        parts = {BASE: base, ADAPTER: 4 * num_parameters, OPTIMISER: optimiser, GRADIENTS: gradients}
        parts[ACTIVATIONS] = fused_peak(sizes, shown, step) - sum(parts.values())
        plan = MemoryPlan(
            policy=_described(shown),
            micro_batch_size=size,
            num_tokens=num_tokens,
            device_type="cuda",
            parts=parts,
            limit_bytes=limit,
            free_bytes=free,
            host_bytes=kept_on_host(sizes, shown, num_tokens) + paged,
            host_free_bytes=host_free,
            can_page=config.optim not in PAGED,
        )
        return FusedSetting(plan, kept, _time(shown) * relative_time("none", num_tokens, "cuda"))

    return sorted((setting(size) for size in micro_batch_sizes(config)), key=lambda one: one.time)


def num_vocab_of(base: GGUFFile) -> int:
    """Rows of a file's head."""
    infos = base.tensor_infos
    return infos["output.weight" if "output.weight" in infos else "token_embd.weight"].shape[0]


def plan_fused(
    model: Model,
    config: TrainConfig,
    device: torch.device,
    num_vocab: int,
    longest: Callable[[int], Sequence[Document]],
) -> tuple[MemoryPlan, list[Kept]]:
    """The fastest setting of a loaded, fused model that fits, and what each layer keeps in it. If the host may have too
    little for any, that is said in a warning (see `memory.fastest_of`).

    Args:
        model: on the GPU, its adapter attached.
        config: settings; "auto" and unset ones are chosen here.
        device: of the model.
        num_vocab: rows of the head.
        longest: number of rows -> documents of the longest micro-batch of so many.

    Raises:
        UnsupportedError: none fits; says what to lower.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    settings = with_a_workspace_that_fits(
        lambda: fused_settings(
            FusedSizes.of(model.fused_layers, num_vocab),
            config,
            longest,
            base=torch.cuda.memory_allocated(device) - 4 * num_parameters,
            num_parameters=num_parameters,
            free=free_memory_bytes(device),
            host_free=host_free_bytes(device),
        ),
        lambda settings: fastest_of(one.plan for one in settings) is not None,
    )
    plan = fastest_of(one.plan for one in settings)
    if plan is None:
        leanest = min((one.plan for one in settings), key=lambda plan: plan.total_bytes)
        raise UnsupportedError(f"{leanest.need()}; {leanest.bounds()}. {leanest.advice()}")
    if not plan.fits:
        logger.warning(plan.warning())
    kept = next(one.kept for one in settings if one.plan is plan)
    assert kept is not None, "it fits the card"
    return plan, kept


class RehearsedOnGpu:
    """What a GPU would need (`training.memory.Need`), from the header alone: the rehearsed step, the memory of a CUDA
    graph where the step runs as one, what the allocator rounds up, and the libraries' workspaces.

    Args:
        rehearsal: for a GPU.
        kept: of each layer, to be rehearsed whatever the policy says; None: as that says.
    """

    def __init__(self, rehearsal: Rehearsal, kept: Sequence[Kept] | None = None) -> None:
        self._rehearsal, self._kept = rehearsal, kept
        self._traces: dict[tuple[str, int, int], Trace] = {}

    def parts(self, policy: str, documents: Sequence[Document]) -> dict[str, int]:
        """See `Need`."""
        trace = self._trace(policy, documents)
        parts = trace.peak()
        total = sum(parts.values())
        if trace.captured is not None:
            inside, outside = trace.peak_outside_graph()
            parts[GRAPH] = max(0, outside + int(POOL_FACTOR * inside) - total)
        parts[ALLOCATOR] = int(sum(parts.values()) * (_SLACK - 1)) + _FIXED
        return parts

    def host_bytes(self, policy: str, documents: Sequence[Document]) -> int:
        """See `Need`."""
        return self._trace(policy, documents).sent_bytes

    def _trace(self, policy: str, documents: Sequence[Document]) -> Trace:
        key = policy, len(documents), sum(len(ids) for ids, _ in documents)
        if key not in self._traces:
            self._traces[key] = self._rehearsal.trace(policy, documents, kept=self._kept)
        return self._traces[key]


def _described(kept: Sequence[Kept]) -> str:
    """What layers keep, for a person."""
    if len(set(kept)) == 1 and (one := kept[0]) in _NAMES:
        return _NAMES[one]
    gate_up, weights = sum(one.gate_up for one in kept), sum(one.weights for one in kept)
    on_host, whole = sum(one.on_host for one in kept), sum(not one.halves for one in kept)
    where = "on the host" if on_host else "on the card"
    if 0 < on_host < len(kept):
        where = f"of the first {on_host} layers on the host, of the rest on the card"
    attention = sum(one.attention for one in kept)
    what = "activations" if attention == len(kept) else "inputs"
    if 0 < attention < len(kept):
        what = f"inputs and of {attention} of {len(kept)} layers activations,"
    if whole == len(kept):
        return f"inputs of layers {where}, all else computed again"
    again = f", {whole} of {len(kept)} layers computed again as a whole" if whole else ""
    return f"{what} {where}{again}, gate and up of {gate_up} of {len(kept)} layers kept, weights of {weights}"


_NAMES = {kept_by(policy, 1)[0]: policy for policy in GPU_POLICIES}


def _time(kept: Sequence[Kept]) -> float:
    """Time of a step by what is kept and where, relative to keeping all on the card."""
    missing = sum(
        _GATE_UP_TIME * (not one.gate_up)
        + _WEIGHTS_TIME * (not one.weights)
        + _ATTENTION_TIME * (not one.attention)
        + _HALVES_TIME * (not one.halves)
        + _HOST_TIME * one.on_host
        for one in kept
    )
    return 1 + missing / len(kept)
