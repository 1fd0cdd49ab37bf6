"""From a graph to steps: each node gets its kernel, and weights become modules.

Three operations meet weights in blocks and never see them as numbers: products (`nn.QuantLinear`, or
`ops.quant_linear` where an adapter would have no effect), products with chosen experts, and rows of an embedding.
Everything else takes its lowering.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from pyggtrain import ops
from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame, in_full
from pyggtrain.graph.half import Half
from pyggtrain.graph.inputs import MASKS, Leaf, input_of
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering import Kernel, lower
from pyggtrain.graph.lowering.scan import RECURRENT
from pyggtrain.graph.mixtures import Mixture
from pyggtrain.graph.program import Part, Region, Step, dead_after, product_kernel, regions
from pyggtrain.graph.rewrite import Reach, choosing_products
from pyggtrain.graph.weights import FrozenTensor, Weights, as_matrix
from pyggtrain.nn import DeltaHalf, ExpertLinear, QuantLinear

_STATE_TYPES = {
    "f32": torch.float32,
    "f16": torch.float32,
    "bf16": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
}


def import_steps(graph: Graph, reach: Reach, weights: Weights, *, compute: str) -> tuple[list[Step], dict[int, Leaf]]:
    """The steps of a graph in its order, and how the values that they read besides each other are found.

    Raises:
        UnsupportedError: an operation or an input is not implemented.
    """
    choosing = choosing_products(graph)
    steps = [
        _step(graph, index, node, reach, weights, compute, choosing)
        for index, node in enumerate(graph.nodes)
        if not node.is_leaf
    ]
    read = {source for step in steps for source in step.sources if source is not None}
    leaves = {index: _leaf(graph, graph.nodes[index], weights) for index in sorted(read) if graph.nodes[index].is_leaf}
    return steps, leaves


@dataclass(frozen=True, eq=False)
class Program:
    """A graph that runs.

    Attributes:
        regions: all before the output head, in order.
        is_layer: of each, whether it is a block of the model.
        dead: after each, the values that none later reads.
        tail: the output head's product and what follows it.
        head: names of the head's weights.
        num_logits: of a token.
        selects_rows: it asks which rows are wanted; a few give all of them.
        is_recurrent: it carries a state from token to token.
        has_delta_halves: layers hold gated delta nets that run fused.
        is_capturable: what it launches on a GPU depends on shapes and on room for chunks alone, and nothing comes from
            the host meanwhile.
    """

    regions: list[Region]
    is_layer: list[bool]
    dead: list[list[int]]
    tail: Region
    head: tuple[str, ...]
    num_logits: int
    selects_rows: bool
    is_recurrent: bool
    has_delta_halves: bool
    is_capturable: bool

    @property
    def layers(self) -> list[Region]:
        return [region for region, is_layer in zip(self.regions, self.is_layer, strict=True) if is_layer]

    @property
    def has_plain_head(self) -> bool:
        """Nothing follows the head's product, not even a bias."""
        return len(self.tail.steps) == len(self.head) == 1


def make_program(
    graph: Graph, steps: list[Step], leaves: dict[int, Leaf], halves: Sequence[Half | Mixture] = ()
) -> Program:
    """Cut the steps of a graph into layers and head; halves of layers are to run fused.

    Raises:
        UnsupportedError: see `split_at_head`.
    """
    body, tail, hidden = split_at_head(graph, steps, leaves)
    parts, is_layer = regions(body, leaves, hidden, halves)
    num_logits = graph.nodes[graph.logits].shape[-1]
    assert isinstance(num_logits, int), "the size of the vocabulary depends on the number of tokens"
    # "<op>.<kind>" is one of `op`.
    scans = {index for index, node in enumerate(graph.nodes) if node.op.partition(".")[0] in RECURRENT}
    in_delta_halves = {
        index
        for region, is_fused in zip(parts, is_layer, strict=True)
        for half in region.halves
        if is_fused and half is not None and isinstance(half.modules, DeltaHalf)
        for index in half.nodes
    }
    return Program(
        regions=parts,
        is_layer=is_layer,
        dead=dead_after(parts, [hidden]),
        tail=Region([Part(tail, leaves, [hidden], [graph.logits])], [hidden], [graph.logits]),
        head=tail[0].weights,
        num_logits=num_logits,
        selects_rows=any(node.role == "input" and node.name == "out_ids" for node in graph.nodes),
        # A cache holds each token in a cell of its own, and masks keep documents apart in it as they do without one.
        is_recurrent=any(node.op in RECURRENT or node.name == "s_copy" for node in graph.nodes),
        has_delta_halves=bool(in_delta_halves),
        # What other recurrences launch depends on the bounds of documents.
        is_capturable=not graph.uses_alibi
        and scans <= in_delta_halves
        and not any(node.name in MASKS or node.value for node in graph.nodes),
    )


def split_at_head(graph: Graph, steps: list[Step], leaves: dict[int, Leaf]) -> tuple[list[Step], list[Step], int]:
    """(steps before the output head, the head's product and what follows it, node of the head's input).

    Raises:
        UnsupportedError: the logits are no product with a weight, or what follows the product reads other activations.
    """
    num_logits = graph.nodes[graph.logits].shape[-1]
    heads = [
        step
        for step in steps
        if graph.nodes[step.result].op == "MUL_MAT"
        and step.weights
        and graph.nodes[step.result].shape[-1] == num_logits
    ]
    if not heads or heads[-1].sources[0] is None:
        raise UnsupportedError(
            "The logits of this model are no product with a weight of the file, which is not implemented."
        )
    head, hidden = heads[-1], heads[-1].sources[0]
    after = {head.result}
    body, tail = [], [head]
    for step in steps:
        if step is head:
            continue
        if after.isdisjoint(step.sources):
            body.append(step)
        else:
            after.add(step.result)
            tail.append(step)
            others = {source for source in step.sources if source is not None} - after - leaves.keys()
            if others:
                name = graph.nodes[min(others)].name
                raise UnsupportedError(f"The logits of this model also depend on '{name}', which is not implemented.")
    return body, tail, hidden


