"""A graph as steps that run one after another, cut into layers.

A layer is a run of steps between two places where few values are alive, one for each block of the model (weights
"blk.N."): the unit of checkpointing. Names decide which block a step belongs to, and the number of live values where
exactly to cut.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from pyggtrain.graph.frame import Frame, in_full
from pyggtrain.graph.half import Half
from pyggtrain.graph.inputs import Leaf
from pyggtrain.graph.lowering import Kernel
from pyggtrain.graph.mixtures import Mixture
from pyggtrain.nn import HostStash, QuantLinear, run_layer, run_whole
from pyggtrain.ops.exact_linear import exact_linear
from pyggtrain.ops.fused import Kept

_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        result: the node that it computes.
        sources: the nodes that it reads, None where the operation takes none.
        kernel: (frame, *values of the sources) -> value.
        weights: names of the weights that it computes with.
        name: llama.cpp's name of the node.
        linear: the trainable product with a matrix that it is, or None.
        is_sum: it adds two values of one shape.
    """

    result: int
    sources: tuple[int | None, ...]
    kernel: Kernel
    weights: tuple[str, ...]
    name: str
    linear: QuantLinear | None = None
    is_sum: bool = False


class Part:
    """Steps from some values to some others, all in four dimensions.

    Args:
        steps: in the order of computing.
        leaves: values that are no step's result: weights read as numbers, inputs, empty states.
        inputs: nodes that come from outside, in the order of the call's arguments.
        outputs: nodes that are given back.
        half: what the steps are together, if they can also run fused.
        in_full: outputs that are not rounded: a router's weights.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        leaves: Mapping[int, Leaf],
        inputs: Sequence[int],
        outputs: Sequence[int],
        half: Half | Mixture | None = None,
        in_full: frozenset[int | None] = frozenset(),
    ) -> None:
        self.steps = tuple(steps)
        self.leaves = leaves
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.half = half
        self._in_full = in_full
        last_use = {
            source: index for index, step in enumerate(self.steps) for source in step.sources if source is not None
        }
        self._dies_after = [
            tuple(
                source
                for source in set(step.sources)
                if source is not None and last_use[source] == index and source not in outputs
            )
            for index, step in enumerate(self.steps)
        ]

    def __call__(self, *values: torch.Tensor, frame: Frame) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The output's value, or all of them where there are several, rounded to the run's dtype."""
        known = dict(zip(self.inputs, values, strict=True))
        for step, dead in zip(self.steps, self._dies_after, strict=True):
            self._compute(step, frame, known)
            for source in dead:
                known.pop(source, None)
        results = tuple(
            known[output] if output in self._in_full else frame.rounded(known[output]) for output in self.outputs
        )
        return results[0] if len(results) == 1 else results

    def fused(self, *values: torch.Tensor, frame: Frame, kept: Kept, stash: HostStash | None) -> torch.Tensor:
        """The same as one operation; only where there is a half."""
        assert self.half is not None
        known = dict(zip(self.inputs, values, strict=True))
        return self.half(frame, [self._value(source, known, frame) for source in self.half.sources], kept, stash)

    def run(self, frame: Frame, known: dict[int, torch.Tensor]) -> Iterator[tuple[Step, torch.Tensor]]:
        """Each step with its value; `known` holds the inputs and keeps every value."""
        for step in self.steps:
            self._compute(step, frame, known)
            yield step, known[step.result]

    def _compute(self, step: Step, frame: Frame, known: dict[int, torch.Tensor]) -> None:
        known[step.result] = step.kernel(frame, *(self._value(source, known, frame) for source in step.sources))

    def _value(self, source: int | None, known: dict[int, torch.Tensor], frame: Frame) -> torch.Tensor | None:
        if source is None:
            return None
        if source not in known:
            known[source] = self.leaves[source](frame)
        return known[source]


