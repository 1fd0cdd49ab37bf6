"""Halves of gated delta nets, found in a graph by their structure: what `ops.fused.delta_block` computes at once.

    x + W_o (rms_norm(delta_rule(q, k, v, g, beta)) ∘ silu(W_z y)),  y = norm(x)

    q, k, v = heads of silu(conv(W_qkv y)), those of q and k of unit length
    g = a softplus(W_alpha y + dt),  beta = sigmoid(W_beta y)

Each document begins with an empty history and an empty state (`empty_states`). In qwen35 and qwen35moe value head h
reads key head h mod N, as ggml repeats; qwen3next repeats each key head for neighbours, and has one matrix for alpha
and beta.
"""

import math
from dataclasses import dataclass

from pyggtrain.graph.half import Half
from pyggtrain.graph.search import HalfSearch, first_source, fixed, require
from pyggtrain.nn import DeltaHalf

# ggml's float32 of a root or a quotient against Python's float.
_ROUNDING = 1e-6
_KEEPS_ORDER = frozenset({"CONT", "RESHAPE"})


@dataclass(frozen=True)
class _Heads:
    """Heads of q, k or v as the convolution gives them.

    Attributes:
        convolved: the node.
        first: number of its row with which they begin.
        count, width: heads and numbers of each.
        num_readers: neighbours among the value heads that each is repeated for; None: heads are not repeated.
        eps: added to the square of their length before they are divided by it; None: they are not.
    """

    convolved: int
    first: int
    count: int
    width: int
    num_readers: int | None = None
    eps: float | None = None


@dataclass(frozen=True)
class _Gate:
    """What a gate's projection gives.

    Attributes:
        product: the node.
        place: among the two that share a product, whose rows take turns by key head: 0 or 1; None: it has its own.
    """

    product: int
    place: int | None


