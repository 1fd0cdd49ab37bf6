"""Halves of decoder layers, found in a graph by their structure: what `ops.fused` computes in one operation each.

    attention      x + W_o attention(rope(q), rope(k), v),  q, k, v = W_qkv norm(x), heads of q and k normed or not
    feed-forward   x + W_down (silu(W_gate z) ∘ W_up z),    z = norm(x)

No architecture is asked for: a half is found from its attention or its SwiGLU outwards, and taken only if each
operation between the input and the sum with the residual is one of these, and nobody else reads what lies between. In
the last layer llama.cpp takes the wanted rows before it adds the residual; here they are taken from the sum.

What is found runs fused where the device can (`program.Region`). The steps that it stands for stay, for all else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.attention import mask_of
from pyggtrain.graph.lowering.rope import Tables, tables_of
from pyggtrain.graph.search import NoMatchError, Search, matches, require
from pyggtrain.graph.weights import FrozenTensor, Weights
from pyggtrain.nn import AttentionHalf, FeedForwardHalf, FusedLayer, HostStash, QuantLinear
from pyggtrain.ops.attention import MAX_HEAD
from pyggtrain.ops.fused import Kept

_HEADS_FIRST = (0, 2, 1, 3)


@dataclass(frozen=True, eq=False)
class NormWeight:
    """Weight and eps of a norm.

    Attributes:
        weight: float32 [D].
        eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Half:
    """A half of a layer.

    Attributes:
        nodes: all that it stands for; `result` is the last of them.
        sources: the nodes that it reads: x, and for a rotation the leaves that its tables are made from.
        modules: its weights.
        selects_rows: only the wanted tokens' rows come out.
        tables: of the rotation, None for none.
    """

    nodes: frozenset[int]
    sources: tuple[int | None, ...]
    result: int
    modules: AttentionHalf | FeedForwardHalf
    selects_rows: bool = False
    tables: Tables | None = None

    def __call__(
        self, frame: Frame, values: Sequence[torch.Tensor | None], kept: Kept, stash: HostStash | None
    ) -> torch.Tensor:
        """The result [1, 1, T, D], fused.

        Args:
            values: of `self.sources`; x is [1, 1, T, D].
            kept, stash: see `nn.AttentionHalf`.
        """
        x, positions, factors = (*values, None, None)[:3]
        assert x is not None
        x_TD = frame.rounded(x).flatten(0, 2).contiguous()
        if isinstance(self.modules, FeedForwardHalf):
            y_TD = self.modules(x_TD, kept, stash)
        else:
            tables = None
            if self.tables is not None:
                assert positions is not None, "a rotation without positions"
                tables = self.tables(frame, positions, factors, x_TD.shape[0])
            y_TD = self.modules(x_TD, tables, frame.batch.documents, kept, stash)
        if self.selects_rows and not frame.takes_all:
            y_TD = y_TD.index_select(0, frame.rows)
        return y_TD[None, None]


def fused_layer(halves: Sequence[object]) -> FusedLayer | None:
    """A layer that consists of an attention half and a feed-forward half; None: it does not."""
    modules = [half.modules if isinstance(half, Half) else None for half in halves]
    match modules:
        case [AttentionHalf() as attention, FeedForwardHalf() as feed_forward]:
            return FusedLayer(attention, feed_forward)
    return None


def find_halves(graph: Graph, weights: Weights) -> list[Half]:
    """All halves of a graph, in its order.

    Args:
        graph: after all passes of `rewrite`.
        weights: with the modules of its steps.
    """
    search = _Search(graph, weights)
    ops = [node.op for node in graph.nodes]
    begins = [index for index, op in enumerate(ops) if op.startswith("FLASH_ATTN_EXT.") or op == "GLU.SWIGLU"]
    return matches(
        begins, lambda index: search.feed_forward(index) if ops[index] == "GLU.SWIGLU" else search.attention(index)
    )


@dataclass(frozen=True)
class _Heads:
    """Heads of q, k or v as a product gives them.

    Attributes:
        product: the node.
        first: number of the product's row with which they begin.
        count, width: heads and numbers of each.
        rope, norm: nodes that they pass, None for none.
        scale: that they are multiplied by at last.
    """

    product: int
    first: int
    count: int
    width: int
    rope: int | None
    norm: int | None
    scale: float