def _step(
    graph: Graph, index: int, node: Node, reach: Reach, weights: Weights, compute: str, choosing: frozenset[int]
) -> Step:
    operands = [None if source is None else graph.nodes[source] for source in node.sources]
    first = operands[0] if operands else None
    names = tuple(operand.name for operand in operands if operand is not None and operand.role == "weight")
    if first is not None and first.role == "weight":
        if node.op == "MUL_MAT" and first.shape[:2] == (1, 1):
            bias = operands[2].name if len(operands) > 2 and operands[2] is not None else None
            is_exact = index in choosing
            if first.name in reach.trainable:
                linear = weights.take_linear(first.name, bias, compute="exact" if is_exact else compute)
                kernel = product_kernel(linear, is_exact=is_exact)
                return Step(index, node.sources[1:2], kernel, names, node.name, linear=linear)
            frozen = weights.take_frozen(first.name)
            bias_N = None if bias is None else weights.take_frozen(bias)
            kernel = _frozen_product(frozen, bias_N, "exact" if is_exact else compute, is_exact=is_exact)
            return Step(index, node.sources[1:2], kernel, names, node.name)
        if node.op == "MUL_MAT_SCALED" and first.name in reach.trainable:
            linear = weights.take_linear(first.name, None, compute=compute)
            return Step(index, node.sources[1:], _scaled_product(linear), names, node.name)
        if node.op in ("MUL_MAT_ID", "MUL_MAT_ID_SCALED"):
            is_trainable = first.name in reach.trainable
            experts = weights.take_experts(first.name) if is_trainable else weights.take_frozen(first.name)
            return Step(index, node.sources[1:], _experts(experts, compute), names, node.name)
        if node.op == "GET_ROWS" and first.shape[:2] == (1, 1) and not first.type.startswith("i"):
            # IQ types also begin with an i.
            return Step(index, node.sources[1:2], _embedding(weights.take_frozen(first.name)), names, node.name)
    is_sum = node.op == "ADD" and all(operand is not None and operand.shape == node.shape for operand in operands)
    return Step(index, node.sources, lower(graph, node), names, node.name, is_sum=is_sum)


def _leaf(graph: Graph, node: Node, weights: Weights) -> Leaf:
    if node.role == "weight":
        frozen = weights.take_frozen(node.name)
        return lambda frame: frozen.values()
    if node.role == "state":
        dtype = _STATE_TYPES[node.type]
        return lambda frame: torch.zeros(frame.shape(node.shape), dtype=dtype, device=frame.rows.device)
    return input_of(graph, node)


def _frozen_product(weight: FrozenTensor, bias: FrozenTensor | None, compute: str, *, is_exact: bool) -> Kernel:
    def kernel(frame: Frame, x: torch.Tensor) -> torch.Tensor:
        x = in_full(x) if is_exact else frame.rounded(x)
        bias_N = None if bias is None else bias.values().flatten()
        y_TN = ops.quant_linear(x.flatten(0, 2), as_matrix(weight.quant), bias_N=bias_N, compute=compute)
        return y_TN.reshape(*x.shape[:3], -1)

    return kernel


def _scaled_product(linear: QuantLinear) -> Kernel:
    """s x Wᵀ + scale (x Aᵀ) Bᵀ: the file's own scale s does not touch the pair."""

    def kernel(frame: Frame, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x_TK = frame.rounded(x).flatten(0, 2)
        y_TN = ops.quant_linear(x_TK, linear.quant, compute=linear.compute) * scale.flatten().to(x_TK.dtype)
        if linear.lora is not None:
            mask_TK, factor = linear.lora.draw_dropout(x_TK)
            lora_a, lora_b = linear.lora.lora_a.to(x_TK.dtype), linear.lora.lora_b.to(x_TK.dtype)
            hidden_TR = functional.linear(x_TK if mask_TK is None else x_TK * mask_TK, lora_a)
            y_TN = y_TN + factor * functional.linear(hidden_TR, lora_b)
        return y_TN.reshape(*x.shape[:3], -1)

    return kernel


def _experts(weight: ExpertLinear | FrozenTensor, compute: str) -> Kernel:
    """x [1, T, J or 1, K] through the experts ids [1, 1, T, J], whose own factors may be given: [1, T, J, N]."""

    def kernel(frame: Frame, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        x = frame.rounded(x)
        base_scale_E = None if factors is None else factors.flatten().to(x.dtype)
        if isinstance(weight, ExpertLinear):
            y_TJN = weight(x.squeeze(0), ids[0, 0], base_scale_E)
        else:
            y_TJN = ops.expert_linear(x.squeeze(0), ids[0, 0], weight.quant, base_scale_E=base_scale_E, compute=compute)
        return y_TJN.unsqueeze(0)  # type: ignore[no-any-return]

    return kernel


def _embedding(weight: FrozenTensor) -> Kernel:
    is_of_tokens = weight.gguf_name == "token_embd.weight"

    def kernel(frame: Frame, ids: torch.Tensor) -> torch.Tensor:
        rows = ops.embedding(ids.flatten().long(), as_matrix(weight.quant), dtype=frame.dtype)
        if is_of_tokens and frame.with_noise is not None:
            rows = frame.with_noise(rows, frame.batch)
        return rows.reshape(*ids.shape[1:], -1)

    return kernel