class DeltaSearch(HalfSearch):
    """Looks for halves from their delta rules outwards."""

    def delta_net(self, index: int) -> Half:
        """The half around the gated delta rule `index`."""
        graph, node = self.graph, self.graph.nodes[index]
        nodes = {index}
        require(node.op == "GATED_DELTA_NET.empty" and None not in node.sources)
        q, k, v = (self._heads(source, nodes) for source in node.sources[:3])
        require(q.eps == k.eps and v.eps is None)
        require(q.convolved == k.convolved == v.convolved and q.count == k.count and q.num_readers == k.num_readers)
        require(q.width == k.width == v.width and v.count % q.count == 0)
        require((q.first, k.first, v.first) == (0, q.count * q.width, 2 * q.count * q.width))
        num_readers = v.count // q.count
        require(q.num_readers in (None, num_readers) and v.num_readers is None)
        qkv, conv_weight = self._convolution(q.convolved, nodes)
        require(graph.nodes[qkv].shape[3] == (2 * q.count + v.count) * q.width)

        alpha, a, dt = self._log_decay(node.sources[3], v.count, nodes)
        beta = self._beta(node.sources[4], nodes)
        gates = [alpha.product] if alpha.product == beta.product else [alpha.product, beta.product]
        is_grouped = len(gates) == 1
        require((beta.place, alpha.place) == ((0, 1) if is_grouped else (None, None)))
        # Where each key head has one reader, both orders are the same.
        require((q.num_readers is not None) == is_grouped or num_readers == 1)
        require(all(graph.nodes[product].shape[3] == 2 * v.count // len(gates) for product in gates))
        for product in gates if is_grouped else ():
            self._require_turns(product, q.count, num_readers)

        outputs = self._only(index, "VIEW", nodes)
        require(graph.nodes[outputs].view_offset == 0 and graph.nodes[outputs].shape == node.shape)
        normed_o = self._only(outputs, "RMS_NORM", nodes)
        head_norm = self.norm_weight(normed_o)
        gated = self._only(normed_o, "MUL", nodes)
        require(graph.nodes[gated].sources[0] == normed_o)
        silu = self.enter(graph.nodes[gated].sources[1], nodes)
        require(silu.op == "UNARY.SILU" and silu.shape == node.shape)
        z = self._past_shapes(silu.sources[0], nodes)
        require(graph.nodes[z].shape[3] == v.count * v.width)
        flat = self._only(gated, "RESHAPE", nodes)
        output = self._only(flat, "MUL_MAT", nodes)
        require(self.product(output, nodes) == flat)

        normed = {self.product(product, nodes) for product in (qkv, z, *gates)}
        require(len(normed) == 1)
        norm, x = self.norm(normed.pop(), nodes)
        require(norm.eps == head_norm.eps and q.eps is not None and math.isclose(q.eps, norm.eps, rel_tol=_ROUNDING))
        result, selects_rows = self.residual_sum(output, x, nodes)
        modules = DeltaHalf(
            norm,
            self.linear(qkv),
            self.linear(z),
            tuple(self.linear(product) for product in gates),
            self.linear(output),
            head_norm,
            self.numbers(conv_weight).view(self.linear(qkv).shape[0], -1),
            self.numbers(a),
            self.numbers(dt),
            q.count,
            v.count,
            q.width,
            is_grouped,
        )
        self.require_closed(nodes, result)
        return Half(frozenset(nodes), (x,), result, modules, selects_rows)

    def _heads(self, index: int | None, nodes: set[int]) -> _Heads:
        """What the delta rule reads, back to the convolution."""
        node = self.enter(index, nodes)
        num_readers = eps = None
        if node.op == "RESHAPE":
            # [T, N, 1, K] becomes [T, N, G / N, K]
            repeated = self.enter(first_source(node), nodes)
            spread = self.enter(first_source(repeated), nodes)
            require(repeated.op == "REPEAT" and spread.op == "RESHAPE")
            num_readers = fixed(repeated.shape[2])
            node = self.enter(first_source(spread), nodes)
            _, num_tokens, *head = node.shape
            require(spread.shape == (num_tokens, head[0], 1, head[1]))
            require(repeated.shape == (num_tokens, head[0], num_readers, head[1]))
        if node.op == "SCALE":
            # 1 / sqrt(K) of a norm is unit length.
            scaled, node = node, self.enter(first_source(node), nodes)
            width = fixed(node.shape[3])
            require(node.op == "RMS_NORM" and len(node.sources) == 1)
            require(scaled.number(1) == 0)
            require(math.isclose(scaled.number(0) * math.sqrt(width), 1.0, rel_tol=_ROUNDING))
            eps = node.number(0) * width
            node = self.enter(first_source(node), nodes)
        count, width = (fixed(size) for size in node.shape[2:])
        convolved = self.graph.nodes[first_source(node)]
        require(node.op == "VIEW" and node.strides[1:] == (convolved.strides[2], 4 * width, 4))
        return _Heads(first_source(node), fixed(node.view_offset) // 4, count, width, num_readers, eps)

    def _convolution(self, index: int, nodes: set[int]) -> tuple[int, int]:
        """The product before a convolution with SiLU, and the convolution's weight."""
        silu = self.enter(index, nodes)
        conv = self.enter(first_source(silu), nodes)
        require(silu.op == "UNARY.SILU" and conv.op == "SSM_CONV.empty" and conv.sources[1] is not None)
        transposed = self.enter(first_source(conv), nodes)
        require(transposed.op == "TRANSPOSE")
        assert conv.sources[1] is not None
        return self._past_shapes(first_source(transposed), nodes), conv.sources[1]

    def _log_decay(self, index: int | None, num_heads: int, nodes: set[int]) -> tuple[_Gate, int, int]:
        """alpha, and the nodes of a and dt."""
        index = self._past_shapes(index, nodes)
        decay = self.graph.nodes[index]
        softplus = self.enter(first_source(decay), nodes)
        shifted = self.enter(first_source(softplus), nodes)
        require((decay.op, softplus.op, shifted.op) == ("MUL", "UNARY.SOFTPLUS", "ADD"))
        a, dt = decay.sources[1], shifted.sources[1]
        assert a is not None and dt is not None
        # One number for each head, not for each channel.
        require(all(self.graph.nodes[one].shape == (1, 1, 1, num_heads) for one in (a, dt)))
        require(shifted.shape[3] == num_heads)
        return self._gate(first_source(shifted), nodes), a, dt

    def _beta(self, index: int | None, nodes: set[int]) -> _Gate:
        index = self._past_shapes(index, nodes)
        sigmoid = self.graph.nodes[index]
        require(sigmoid.op == "UNARY.SIGMOID")
        return self._gate(first_source(sigmoid), nodes)

    def _gate(self, index: int, nodes: set[int]) -> _Gate:
        """A gate's projection, which may share its product with the other one."""
        index = self._past_shapes(index, nodes)
        node = self.graph.nodes[index]
        if node.op != "VIEW":
            return _Gate(index, None)
        num_readers = fixed(node.shape[3])
        require(node.view_offset in (0, 4 * num_readers) and node.strides[2:] == (8 * num_readers, 4))
        require(node.strides[1] == self.graph.nodes[first_source(node)].strides[2])
        return _Gate(first_source(node), 0 if node.view_offset == 0 else 1)

    def _require_turns(self, product: int, num_key_heads: int, num_readers: int) -> None:
        """Two gates of `num_readers` value heads for each key head lie in a product's rows."""
        views = [self.graph.nodes[user] for user in self.users[product]]
        require(len(views) == 2 and all(view.shape[2:] == (num_key_heads, num_readers) for view in views))

    def _past_shapes(self, index: int | None, nodes: set[int]) -> int:
        """The node whose numbers `index` has, in their order."""
        node = self.enter(index, nodes)
        while node.op in _KEEPS_ORDER:
            index = first_source(node)
            node = self.enter(index, nodes)
        assert index is not None
        return index

    def _only(self, index: int, op: str, nodes: set[int]) -> int:
        """The one reader of `index`, which is an operation of a kind."""
        user = self.only_user(index)
        require(self.enter(user, nodes).op == op)
        return user