class Region(nn.Module):
    """Parts that run one after another: a layer, or what lies before or behind the layers. Holds no parameter of its
    own: modules stand in the tree of the file's names.

    Args:
        parts: in the order of computing.
        inputs: nodes that come from outside, in the order of `forward`'s arguments.
        outputs: nodes that are given back.
    """

    def __init__(self, parts: Sequence[Part], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._dead = dead_after(self.parts, self.outputs)

    @property
    def steps(self) -> list[Step]:
        return [step for part in self.parts for step in part.steps]

    @property
    def halves(self) -> list[Half | Mixture | None]:
        """What each part is."""
        return [part.half for part in self.parts]

    def forward(
        self,
        *values: torch.Tensor,
        frame: Frame,
        policy: str = "none",
        is_random: bool = False,
        kept: Kept | None = None,
        stash: HostStash | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The output's value, or all of them where there are several. Outside of regions [1, 1, T, D] is [T, D].

        Args:
            values: of the inputs.
            frame: the run.
            policy, is_random: what parts that do not run fused keep, see `nn.run_layer`.
            kept, stash: what halves that run fused keep, and where all parts keep what they do; None: nothing runs
                fused, and what is kept stays. Without `kept.halves` a layer of which any part does not run fused keeps
                the inputs of its halves.
        """
        if kept is not None and not kept.halves:
            if all(self._can_fuse(part, frame) for part in self.parts):
                return run_whole(partial(self, frame=frame), *values, stash=stash)  # type: ignore[no-any-return]
            kept = Kept(attention=False, on_host=kept.on_host)
        known = dict(zip(self.inputs, (x if x.dim() == 4 else x[None, None] for x in values), strict=True))
        has_halves = any(part.half is not None for part in self.parts)
        for part, dead in zip(self.parts, self._dead, strict=True):
            inputs = [known[index] for index in part.inputs]
            if kept is not None and part.half is not None and self._can_fuse(part, frame):
                known[part.half.result] = part.fused(*inputs, frame=frame, kept=kept, stash=stash)
            else:
                # What single operations start from waits where halves keep theirs.
                is_half = part.half is not None or not has_halves
                with stash.part(is_half=is_half) if stash is not None else nullcontext():
                    made = run_layer(partial(part, frame=frame), *inputs, policy=policy, is_random=is_random)
                known |= zip(part.outputs, (made,) if len(part.outputs) == 1 else made, strict=True)
            for index in dead:
                del known[index]
        outputs = (known[output] for output in self.outputs)
        results = tuple(x.flatten(0, 2) if x.shape[:2] == (1, 1) else x for x in outputs)
        return results[0] if len(results) == 1 else results

    @staticmethod
    def _can_fuse(part: Part, frame: Frame) -> bool:
        return part.half is not None and part.half.modules.can_fuse(frame.dtype, frame.rows.device)

    def run(self, frame: Frame, known: dict[int, torch.Tensor]) -> Iterator[tuple[Step, torch.Tensor]]:
        """Each step with its value, none fused; `known` holds the inputs and keeps every value."""
        for part in self.parts:
            yield from part.run(frame, known)

    def extra_repr(self) -> str:
        return f"{len(self.steps)} steps, {self.steps[0].name} to {self.steps[-1].name}"


@dataclass
class Cuts:
    """Where a program falls apart.

    Attributes:
        starts: the first step of each region.
        is_layer: whether the region is a block's.
    """

    starts: list[int] = field(default_factory=list)
    is_layer: list[bool] = field(default_factory=list)

    def add(self, start: int, is_layer: bool) -> None:
        if self.starts and self.starts[-1] == start:
            self.is_layer[-1] = is_layer
            return
        self.starts.append(start)
        self.is_layer.append(is_layer)


def _runs(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """(first step, last step) of each stretch in which all weights with a block number have the same one."""
    runs: list[tuple[int, int]] = []
    current = None
    for index, step in enumerate(steps):
        for block in dict.fromkeys(match.group(1) for name in step.weights if (match := _BLOCK.match(name))):
            if block == current:
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
                current = block
    return runs


def cut_into_layers(steps: Sequence[Step]) -> Cuts:
    """Cut where the fewest values are alive between the weights of one block and those of the next."""
    # Values alive before step p: made by an earlier one, read by p or a later one.
    num_alive = [0] * (len(steps) + 1)
    made = {step.result: index for index, step in enumerate(steps)}
    last_use = {source: index for index, step in enumerate(steps) for source in step.sources if source in made}
    for result, index in made.items():
        for place in range(index + 1, last_use.get(result, len(steps)) + 1):
            num_alive[place] += 1

    def best(after: int, until: int) -> int:
        return min(range(after + 1, until + 1), key=lambda place: num_alive[place])

    cuts = Cuts()
    runs = _runs(steps)
    cuts.add(0, is_layer=not runs or runs[0][0] == 0)
    if not runs:
        return cuts
    if runs[0][0] > 0:
        cuts.add(best(0, runs[0][0]), is_layer=True)
    for (_, last), (first, _) in pairwise(runs):
        # A step may read weights of two blocks: there is no place between them.
        if last < first:
            cuts.add(best(last, first), is_layer=True)
    end = best(runs[-1][1], len(steps))
    if end < len(steps):
        cuts.add(end, is_layer=False)
    return cuts


def regions(
    steps: Sequence[Step], leaves: Mapping[int, Leaf], output: int, halves: Sequence[Half | Mixture] = ()
) -> tuple[list[Region], list[bool]]:
    """The program in regions, and which of them are layers.

    Args:
        steps: of the whole program.
        leaves: values that are no step's result.
        output: the node that the program is for.
        halves: of layers, each of which becomes a part of its own.
    """
    cuts = cut_into_layers(steps)
    bounds = [*cuts.starts, len(steps)]
    spans = {span: half for half in halves if (span := _span(steps, half, cuts.starts)) is not None}
    in_full = frozenset(half.probs for half in halves if isinstance(half, Mixture))
    found = []
    for start, end in pairwise(bounds):
        borders = sorted({start, end, *(border for span in spans for border in span if start < border < end)})
        parts = [_part(steps, leaves, output, span, spans.get(span), in_full) for span in pairwise(borders)]
        inputs, outputs = _ends(steps, leaves, output, (start, end))
        found.append(Region(parts, inputs, outputs))
    return found, cuts.is_layer


def _span(steps: Sequence[Step], half: Half | Mixture, starts: Sequence[int]) -> tuple[int, int] | None:
    """Where the steps of a half stand, if they stand together in one region."""
    places = [place for place, step in enumerate(steps) if step.result in half.nodes]
    start, end = places[0], places[-1] + 1
    is_whole = end - start == len(half.nodes) and not any(start < cut < end for cut in starts)
    return (start, end) if is_whole else None


def _ends(
    steps: Sequence[Step], leaves: Mapping[int, Leaf], output: int, span: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """What the steps of a span read from before it, and what of theirs is read behind it."""
    start, end = span
    inside = steps[start:end]
    made = {step.result for step in inside}
    read_later = {source for step in steps[end:] for source in step.sources} | {output}
    inputs = _unique(
        source
        for step in inside
        for source in step.sources
        if source is not None and source not in made and source not in leaves
    )
    return inputs, [step.result for step in inside if step.result in read_later]


def _part(
    steps: Sequence[Step],
    leaves: Mapping[int, Leaf],
    output: int,
    span: tuple[int, int],
    half: Half | Mixture | None,
    in_full: frozenset[int | None],
) -> Part:
    inputs, outputs = _ends(steps, leaves, output, span)
    return Part(_ending_in_product(steps[slice(*span)], outputs), leaves, inputs, outputs, half, in_full)


def dead_after(parts: Sequence[Part | Region], outputs: Sequence[int]) -> list[list[int]]:
    """For each part, the values made so far that none after it reads and that are no output."""
    known: set[int] = set()
    dead = []
    for position, part in enumerate(parts):
        known |= {*part.inputs, *part.outputs} if position == 0 else set(part.outputs)
        needed = {index for later in parts[position + 1 :] for index in later.inputs} | set(outputs)
        dead.append(sorted(known - needed))
        known &= needed
    return dead


def _unique(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))


def _ending_in_product(steps: Sequence[Step], outputs: Sequence[int]) -> Sequence[Step]:
    """The steps of a region, whose last sum, if it adds the residual to a product, becomes part of the product.

    A checkpointed region then keeps this product's result, which is its output anyway, instead of computing it twice
    (`nn.checkpointing`).
    """
    last = steps[-1]
    if list(outputs) != [last.result] or not last.is_sum:
        return steps
    for position, step in enumerate(steps):
        num_uses = sum(other.sources.count(step.result) for other in steps)
        if step.linear is not None and step.result in last.sources and num_uses == 1:
            (residual,) = (source for source in last.sources if source != step.result)
            joined = replace(
                last, sources=(*step.sources, residual), kernel=product_kernel(step.linear), weights=step.weights
            )
            return [*steps[:position], *steps[position + 1 : -1], joined]
    return steps


def product_kernel(linear: QuantLinear, *, is_exact: bool = False) -> Kernel:
    """x Wᵀ (+ residual) over the last dimension of four.

    Args:
        linear: the product.
        is_exact: in float32 whatever the run's dtype.
    """

    def kernel(frame: Frame, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if is_exact and residual is None and _takes_matrix_units(linear, x):
            y_TN = exact_linear(x.flatten(0, 2), linear.weight.view(torch.float32))
            return y_TN.reshape(*x.shape[:3], -1)
        x = in_full(x) if is_exact else frame.rounded(x)
        residual_TN = None if residual is None else residual.to(x.dtype).flatten(0, 2)
        y_TN = linear(x.flatten(0, 2), residual_TN=residual_TN)
        return y_TN.reshape(*x.shape[:3], -1)  # type: ignore[no-any-return]

    return kernel


def _takes_matrix_units(linear: QuantLinear, x: torch.Tensor) -> bool:
    """Whether a product in float32 can be one of bfloat16 parts."""
    is_plain = linear.quant_type == "F32" and linear.lora is None and linear.bias is None
    return is_plain and x.is_cuda and x.dtype == torch.bfloat16
