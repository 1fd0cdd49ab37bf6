"""Halves of decoder layers, found in a graph by their structure: what `ops.fused` computes in one operation each.

    attention      x + W_o attention(rope(q), rope(k), v),  q, k, v = W_qkv norm(x), heads of q and k normed or not,
                   what attention gives gated by the sigmoid of rows among q's or not
    delta net      see `delta_halves`
    feed-forward   x + W_down (silu(W_gate z) ∘ W_up z),    z = norm(x)

No architecture is asked for: a half is found from its attention, its delta rule or its SwiGLU outwards, and taken only
if each operation between the input and the sum with the residual is one of these, and nobody else reads what lies
between. In the last layer llama.cpp takes the wanted rows before it adds the residual; here they are taken from the
sum.

What is found runs fused where the device can (`program.Region`). The steps that it stands for stay, for all else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pyggtrain.graph.delta_halves import DeltaSearch
from pyggtrain.graph.half import Half
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.attention import mask_of
from pyggtrain.graph.lowering.rope import Tables, tables_of
from pyggtrain.graph.search import HalfSearch, NormWeight, first_source, fixed, matches, require
from pyggtrain.graph.weights import Weights
from pyggtrain.nn import AttentionHalf, FeedForwardHalf, FusedLayer, QuantLinear
from pyggtrain.ops.attention import MAX_HEAD

_HEADS_FIRST = (0, 2, 1, 3)


def fused_layer(halves: Sequence[object]) -> FusedLayer | None:
    """A layer that consists of an attention half and a feed-forward half; None: it does not, or gates are in the way,
    whose memory nobody foretells (`training.gpu_memory`).
    """
    modules = [half.modules if isinstance(half, Half) else None for half in halves]
    match modules:
        case [AttentionHalf(is_gated=False) as attention, FeedForwardHalf() as feed_forward]:
            return FusedLayer(attention, feed_forward)
    return None


def find_halves(graph: Graph, weights: Weights) -> list[Half]:
    """All halves of a graph, in its order.

    Args:
        graph: after all passes of `rewrite`.
        weights: with the modules of its steps.
    """
    search, delta_search = _Search(graph, weights), DeltaSearch(graph, weights)
    found = {
        "FLASH_ATTN_EXT": search.attention,
        "GATED_DELTA_NET": delta_search.delta_net,
        "GLU": search.feed_forward,
    }
    kinds = [node.op.partition(".")[0] for node in graph.nodes]
    begins = [index for index, kind in enumerate(kinds) if kind in found]
    return matches(begins, lambda index: found[kinds[index]](index))


@dataclass(frozen=True)
class _Heads:
    """Heads of q, k or v as a product gives them.

    Attributes:
        product: the node.
        first: number of the product's row with which they begin.
        count, width: heads and numbers of each.
        distance: rows from one head to the next.
        rope, norm: nodes that they pass, None for none.
        scale: that they are multiplied by at last.
    """

    product: int
    first: int
    count: int
    width: int
    distance: int
    rope: int | None
    norm: int | None
    scale: float


class _Search(HalfSearch):
    def attention(self, index: int) -> Half:
        """The half around the attention `index`."""
        graph, node = self.graph, self.graph.nodes[index]
        nodes = {index}
        # Of a mask whose meaning is known.
        require(node.op.startswith("FLASH_ATTN_EXT.") and len(node.sources) >= 3 and node.number(1) == 0)
        q, k, v = (self._heads(source, nodes) for source in node.sources[:3])
        require(v.rope is None and v.norm is None and v.scale == 1 and k.count == v.count)
        require(q.width == k.width == v.width <= MAX_HEAD and q.count % k.count == 0)
        normed = {self.product(product, nodes) for product in (q.product, k.product, v.product)}
        require(len(normed) == 1)
        norm, x = self.norm(normed.pop(), nodes)
        qkv = self._qkv(q, k, v)

        attended = self.only_user(index)
        require(graph.nodes[attended].op == "RESHAPE")
        nodes.add(attended)
        is_gated = q.distance > q.width
        if is_gated:
            attended = self._gated(attended, q, nodes)
        product = self.only_user(attended)
        require(graph.nodes[product].sources[1] == attended)
        self.product(product, nodes)
        output = self.linear(product)
        result, selects_rows = self.residual_sum(product, x, nodes)

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
            is_gated=is_gated,
            variant=mask.variant(node.number(2), None if sinks is None else self.numbers(sinks)),
        )
        tables, angles = self._rotation(q, k)
        return self._closed(Half(frozenset(nodes), (x, *angles), result, modules, selects_rows, tables))

    def feed_forward(self, index: int) -> Half:
        """The half around the SwiGLU `index`."""
        node = self.graph.nodes[index]
        require(node.op == "GLU.SWIGLU")
        nodes = {index}
        products = [source for source in node.sources if source is not None]
        require(not node.integer(1))
        normed = {self.product(product, nodes) for product in products}
        require(len(normed) == 1)
        norm, x = self.norm(normed.pop(), nodes)
        product = self.only_user(index)
        require(self.graph.nodes[product].sources[1:] == (index,))
        self.product(product, nodes)
        result, selects_rows = self.residual_sum(product, x, nodes)
        modules = FeedForwardHalf(norm, tuple(self.linear(one) for one in products), self.linear(product))
        require(all(linear.bias is None for linear in modules.linears))
        return self._closed(Half(frozenset(nodes), (x,), result, modules, selects_rows))

    def _closed(self, half: Half) -> Half:
        self.require_closed(half.nodes, half.result)
        return half

    def _heads(self, index: int | None, nodes: set[int]) -> _Heads:
        """What attention reads, back to the product."""
        node = self.enter(index, nodes)
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
        first, distance = 0, width
        if node.op == "RESHAPE" and self.graph.nodes[first_source(node)].op == "VIEW":
            index, node = first_source(node), self.enter(node.sources[0], nodes)
        product = self.graph.nodes[first_source(node)]
        if node.op == "VIEW":
            require(isinstance(node.view_offset, int) and node.strides[3] == 4)
            assert isinstance(node.view_offset, int)
            first = node.view_offset // 4
            if node.strides[1] == product.strides[2]:
                distance = fixed(node.strides[2]) // 4
            else:
                require(node.shape[1] == 1 and node.strides[2] == product.strides[2])
        else:
            require(node.op == "RESHAPE" and product.shape[3] == count * width)
        return _Heads(first_source(node), first, count, width, distance, rope, norm, scale)

    def _gated(self, attended: int, q: _Heads, nodes: set[int]) -> int:
        """The node that multiplies what attention gives by the sigmoid of gates, which lie behind each head of q."""
        result = self.only_user(attended)
        node = self.enter(result, nodes)
        require(node.op == "MUL" and node.sources[0] == attended)
        sigmoid = self.enter(node.sources[1], nodes)
        require(sigmoid.op == "UNARY.SIGMOID")
        gates = self.enter(sigmoid.sources[0], nodes)
        require(gates.op == "CONT" and gates.shape == node.shape)
        gates = self.enter(gates.sources[0], nodes)
        require(gates.op == "VIEW" and gates.sources[0] == q.product and gates.view_offset == 4 * q.width)
        require(gates.shape[2:] == (q.count, q.width) and gates.strides[2:] == (4 * q.distance, 4))
        require(q.distance == 2 * q.width and gates.strides[1] == self.graph.nodes[q.product].strides[2])
        return result

    def _past_copies(self, index: int | None, nodes: set[int]) -> tuple[int, Node]:
        """The node that `index` repeats number by number."""
        node = self.enter(index, nodes)
        while True:
            assert index is not None
            source = None if not node.sources or node.sources[0] is None else self.graph.nodes[node.sources[0]]
            is_copy = node.op == "VIEW" and node.view_offset == 0 and source is not None
            if not (is_copy and source is not None and (node.shape, node.strides) == (source.shape, source.strides)):
                return index, node
            index = node.sources[0]
            node = self.enter(index, nodes)

    def _qkv(self, q: _Heads, k: _Heads, v: _Heads) -> tuple[QuantLinear, ...]:
        """Linears whose rows, one after the other, are q, k and v."""
        products = q.product, k.product, v.product
        require(k.distance == v.distance == q.width)
        rows_q, rows_k = q.count * q.distance, k.count * k.width
        if len(set(products)) == 3:
            require(q.first == k.first == v.first == 0)
        else:
            require(len(set(products)) == 1)
            require((q.first, k.first, v.first) == (0, rows_q, rows_q + rows_k))
        linears = tuple(self.linear(product) for product in dict.fromkeys(products))
        require(sum(linear.shape[0] for linear in linears) == rows_q + 2 * rows_k)
        return linears

    def _head_norms(self, q: _Heads, k: _Heads) -> tuple[NormWeight, NormWeight] | None:
        require((q.norm is None) == (k.norm is None))
        # Gates come with norms of heads.
        require(q.norm is not None or q.distance == q.width)
        if q.norm is None or k.norm is None:
            return None
        norms = self.norm_weight(q.norm), self.norm_weight(k.norm)
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
