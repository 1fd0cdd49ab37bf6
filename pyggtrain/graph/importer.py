"""From a graph to steps: each node gets its kernel, and weights become modules.

Three operations meet weights in blocks and never see them as numbers: products (`nn.QuantLinear`, or
`ops.quant_linear` where an adapter would have no effect), products with chosen experts, and rows of an embedding.
Everything else takes its lowering.
"""

import torch
from torch.nn import functional

from pyggtrain import ops
from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.experts import experts_product
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.inputs import Leaf, input_of
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering import Kernel, lower
from pyggtrain.graph.program import Step, product_kernel
from pyggtrain.graph.rewrite import Reach
from pyggtrain.graph.weights import FrozenTensor, Weights, as_matrix
from pyggtrain.nn import QuantLinear

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
    steps = [
        _step(graph, index, node, reach, weights, compute) for index, node in enumerate(graph.nodes) if not node.is_leaf
    ]
    read = {source for step in steps for source in step.sources if source is not None}
    leaves = {index: _leaf(graph, graph.nodes[index], weights) for index in sorted(read) if graph.nodes[index].is_leaf}
    return steps, leaves


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


def _step(graph: Graph, index: int, node: Node, reach: Reach, weights: Weights, compute: str) -> Step:
    operands = [None if source is None else graph.nodes[source] for source in node.sources]
    first = operands[0] if operands else None
    names = tuple(operand.name for operand in operands if operand is not None and operand.role == "weight")
    if first is not None and first.role == "weight":
        if node.op == "MUL_MAT" and first.shape[:2] == (1, 1):
            bias = operands[2].name if len(operands) > 2 and operands[2] is not None else None
            if first.name in reach.trainable:
                linear = weights.take_linear(first.name, bias)
                return Step(index, node.sources[1:2], product_kernel(linear), names, node.name, linear=linear)
            frozen = weights.take_frozen(first.name)
            bias_N = None if bias is None else weights.take_frozen(bias)
            return Step(index, node.sources[1:2], _frozen_product(frozen, bias_N, compute), names, node.name)
        if node.op == "MUL_MAT_SCALED" and first.name in reach.trainable:
            linear = weights.take_linear(first.name, None)
            return Step(index, node.sources[1:], _scaled_product(linear), names, node.name)
        if node.op == "MUL_MAT_ID":
            return Step(index, node.sources[1:3], _experts(weights.take_frozen(first.name), compute), names, node.name)
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


def _frozen_product(weight: FrozenTensor, bias: FrozenTensor | None, compute: str) -> Kernel:
    def kernel(frame: Frame, x: torch.Tensor) -> torch.Tensor:
        bias_N = None if bias is None else bias.values().flatten()
        y_TN = ops.quant_linear(x.flatten(0, 2), as_matrix(weight.quant), bias_N=bias_N, compute=compute)
        return y_TN.reshape(*x.shape[:3], -1)

    return kernel


def _scaled_product(linear: QuantLinear) -> Kernel:
    """s x Wᵀ + scale (x Aᵀ) Bᵀ: the file's own scale s does not touch the pair."""

    def kernel(frame: Frame, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x_TK = x.flatten(0, 2)
        y_TN = ops.quant_linear(x_TK, linear.quant, compute=linear.compute) * scale.flatten()
        if linear.lora is not None:
            mask_TK, factor = linear.lora.draw_dropout(x_TK)
            hidden_TR = functional.linear(x_TK if mask_TK is None else x_TK * mask_TK, linear.lora.lora_a)
            y_TN = y_TN + factor * functional.linear(hidden_TR, linear.lora.lora_b)
        return y_TN.reshape(*x.shape[:3], -1)

    return kernel


def _experts(weight: FrozenTensor, compute: str) -> Kernel:
    def kernel(frame: Frame, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return experts_product(x.squeeze(0), ids[0, 0].long(), weight.quant, compute=compute).unsqueeze(0)

    return kernel


def _embedding(weight: FrozenTensor) -> Kernel:
    is_of_tokens = weight.gguf_name == "token_embd.weight"

    def kernel(frame: Frame, ids: torch.Tensor) -> torch.Tensor:
        rows = ops.embedding(ids.flatten().long(), as_matrix(weight.quant))
        if is_of_tokens and frame.with_noise is not None:
            rows = frame.with_noise(rows, frame.batch)
        return rows.reshape(*ids.shape[1:], -1)

    return kernel
