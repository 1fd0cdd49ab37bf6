"""The child process: its graphs, its errors, an abort inside llama.cpp, and text that is no graph."""

import copy
from pathlib import Path
from typing import Any

import pytest

from pyggtrain.errors import BridgeError
from pyggtrain.gguf import GGUFFile, typed_metadata, write_gguf
from pyggtrain.graph import capture as module
from pyggtrain.graph.capture import LENGTHS, AbortError, capture, read_captures

TENSOR = ["x", "ADD", "node", "f32", [1, 1, 2, 3], [24, 24, 12, 4], [0] * 16, [0, 0], -1, 0, ""]
LEAF = ["x", "NONE", "input", "f32", [1, 1, 2, 3], [24, 24, 12, 4], [0] * 16, [], -1, 0, ""]
GRAPHS: dict[str, Any] = {
    "window": 0,
    "window_type": "none",
    "is_causal": True,
    "is_diffusion": False,
    "uses_alibi": False,
    "attn_temperature": [8192, 0.1, 1.0],
    "captures": [{"num_tokens": 2, "num_outputs": 1, "tensors": [LEAF, TENSOR]}],
}


def test_graphs_of_all_lengths_have_equal_nodes_and_other_sizes(tiny_llama_path: Path) -> None:
    captures = capture(tiny_llama_path)
    assert [(graph.num_tokens, graph.num_outputs) for graph in captures.graphs] == list(LENGTHS)
    first, *others = captures.graphs
    for graph in others:
        assert [tensor.op for tensor in graph.tensors] == [tensor.op for tensor in first.tensors]
        assert graph.tensors[-1].shape == (1, 1, graph.num_outputs, 96)


def test_an_abort_inside_llama_cpp_is_an_exception_with_its_message(tiny_llama_path: Path, tmp_path: Path) -> None:
    file = GGUFFile.open(tiny_llama_path)
    path = tmp_path / "no-experts.gguf"
    # More experts used than there are: llama.cpp asserts where it could complain.
    write_gguf(path, typed_metadata(file) | {"llama.expert_used_count": 3}, file.tensors.values())
    with pytest.raises(BridgeError, match=r"(?s)no-experts.gguf: llama.cpp aborted .*GGML_ASSERT\(n_expert_used"):
        capture(path)


def test_a_file_that_cannot_be_read_is_an_exception_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(BridgeError, match="empty.gguf: has 4 bytes, less than a GGUF header"):
        capture(path)


def test_a_well_formed_graph_is_read() -> None:
    (graph,) = read_captures(GRAPHS).graphs
    assert (graph.tensors[1].op, graph.tensors[1].sources, graph.tensors[1].shape) == ("ADD", (0, 0), (1, 1, 2, 3))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 7),
        (2, "weights"),
        (4, [1, 2, 3]),
        (4, [1, 1, -2, 3]),
        (4, [1, 1, 2, 3.5]),
        (4, [1, 1, 2, 1 << 70]),
        (6, [0] * 15),
        (7, [1]),
        (7, [-2]),
        (8, 1),
        (9, True),
        (10, "no base64"),
    ],
)
def test_text_that_is_no_graph_is_refused(place: int, value: object) -> None:
    data = copy.deepcopy(GRAPHS)
    data["captures"][0]["tensors"][1][place] = value
    with pytest.raises((ValueError, TypeError)):
        read_captures(data)
    data["captures"][0]["tensors"] = []
    with pytest.raises(ValueError, match="0 tensors"):
        read_captures(data)


def test_a_model_that_aborts_without_a_cache_is_asked_with_one(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = module._asked

    def aborting(path: Path, *, with_cache: bool, **options: Any) -> bytes:
        if not with_cache:
            raise AbortError("llama.cpp aborted: GGML_ASSERT(a->ne[0] == b->ne[0]) failed")
        return asked(path, with_cache=with_cache, **options)

    monkeypatch.setattr(module, "_asked", aborting)
    graph = capture(tiny_llama_path).graphs[0]
    ops = {tensor.op for tensor in graph.tensors}
    assert {"SET_ROWS", "SOFT_MAX"} <= ops and "FLASH_ATTN_EXT" not in ops

    def hopeless(path: Path, *, with_cache: bool, **options: Any) -> bytes:
        raise BridgeError("no") if with_cache else AbortError("the first reason")

    monkeypatch.setattr(module, "_asked", hopeless)
    with pytest.raises(AbortError, match="the first reason"):
        capture(tiny_llama_path)
