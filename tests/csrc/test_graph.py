"""llama.cpp's compute graph as plain data: what leaves mean, torch order, where LoRA reaches, bad arguments."""

from pathlib import Path

import pytest

from pyggtrain import _bridge
from pyggtrain.errors import BridgeError


@pytest.fixture(scope="module")
def source(tiny_llama_path: Path) -> _bridge.GraphSource:
    return _bridge.GraphSource(str(tiny_llama_path), with_lora=True)


@pytest.fixture(scope="module")
def tensors(source: _bridge.GraphSource) -> list[_bridge.GraphTensor]:
    return source.capture(num_tokens=512, num_outputs=32, num_ctx=256)


def test_every_tensor_comes_after_those_it_reads(tensors: list[_bridge.GraphTensor]) -> None:
    for index, tensor in enumerate(tensors):
        assert all(-1 <= source < index for source in (*tensor.sources, tensor.view_parent))


def test_leaves_say_what_they_are(tensors: list[_bridge.GraphTensor]) -> None:
    by_role: dict[str, set[str]] = {}
    for tensor in tensors:
        assert (tensor.role == "node") == (tensor.op != "NONE" or tensor.view_parent >= 0)
        by_role.setdefault(tensor.role, set()).add(tensor.name)
    assert by_role["input"] == {"tokens", "positions", "kq_mask", "out_ids"}
    assert {"token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"} <= by_role["weight"]
    # The training graph has no cache.
    assert "state" not in by_role and "unknown_input" not in by_role


def test_adapter_reaches_the_seven_linears_of_each_layer_and_not_the_tied_head(
    tensors: list[_bridge.GraphTensor],
) -> None:
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    expected = {f"blk.{layer}.{name}.weight" for layer in range(2) for name in names}
    for role in ("lora_a", "lora_b"):
        assert {tensor.name for tensor in tensors if tensor.role == role} == expected


def test_shapes_strides_and_dimensions_in_parameters_are_in_torch_order(tensors: list[_bridge.GraphTensor]) -> None:
    embedding = next(tensor for tensor in tensors if tensor.op == "GET_ROWS")
    assert embedding.shape == [1, 1, 512, 64]
    assert embedding.strides[2:] == [64 * 4, 4]
    permuted = next(tensor for tensor in tensors if tensor.op == "PERMUTE")
    before = tensors[permuted.sources[0]]
    assert permuted.shape == [before.shape[dim] for dim in permuted.params[:4]]
    assert permuted.shape != before.shape
    assert tensors[-1].shape == [1, 1, 32, 96]


def test_attention_is_one_node_with_its_mask(tensors: list[_bridge.GraphTensor]) -> None:
    attention = [tensor for tensor in tensors if tensor.op == "FLASH_ATTN_EXT"]
    assert [tensors[node.sources[3]].name for node in attention] == ["kq_mask", "kq_mask"]


def test_without_lora_the_graph_holds_no_pair(tiny_llama_path: Path) -> None:
    source = _bridge.GraphSource(str(tiny_llama_path), with_lora=False)
    roles = {tensor.role for tensor in source.capture(num_tokens=256, num_outputs=1, num_ctx=256)}
    assert roles == {"node", "weight", "input"}


def test_the_file_says_how_masks_are_made(source: _bridge.GraphSource) -> None:
    assert source.attn_temperature[1] == 0.0
    assert (source.window_type, source.is_causal, source.uses_alibi, source.context_length) == (
        "none",
        True,
        False,
        256,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0, "num_outputs": 1, "num_ctx": 256}, "num_tokens is 0"),
        ({"num_tokens": 300, "num_outputs": 1, "num_ctx": 256}, "num_tokens is 300"),
        ({"num_tokens": 256, "num_outputs": 0, "num_ctx": 256}, "num_outputs is 0"),
        ({"num_tokens": 256, "num_outputs": 257, "num_ctx": 256}, "num_outputs is 257"),
        ({"num_tokens": 256, "num_outputs": 1, "num_ctx": 0}, "num_ctx is 0"),
    ],
)
def test_bad_sizes_are_exceptions(source: _bridge.GraphSource, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        source.capture(**arguments)


def test_a_file_that_is_no_model_is_an_exception() -> None:
    with pytest.raises(BridgeError, match="cannot load the model"):
        _bridge.GraphSource("/dev/null", with_lora=True)
