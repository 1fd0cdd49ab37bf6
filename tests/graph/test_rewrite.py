"""Passes over hand-made graphs: what an adapter reaches, the order of memory, masks by meaning, joined neighbours."""

from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.rewrite import (
    forward_casts,
    join,
    name_masks,
    name_rows_of_tokens,
    order_memory,
    prune,
    shorten_sorts,
    take_out_adapter,
    without_gradient,
)

VECTOR = (1, 1, 1, 8)
MATRIX = (1, 1, 8, 8)


class Sketch:
    """A graph written line by line; each line returns the node's number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def leaf(self, name: str, role: str = "weight", shape: tuple[int, ...] = MATRIX) -> int:
        return self.op("NONE", name=name, role=role, shape=shape)

    def op(
        self,
        op: str,
        *sources: int | None,
        name: str = "",
        role: str = "node",
        shape: tuple[int, ...] = MATRIX,
        type: str = "f32",
        parent: int | None = None,
        param: int = 0,
        offset: int = 0,
    ) -> int:
        strides = (256, 256, 32, 4)
        self.nodes.append(Node(name, op, role, type, shape, strides, (param,) * 16, sources, parent, offset))
        return len(self.nodes) - 1

    def pair(self, product: int, weight: str, x: int, kind: str = "MUL_MAT") -> int:
        a, b = self.leaf(weight, "lora_a"), self.leaf(weight, "lora_b")
        low_rank = self.op("SCALE", self.op(kind, b, self.op(kind, a, x)))
        return self.op("ADD", product, low_rank)

    def graph(self, logits: int | None = None) -> Graph:
        last = len(self.nodes) - 1 if logits is None else logits
        return Graph(
            tuple(self.nodes),
            last,
            window=0,
            window_type="none",
            is_causal=True,
            is_diffusion=False,
            uses_alibi=False,
            attn_temperature=(0, 0, 0),
        )


def ops_of(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if not node.is_leaf]


def test_adapter_leaves_and_the_weight_that_it_reached_is_trainable() -> None:
    sketch = Sketch()
    x = sketch.leaf("tokens", "input")
    product = sketch.op("MUL_MAT", sketch.leaf("w"), x)
    sketch.op("UNARY.RELU", sketch.pair(product, "w", x))
    graph, reach = take_out_adapter(sketch.graph())
    assert ops_of(prune(graph)) == ["MUL_MAT", "UNARY.RELU"]
    assert reach.trainable == {"w"} and not reach.missed


def test_weights_that_an_adapter_misses_are_named_with_the_reason() -> None:
    sketch = Sketch()
    x = sketch.leaf("tokens", "input")
    raw = sketch.op("MUL_MAT", sketch.leaf("raw"), x)
    twice = sketch.leaf("twice")
    both = sketch.op("ADD", sketch.pair(sketch.op("MUL_MAT", twice, x), "twice", x), sketch.op("MUL_MAT", twice, x))
    stack = sketch.op("MUL_MAT", sketch.leaf("stack", shape=(1, 4, 8, 8)), x)
    sketch.op("CONCAT", sketch.op("ADD", raw, both), sketch.pair(stack, "stack", x))
    _, reach = take_out_adapter(sketch.graph())
    assert not reach.trainable
    assert "outside of llama.cpp's LoRA path" in reach.missed["raw"]
    assert "only some of them" in reach.missed["twice"]
    assert "stack of matrices" in reach.missed["stack"]


def test_a_scale_of_the_weight_alone_stays_with_its_product() -> None:
    sketch = Sketch()
    x = sketch.leaf("tokens", "input")
    product = sketch.op("MUL_MAT", sketch.leaf("w"), x)
    scaled = sketch.op("MUL", product, sketch.leaf("w.scale", shape=(1, 1, 1, 1)))
    sketch.pair(scaled, "w", x)
    graph, reach = take_out_adapter(sketch.graph())
    graph = prune(graph)
    assert reach.trainable == {"w"} and ops_of(graph) == ["MUL_MAT_SCALED"]
    assert [graph.nodes[source].name for source in graph.nodes[-1].sources if source is not None] == [
        *("w", "tokens", "w.scale")
    ]


def test_casts_between_floats_are_read_through_and_others_stay() -> None:
    sketch = Sketch()
    x = sketch.leaf("x", "input")
    half = sketch.op("CPY", x, None, type="f16")
    whole = sketch.op("CPY", half, None, type="i32")
    sketch.op("ADD", half, whole)
    graph = prune(forward_casts(sketch.graph()))
    assert ops_of(graph) == ["CPY", "ADD"]
    assert graph.nodes[graph.logits].sources[0] == 0


def test_a_view_reads_the_version_of_memory_that_was_there_when_it_ran() -> None:
    sketch = Sketch()
    cache, x = sketch.leaf("cache", "state"), sketch.leaf("x", "input")
    before = sketch.op("UNARY.RELU", sketch.op("VIEW", cache, parent=cache, name="before"))
    target = sketch.op("VIEW", cache, parent=cache)
    sketch.op("CPY", x, target, parent=cache)
    after = sketch.op("VIEW", cache, parent=cache, name="after")
    sketch.op("ADD", before, after)
    graph = prune(order_memory(sketch.graph()))
    by_name = {node.name: node for node in graph.nodes}
    written = by_name["after"].sources[0]
    assert graph.nodes[by_name["before"].sources[0] or 0].name == "cache"
    assert written is not None and graph.nodes[written].op == "WRITE"
    # The write holds the memory as it was and the copied numbers.
    memory, numbers = graph.nodes[written].sources
    assert memory is not None and graph.nodes[memory].name == "cache"
    assert numbers is not None and graph.nodes[numbers].op == "CPY"


def test_an_old_view_that_is_read_again_after_a_write_sees_the_new_numbers() -> None:
    sketch = Sketch()
    cache, x = sketch.leaf("cache", "state"), sketch.leaf("x", "input")
    view = sketch.op("RESHAPE", cache, parent=cache)
    first = sketch.op("UNARY.RELU", view)
    sketch.op("SET_ROWS", x, x, view, parent=cache)
    sketch.op("ADD", first, view)
    graph = prune(order_memory(sketch.graph()))
    relu, again = (graph.nodes[source] for source in graph.nodes[-1].sources if source is not None)
    assert graph.nodes[relu.sources[0] or 0].op == "RESHAPE"
    assert again.op == "VIEW" and graph.nodes[again.sources[0] or 0].op == "WRITE"


def test_a_write_that_nobody_reads_leaves() -> None:
    sketch = Sketch()
    cache, x = sketch.leaf("cache", "state"), sketch.leaf("x", "input")
    sketch.op("CPY", x, sketch.op("VIEW", cache, parent=cache), parent=cache)
    sketch.op("UNARY.RELU", x)
    assert ops_of(prune(order_memory(sketch.graph()))) == ["UNARY.RELU"]


def test_attention_carries_the_meaning_of_its_mask() -> None:
    sketch = Sketch()
    q, window, sinks = sketch.leaf("q", "input"), sketch.leaf("kq_mask_swa", "input"), sketch.leaf("sinks")
    sketch.op("FLASH_ATTN_EXT", q, q, q, window, sinks)
    graph = name_masks(sketch.graph())
    assert graph.nodes[-1].op == "FLASH_ATTN_EXT.kq_mask_swa" and graph.nodes[-1].sources == (q, q, q, None, sinks)
    sketch.op("FLASH_ATTN_EXT", q, q, q, sketch.op("ADD", window, q))
    assert name_masks(sketch.graph()).nodes[-1].op == "FLASH_ATTN_EXT"


def test_a_norm_takes_its_weight_and_a_product_its_bias() -> None:
    sketch = Sketch()
    x = sketch.leaf("x", "input")
    norm = sketch.op("MUL", sketch.op("RMS_NORM", x), sketch.leaf("norm.weight", shape=VECTOR))
    sketch.op("ADD", sketch.op("MUL_MAT", sketch.leaf("w"), norm), sketch.leaf("bias", shape=VECTOR))
    graph = join(sketch.graph())
    assert ops_of(graph) == ["RMS_NORM", "MUL_MAT"]
    assert [graph.nodes[source].name for source in graph.nodes[-1].sources[::2] if source is not None] == ["w", "bias"]


def test_neighbours_that_others_read_too_are_not_joined() -> None:
    sketch = Sketch()
    x, weight = sketch.leaf("x", "input"), sketch.leaf("w")
    norm = sketch.op("RMS_NORM", x)
    scaled = sketch.op("MUL", norm, sketch.leaf("norm.weight", shape=VECTOR))
    biased = sketch.op("ADD", sketch.op("MUL_MAT", weight, scaled), sketch.leaf("bias", shape=VECTOR))
    other = sketch.op("MUL_MAT", weight, norm)
    sketch.op("ADD", biased, other)
    assert ops_of(join(sketch.graph())) == ["RMS_NORM", "MUL", "MUL_MAT", "ADD", "MUL_MAT", "ADD"]


def test_a_stack_of_experts_keeps_its_own_factors_away_from_the_pair() -> None:
    sketch = Sketch()
    x, ids = sketch.leaf("x", "input"), sketch.leaf("ids", "input")
    experts, factors = sketch.leaf("experts"), sketch.leaf("experts.scale", shape=VECTOR)
    product = sketch.op("MUL_MAT_ID", experts, x, ids)
    spread = sketch.op("GET_ROWS", sketch.op("REPEAT", sketch.op("RESHAPE", factors)), ids)
    sketch.op("UNARY.RELU", sketch.pair(sketch.op("MUL", product, spread), "experts", x, "MUL_MAT_ID"))
    graph, reach = take_out_adapter(sketch.graph())
    graph = prune(graph)
    assert reach.trainable == {"experts"} and ops_of(graph) == ["MUL_MAT_ID_SCALED", "UNARY.RELU"]
    (scaled,) = (node for node in graph.nodes if node.op == "MUL_MAT_ID_SCALED")
    assert [graph.nodes[source].name for source in scaled.sources if source is not None] == [
        "experts",
        "x",
        "ids",
        "experts.scale",
    ]


def test_a_weight_that_only_chooses_is_not_trainable() -> None:
    sketch = Sketch()
    x = sketch.leaf("x", "input")
    scores = sketch.pair(sketch.op("MUL_MAT", sketch.leaf("indexer"), x), "indexer", x)
    gates = sketch.pair(sketch.op("MUL_MAT", sketch.leaf("router"), x), "router", x)
    ids = sketch.op("TOP_K", sketch.op("ADD", scores, gates))
    sketch.op("GET_ROWS", gates, ids)
    graph, reach = take_out_adapter(sketch.graph())
    assert reach.trainable == {"indexer", "router"}
    felt = without_gradient(prune(graph), reach)
    assert felt.trainable == {"router"} and "no gradient for a choice" in felt.missed["indexer"]


def sorted_and_read(*views: tuple[tuple[int, ...], int], is_descending: bool = True) -> Graph:
    """A sort of x, and views of it of shapes and offsets added up."""
    sketch = Sketch()
    order = sketch.op("ARGSORT", sketch.leaf("x", "input"), type="i32", param=int(is_descending), name="order")
    read = [
        sketch.op("VIEW", order, shape=shape, offset=offset, type="i32", parent=order, name="chosen")
        for shape, offset in views
    ]
    sketch.op("CONCAT", *(read or [order]))
    return sketch.graph()


def test_a_sort_of_which_the_first_columns_are_read_is_no_sort() -> None:
    columns = (1, 1, 8, 3)
    for views in (((columns, 0),), ((columns, 0), (columns, 0))):
        graph = prune(shorten_sorts(sorted_and_read(*views)))
        assert ops_of(graph) == ["ARGSORT.top_k", "CONCAT"]
        chosen = graph.nodes[graph.nodes[-1].sources[0] or 0]
        assert (chosen.name, chosen.shape, set(graph.nodes[-1].sources)) == ("chosen", columns, {1})


def test_a_sort_that_is_read_otherwise_stays() -> None:
    columns, rows = (1, 1, 8, 3), (1, 1, 3, 8)
    for graph in (
        sorted_and_read(),
        sorted_and_read((columns, 4)),
        sorted_and_read((rows, 0)),
        sorted_and_read((columns, 0), ((1, 1, 8, 2), 0)),
        sorted_and_read((columns, 0), is_descending=False),
    ):
        assert shorten_sorts(graph) == graph


def test_rows_of_a_table_of_ngrams_are_known_by_what_reads_them() -> None:
    sketch = Sketch()
    rows = sketch.leaf("leaf_4", "unknown_input")
    sketch.op("GET_ROWS", sketch.leaf("per_layer_token_embd.weight"), rows)
    keys = {"ngram_size": 2, "heads_per_ngram": 1, "eos_token_id": 0}
    keys |= {"layer_multipliers": [1, 3], "head_offsets": [0], "head_vocab_sizes": [9]}
    metadata = {"general.architecture": "a"} | {f"a.ple.{key}": value for key, value in keys.items()}
    graph = name_rows_of_tokens(sketch.graph(), metadata)
    assert (graph.nodes[rows].name, graph.nodes[rows].role) == ("ngram_rows", "input")
    assert graph.ngrams is not None and graph.ngrams.layer_multipliers == [1, 3]
    assert name_rows_of_tokens(sketch.graph(), {"general.architecture": "b"}) == sketch.graph()
