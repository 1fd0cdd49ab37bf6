"""Passes over a graph: from what llama.cpp runs to what training runs. Each takes a graph and gives a new one.

* `take_out_adapter`: the probing adapter's nodes leave, and with them the knowledge of which products it reached.
* `forward_casts`: half-precision copies are read through to what they copy: gradients want the numbers themselves.
* `order_memory`: llama.cpp writes into caches and states and reads views of them later, ordered by nothing but the
  order of computing. Here every write makes a new version, and a view reads the version that was there when it ran.
* `name_masks`: an attention whose mask is an input carries the mask's meaning in its name and reads no mask.
* `empty_states.drop_empty_states`: recurrences that begin with an empty state know documents instead.
* `name_rows_of_tokens`: rows that are picked by n-grams of tokens are known as such.
* `join`: a norm and its weight, a product and its bias become one node, for the project's own operations.
* `latent_attention.unabsorb`: attention to a latent row makes keys and values of each head again.
* `shorten_sorts`: where only the first columns of a sort are read, nothing else is sorted.
* `without_gradient`: weights that only choose are no longer called trainable.
* `prune`: what the logits do not need leaves.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyggtrain.graph.empty_states import drop_empty_states
from pyggtrain.graph.ir import Graph, Ngrams, Node
from pyggtrain.graph.latent_attention import unabsorb

PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID"})
VIEWS = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
_FLOATS = frozenset({"f32", "f16", "bf16"})
_CHOICES = frozenset({"ARGSORT", "ARGSORT.top_k", "TOP_K"})


@dataclass(frozen=True)
class Reach:
    """Which weights an adapter changes.

    Attributes:
        trainable: weights that enter one or more products, to each of which llama.cpp adds the adapter's pair.
        missed: other weights that enter products, each with the reason why a pair on it cannot be trained.
    """

    trainable: frozenset[str]
    missed: dict[str, str]


class _Walk:
    """A new graph made node by node from an old one."""

    def __init__(self, graph: Graph) -> None:
        self.old = graph
        self.nodes: list[Node] = []
        self.place: dict[int, int] = {}

    def carried(self, node: Node) -> Node:
        """`node` reading from the new graph."""
        sources = tuple(None if source is None else self.place[source] for source in node.sources)
        view_parent = None if node.view_parent is None else self.place[node.view_parent]
        if sources == node.sources and view_parent == node.view_parent:
            return node
        return replace(node, sources=sources, view_parent=view_parent)

    def add(self, index: int, node: Node) -> None:
        """The old node `index` is now `node`."""
        self.place[index] = len(self.nodes)
        self.nodes.append(node)

    def finished(self) -> Graph:
        return replace(self.old, nodes=tuple(self.nodes), logits=self.place[self.old.logits])


def _weight_of(graph: Graph, index: int | None) -> str | None:
    """The weight that a product multiplies by, or None if `index` is no product with a weight."""
    if index is None or graph.nodes[index].op not in PRODUCTS:
        return None
    operand = graph.nodes[index].sources[0]
    assert operand is not None
    return graph.nodes[operand].name if graph.nodes[operand].role == "weight" else None


def _reached(graph: Graph, node: Node) -> str | None:
    """The weight whose pair `node` adds to its product, or None if it does no such thing: ADD(y, SCALE(B (A x)))."""
    if node.op != "ADD" or node.sources[1] is None:
        return None
    scale = graph.nodes[node.sources[1]]
    if scale.op != "SCALE" or scale.sources[0] is None:
        return None
    product = graph.nodes[scale.sources[0]]
    if product.op not in PRODUCTS or product.sources[0] is None:
        return None
    half = graph.nodes[product.sources[0]]
    return half.name if half.role == "lora_b" else None


def _scaled_product(graph: Graph, index: int | None) -> Node | None:
    """MUL(W x, the file's own factor) as one node, or None if `index` is none.

    A matrix has one factor, and becomes MUL_MAT_SCALED with sources (W, x, factor). A stack of experts has one for each
    expert, which llama.cpp spreads over the chosen ones: MUL_MAT_ID_SCALED with sources (W, x, ids, factors).
    """
    if index is None:
        return None
    node = graph.nodes[index]
    if node.op != "MUL" or _weight_of(graph, node.sources[0]) is None:
        return None
    product, factor = graph.nodes[_first(node)], node.sources[1]
    if product.op == "MUL_MAT_ID":
        for op in ("GET_ROWS", "REPEAT", "RESHAPE"):
            if factor is None or graph.nodes[factor].op != op:
                return None
            factor = graph.nodes[factor].sources[0]
    if factor is None or graph.nodes[factor].role != "weight":
        return None
    if product.op == "MUL_MAT" and graph.nodes[factor].shape != (1, 1, 1, 1):
        return None
    return replace(node, op=f"{product.op}_SCALED", sources=(*product.sources, factor))


def take_out_adapter(graph: Graph) -> tuple[Graph, Reach]:
    """The graph without the probing adapter, and what the adapter reached.

    A pair that llama.cpp adds after it has scaled the weight's own product stays unscaled: see `_scaled_product`.
    """
    num_pairs: Counter[str] = Counter()
    num_products: Counter[str] = Counter()
    scaled: dict[int, Node] = {}
    odd: dict[str, str] = {}
    for index, node in enumerate(graph.nodes):
        if (weight := _weight_of(graph, index)) is not None:
            num_products[weight] += 1
            if node.op == "MUL_MAT" and graph.nodes[_first(node)].shape[:2] != (1, 1):
                odd[weight] = "is a stack of matrices, whose training is not implemented"
        if (name := _reached(graph, node)) is not None:
            num_pairs[name] += 1
            if _weight_of(graph, node.sources[0]) == name:
                continue
            product = _scaled_product(graph, node.sources[0])
            if product is None:
                odd.setdefault(
                    name, "is changed by more than a scale before an adapter is added, which is not implemented"
                )
            else:
                scaled[_first(node)] = product
    types = {node.name: node.type for node in graph.nodes if node.role == "weight"}
    missed = {}
    for name, count in num_products.items():
        if not num_pairs[name] and types[name] == "nvfp4" and f"{name.removesuffix('.weight')}.scale" in types:
            missed[name] = "is an NVFP4 weight with a scale of its own, and llama.cpp aborts when an adapter changes it"
        elif not num_pairs[name]:
            missed[name] = "is multiplied outside of llama.cpp's LoRA path: an adapter would have no effect in serving"
        elif num_pairs[name] != count:
            missed[name] = "enters several products, and llama.cpp applies an adapter to only some of them"
        elif name in odd:
            missed[name] = odd[name]
    walk = _Walk(graph)
    for index, node in enumerate(graph.nodes):
        if _reached(graph, node) is not None:
            walk.place[index] = walk.place[_first(node)]
        else:
            walk.add(index, walk.carried(scaled.get(index, node)))
    return walk.finished(), Reach(frozenset(num_products) - frozenset(missed), missed)


def without_gradient(graph: Graph, reach: Reach) -> Reach:
    """`reach` without the weights that only choose: a choice has no slope, so the loss would leave their pairs at rest.

    Args:
        graph: after all other passes.
        reach: what llama.cpp's adapter path reaches.
    """
    is_felt = {graph.logits}
    for index in range(graph.logits, -1, -1):
        if index in is_felt and graph.nodes[index].op not in _CHOICES:
            is_felt.update(source for source in graph.nodes[index].sources if source is not None)
    felt = {graph.nodes[index].name for index in is_felt if graph.nodes[index].role == "weight"}
    unfelt = dict.fromkeys(
        reach.trainable - felt, "only chooses what the model attends to, and the loss has no gradient for a choice"
    )
    return Reach(reach.trainable & felt, {**reach.missed, **unfelt})


def choosing_products(graph: Graph) -> frozenset[int]:
    """Products with weights from whose results alone something is chosen (a router's): rounding them would change the
    choice.
    """
    reading = {
        source for node in graph.nodes if node.op in _CHOICES for source in node.sources[:1] if source is not None
    }
    found = set()
    for index in range(len(graph.nodes) - 1, -1, -1):
        if index not in reading:
            continue
        if _weight_of(graph, index) is not None:
            found.add(index)
        else:
            reading.update(source for source in graph.nodes[index].sources if source is not None)
    return frozenset(found)


def rewritten(graph: Graph) -> tuple[Graph, Reach]:
    """All passes in turn: the graph to train with, and which weights an adapter on it can train."""
    graph, reach = take_out_adapter(graph)
    graph = join(drop_empty_states(prune(order_memory(name_masks(forward_casts(graph))))))
    graph = prune(shorten_sorts(prune(unabsorb(graph))))
    return graph, without_gradient(graph, reach)


def forward_casts(graph: Graph) -> Graph:
    """The graph without copies that only change the kind of float."""
    walk = _Walk(graph)
    for index, node in enumerate(graph.nodes):
        is_cast = node.op == "CPY" and node.view_parent is None
        if is_cast and {node.type, graph.nodes[_first(node)].type} <= _FLOATS:
            walk.place[index] = walk.place[_first(node)]
        else:
            walk.add(index, walk.carried(node))
    return walk.finished()


def order_memory(graph: Graph) -> Graph:
    """The graph in which memory that is written to has versions.

    A write (CPY into a view, SET_ROWS, or an operation in place) becomes the operation, then WRITE(old version,
    result), whose shape is that of the whole memory. A view that is read after the write becomes a VIEW of the newest
    version.
    """
    walk = _Walk(graph)
    # Memory (a node of the old graph) -> node of the new graph that holds what is there now; and the version of it
    # that each view saw.
    newest: dict[int, int] = {}
    num_writes: Counter[int] = Counter()
    seen: dict[int, int] = {}

    def reread(index: int | None) -> None:
        """Have `index`, if it is a view of memory that has been written to since, read again."""
        if index is None:
            return
        node = graph.nodes[index]
        memory = index if node.view_parent is None else node.view_parent
        if num_writes[memory] == seen.get(index, 0):
            return
        if memory == index:
            walk.place[index] = newest[memory]
        else:
            walk.add(index, replace(node, op="VIEW", sources=(newest[memory],), view_parent=newest[memory]))
        seen[index] = num_writes[memory]

    for index, node in enumerate(graph.nodes):
        memory = node.view_parent
        if memory is None:
            for source in node.sources:
                reread(source)
            walk.add(index, walk.carried(node))
            continue
        if node.op == "VIEW":
            parent = newest.get(memory, walk.place[memory])
            walk.add(index, replace(node, sources=(parent,), view_parent=parent))
        elif node.op in VIEWS:
            reread(node.sources[0])
            walk.add(index, replace(walk.carried(node), view_parent=newest.get(memory, walk.place[memory])))
        else:
            for source in node.sources:
                reread(source)
            carried = walk.carried(node)
            operation = replace(carried, sources=carried.sources[:1]) if node.op == "CPY" else carried
            walk.nodes.append(replace(operation, view_parent=None))
            before = newest.get(memory, walk.place[memory])
            written = replace(node, op="WRITE", sources=(before, len(walk.nodes) - 1), view_parent=before)
            newest[memory] = len(walk.nodes)
            num_writes[memory] += 1
            walk.nodes.append(written)
            walk.place[index] = len(walk.nodes) - 2
        seen[index] = num_writes[memory]
    return walk.finished()


def name_masks(graph: Graph) -> Graph:
    """The graph in which FLASH_ATTN_EXT with an input as its mask is, say, "FLASH_ATTN_EXT.kq_mask_swa"."""

    def named(node: Node) -> Node:
        if node.op != "FLASH_ATTN_EXT" or len(node.sources) < 4 or node.sources[3] is None:
            return node
        mask = graph.nodes[node.sources[3]]
        if mask.role != "input":
            return node
        return replace(node, op=f"{node.op}.{mask.name}", sources=(*node.sources[:3], None, *node.sources[4:]))

    return replace(graph, nodes=tuple(named(node) for node in graph.nodes))


def name_rows_of_tokens(graph: Graph, metadata: Mapping[str, Any]) -> Graph:
    """The graph in which the input that picks rows of a table by n-grams of tokens is called "ngram_rows".

    No owner that csrc/graph.cpp could ask tells its meaning; what it reads does, and the file's `ple` keys say how.
    """
    architecture = metadata["general.architecture"]
    if f"{architecture}.ple.ngram_size" not in metadata:
        return graph
    named = {}
    for node in graph.nodes:
        if node.op == "GET_ROWS" and graph.nodes[_first(node)].name == "per_layer_token_embd.weight":
            rows = node.sources[1]
            if rows is not None and graph.nodes[rows].role == "unknown_input":
                named[rows] = replace(graph.nodes[rows], name="ngram_rows", role="input", value=b"")
    keys = ("ngram_size", "heads_per_ngram", "eos_token_id", "layer_multipliers", "head_offsets", "head_vocab_sizes")
    ngrams = Ngrams(*(metadata[f"{architecture}.ple.{key}"] for key in keys))
    return replace(graph, nodes=tuple(named.get(index, node) for index, node in enumerate(graph.nodes)), ngrams=ngrams)


def join(graph: Graph) -> Graph:
    """The graph in which RMS_NORM takes its weight and MUL_MAT its bias as a further source."""
    num_uses = Counter(source for node in graph.nodes for source in node.sources if source is not None)

    def takes(node: Node, op: str) -> bool:
        first, second = (graph.nodes[source] for source in node.sources if source is not None)
        return (
            first.op == op
            and len(first.sources) == (1 if op == "RMS_NORM" else 2)
            and num_uses[_first(node)] == 1
            and second.role == "weight"
            and second.shape[:3] == (1, 1, 1)
            and second.shape[3] == first.shape[3]
        )

    walk = _Walk(graph)
    for index, node in enumerate(graph.nodes):
        if node.op == "MUL" and takes(node, "RMS_NORM"):
            inner = graph.nodes[_first(node)]
        elif node.op == "ADD" and _weight_of(graph, node.sources[0]) is not None and takes(node, "MUL_MAT"):
            inner = graph.nodes[_first(node)]
            # A weight in several products may have its bias in only one of them.
            if num_uses[_first(inner)] > 1:
                walk.add(index, walk.carried(node))
                continue
        else:
            walk.add(index, walk.carried(node))
            continue
        walk.add(index, walk.carried(replace(inner, name=node.name, sources=(*inner.sources, node.sources[1]))))
    return prune(walk.finished())


def shorten_sorts(graph: Graph) -> Graph:
    """The graph in which ARGSORT, descending, and views of its first k columns are ARGSORT.top_k, if nothing else reads
    it: llama.cpp's way to choose experts.

    Args:
        graph: of nodes that the logits need.
    """
    readers: defaultdict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for source in {*node.sources, node.view_parent} - {None}:
            assert source is not None
            readers[source].append(node)
    walk = _Walk(graph)
    for index, node in enumerate(graph.nodes):
        views = readers[index]
        first = node.sources[0] if node.sources else None
        if node.op == "ARGSORT" and node.integer(0) == 1 and _are_first_columns(views, index, node):
            # The name is that of what both have.
            walk.add(index, walk.carried(replace(node, op="ARGSORT.top_k", name=views[0].name, shape=views[0].shape)))
        elif node.op == "VIEW" and first is not None and walk.nodes[walk.place[first]].op == "ARGSORT.top_k":
            walk.place[index] = walk.place[first]
        else:
            walk.add(index, walk.carried(node))
    return walk.finished()


def _are_first_columns(views: list[Node], parent: int, of: Node) -> bool:
    """Whether nodes are all views of the same first columns of the node `parent`."""
    return len({view.shape for view in views}) == 1 and all(
        view.op == "VIEW"
        and view.sources == (parent,)
        and view.view_offset == 0
        and view.strides == of.strides
        and view.shape[:3] == of.shape[:3]
        for view in views
    )


def _first(node: Node) -> int:
    assert node.sources[0] is not None
    return node.sources[0]


def prune(graph: Graph) -> Graph:
    """The graph of those nodes that the logits need."""
    needed = {graph.logits}
    for index in range(graph.logits, -1, -1):
        if index in needed:
            node = graph.nodes[index]
            needed.update(source for source in (*node.sources, node.view_parent) if source is not None)
    walk = _Walk(graph)
    for index, node in enumerate(graph.nodes[: graph.logits + 1]):
        if index in needed:
            walk.add(index, walk.carried(node))
    return walk.finished()