class _Search(Search):
    def attention(self, index: int) -> Half:
        """The half around the attention `index`."""
        graph, node = self.graph, self.graph.nodes[index]
        nodes = {index}
        require(len(node.sources) >= 3 and node.number(1) == 0)
        q, k, v = (self._heads(source, nodes) for source in node.sources[:3])
        require(v.rope is None and v.norm is None and v.scale == 1 and k.count == v.count)
        require(q.width == k.width == v.width <= MAX_HEAD and q.count % k.count == 0)
        normed = {self._product(product, nodes) for product in (q.product, k.product, v.product)}
        require(len(normed) == 1)
        norm, x = self._norm(normed.pop(), nodes)
        qkv = self._qkv(q, k, v)

        reshaped = self.only_user(index)
        require(graph.nodes[reshaped].op == "RESHAPE")
        product = self.only_user(reshaped)
        require(graph.nodes[product].sources[1] == reshaped)
        self._product(product, nodes)
        nodes |= {reshaped, product}
        output = self._linear(product)
        result, selects_rows = self._residual_sum(product, x, nodes)

        sinks = node.sources[4] if len(node.sources) > 4 else None
        mask = mask_of(graph, node.op.removeprefix("FLASH_ATTN_EXT."))
        modules = AttentionHalf(
            norm,
            qkv,
            output,
            q.count,
            k.count,
            q.width,
            node.number(0) * q.scale * k.scale,
            head_norms=self._head_norms(q, k),
            variant=mask.variant(node.number(2), None if sinks is None else self._numbers(sinks)),
        )
        tables, angles = self._rotation(q, k)
        return self._closed(Half(frozenset(nodes), (x, *angles), result, modules, selects_rows, tables))

    def feed_forward(self, index: int) -> Half:
        """The half around the SwiGLU `index`."""
        node = self.graph.nodes[index]
        nodes = {index}
        products = [source for source in node.sources if source is not None]
        require(not node.integer(1))
        normed = {self._product(product, nodes) for product in products}
        require(len(normed) == 1)
        norm, x = self._norm(normed.pop(), nodes)
        product = self.only_user(index)
        require(self.graph.nodes[product].sources[1:] == (index,))
        self._product(product, nodes)
        result, selects_rows = self._residual_sum(product, x, nodes)
        modules = FeedForwardHalf(norm, tuple(self._linear(one) for one in products), self._linear(product))
        require(all(linear.bias is None for linear in modules.linears))
        return self._closed(Half(frozenset(nodes), (x,), result, modules, selects_rows))

    def _closed(self, half: Half) -> Half:
        self.require_closed(half.nodes, half.result)
        return half

    def _heads(self, index: int | None, nodes: set[int]) -> _Heads:
        """What attention reads, back to the product."""
        node = self._enter(index, nodes)
        require(node.op == "PERMUTE" and tuple(node.params[:4]) == _HEADS_FIRST)
        index, node = self._past_copies(node.sources[0], nodes)
        scale = 1.0
        if node.op == "SCALE":
            require(node.number(1) == 0)
            scale = node.number(0)
            index, node = self._past_copies(node.sources[0], nodes)
        count, width = node.shape[2:]
        assert isinstance(count, int) and isinstance(width, int)
        rope = norm = None
        if node.op == "ROPE":
            require(node.integer(15) == 0)
            rope = index
            index, node = self._past_copies(node.sources[0], nodes)
        if node.op == "RMS_NORM":
            norm = index
            index, node = self._past_copies(node.sources[0], nodes)
        # Either all of a product in heads, or a part of it, which lies `first` numbers behind a row's start.
        first = 0
        if node.op == "RESHAPE" and self.graph.nodes[_first(node)].op == "VIEW":
            index, node = _first(node), self._enter(node.sources[0], nodes)
        product = self.graph.nodes[_first(node)]
        if node.op == "VIEW":
            require(isinstance(node.view_offset, int) and node.strides[3] == 4)
            assert isinstance(node.view_offset, int)
            first = node.view_offset // 4
            is_in_heads = node.strides[2] == 4 * width and node.strides[1] == product.strides[2]
            require(is_in_heads or (node.shape[1] == 1 and node.strides[2] == product.strides[2]))
        else:
            require(node.op == "RESHAPE" and product.shape[3] == count * width)
        return _Heads(_first(node), first, count, width, rope, norm, scale)

    def _enter(self, index: int | None, nodes: set[int]) -> Node:
        """A node that belongs to the half."""
        require(index is not None and not self.graph.nodes[index].is_leaf)
        assert index is not None
        nodes.add(index)
        return self.graph.nodes[index]

    def _past_copies(self, index: int | None, nodes: set[int]) -> tuple[int, Node]:
        """The node that `index` repeats number by number."""
        node = self._enter(index, nodes)
        while True:
            assert index is not None
            source = None if not node.sources or node.sources[0] is None else self.graph.nodes[node.sources[0]]
            is_copy = node.op == "VIEW" and node.view_offset == 0 and source is not None
            if not (is_copy and source is not None and (node.shape, node.strides) == (source.shape, source.strides)):
                return index, node
            index = node.sources[0]
            node = self._enter(index, nodes)

    def _product(self, index: int, nodes: set[int]) -> int:
        """What a product with a trainable weight reads."""
        node = self._enter(index, nodes)
        require(node.op == "MUL_MAT" and len(node.sources) >= 2 and node.sources[1] is not None)
        self._linear(index)
        assert node.sources[1] is not None
        return node.sources[1]

    def _linear(self, product: int) -> QuantLinear:
        weight = self.graph.nodes[_first(self.graph.nodes[product])]
        module = self.weights.modules.get(weight.name) if weight.role == "weight" else None
        if not isinstance(module, QuantLinear):
            raise NoMatchError
        return module

    def _norm(self, index: int, nodes: set[int]) -> tuple[NormWeight, int]:
        """A norm with weight, and the node that it reads."""
        node = self._enter(index, nodes)
        require(node.op == "RMS_NORM" and len(node.sources) == 2)
        return self._norm_weight(index), _first(node)

    def _norm_weight(self, index: int) -> NormWeight:
        node = self.graph.nodes[index]
        require(node.op == "RMS_NORM" and len(node.sources) == 2 and node.sources[1] is not None)
        assert node.sources[1] is not None
        return NormWeight(self._numbers(node.sources[1]), node.number(0))

    def _numbers(self, index: int) -> torch.Tensor:
        """A weight that is read as numbers, float32, as a vector."""
        node = self.graph.nodes[index]
        module = self.weights.modules.get(node.name) if node.role == "weight" else None
        if not isinstance(module, FrozenTensor):
            raise NoMatchError
        return module.values().flatten()

    def _qkv(self, q: _Heads, k: _Heads, v: _Heads) -> tuple[QuantLinear, ...]:
        """Linears whose rows, one after the other, are q, k and v."""
        products = q.product, k.product, v.product
        if len(set(products)) == 3:
            require(q.first == k.first == v.first == 0)
        else:
            require(len(set(products)) == 1)
            require((q.first, k.first, v.first) == (0, q.count * q.width, (q.count + k.count) * q.width))
        linears = tuple(self._linear(product) for product in dict.fromkeys(products))
        require(sum(linear.shape[0] for linear in linears) == (q.count + 2 * k.count) * q.width)
        return linears

    def _head_norms(self, q: _Heads, k: _Heads) -> tuple[NormWeight, NormWeight] | None:
        require((q.norm is None) == (k.norm is None))
        if q.norm is None or k.norm is None:
            return None
        norms = self._norm_weight(q.norm), self._norm_weight(k.norm)
        require(norms[0].eps == norms[1].eps)
        require(all(norm.weight.shape == (q.width,) for norm in norms))
        return norms

    def _rotation(self, q: _Heads, k: _Heads) -> tuple[Tables | None, tuple[int | None, ...]]:
        require((q.rope is None) == (k.rope is None))
        if q.rope is None or k.rope is None:
            return None, ()
        node, other = self.graph.nodes[q.rope], self.graph.nodes[k.rope]
        angles = node.sources[1:]
        require(node.params == other.params and angles == other.sources[1:])
        require(all(source is None or self.graph.nodes[source].is_leaf for source in angles))
        return tables_of(self.graph, node), angles

    def _residual_sum(self, product: int, x: int, nodes: set[int]) -> tuple[int, bool]:
        """The node that adds x to a product, and whether it does so for the wanted rows alone."""
        node = self.graph.nodes[self.only_user(product)]
        index, others, selects_rows = product, {x}, False
        if node.op == "GET_ROWS":
            rows = self.graph.nodes[node.sources[1]] if node.sources[1] is not None else None
            require(rows is not None and rows.role == "input" and rows.name == "out_ids")
            index, selects_rows = self.only_user(product), True
            others = {
                user
                for user in self.users[x]
                if self.graph.nodes[user].op == "GET_ROWS" and self.graph.nodes[user].sources == (x, node.sources[1])
            }
            nodes |= {index, *others}
        result = self.only_user(index)
        node = self.graph.nodes[result]
        require(node.op == "ADD" and len(node.sources) == 2)
        first, second = node.sources
        require((first == index and second in others) or (second == index and first in others))
        nodes.add(result)
        return result, selects_rows


def _first(node: Node) -> int:
    require(bool(node.sources) and node.sources[0] is not None)
    assert node.sources[0] is not None
    return node.sources[0]
