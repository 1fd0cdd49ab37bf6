from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyggtrain.errors import AdapterError
from pyggtrain.validation.runtime import BridgeRuntime, RuntimeSettings

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32]


def opened(path: Path, **changes: Any) -> BridgeRuntime:
    return BridgeRuntime(path, RuntimeSettings(**{"num_ctx": 32, "num_ubatch": 32, **changes}))


def test_positions_select_rows(tiny_llama_path: Path) -> None:
    runtime = opened(tiny_llama_path)
    all_rows = runtime.logits(TOKENS)
    assert all_rows.shape == (len(TOKENS), 96)
    assert all_rows.dtype == torch.float32
    assert torch.equal(runtime.logits(TOKENS, positions=[7, 2]), all_rows[[7, 2]])


@pytest.mark.parametrize("num_ubatch", [1, 4, 32])
def test_tensors_are_whole_whatever_the_ubatch(tiny_llama_path: Path, num_ubatch: int) -> None:
    runtime = opened(tiny_llama_path, num_ubatch=num_ubatch)
    reference = opened(tiny_llama_path).tensors(TOKENS, ["l_out-0", "Qcur-1", "result_output", "no_such_tensor"])
    found = runtime.tensors(TOKENS, ["l_out-0", "Qcur-1", "result_output", "no_such_tensor"])
    shapes = {"l_out-0": (9, 64), "Qcur-1": (9, 4, 16), "result_output": (9, 96)}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-4, atol=1e-4)
    assert torch.equal(found["result_output"], runtime.logits(TOKENS))


def test_scale_switches_the_adapter_on_and_off(tiny_llama_path: Path, make_trained: Callable[..., Any]) -> None:
    trained = make_trained(tiny_llama_path)
    runtime = opened(tiny_llama_path)
    base = runtime.logits(TOKENS)
    assert runtime.load_adapter(trained.adapter) == 14
    assert torch.equal(runtime.logits(TOKENS), base)
    adapted = runtime.logits(TOKENS, scale=1.0)
    assert not torch.allclose(adapted, base, atol=0.1)
    assert torch.equal(runtime.logits(TOKENS, scale=0.0), base)
    assert torch.equal(runtime.logits(TOKENS, scale=1.0), adapted)
    assert not torch.equal(
        runtime.tensors(TOKENS, ["l_out-0"], scale=1.0)["l_out-0"], runtime.tensors(TOKENS, ["l_out-0"])["l_out-0"]
    )


def test_a_scale_without_an_adapter_and_a_second_adapter_are_refused(
    tiny_llama_path: Path, make_trained: Callable[..., Any]
) -> None:
    runtime = opened(tiny_llama_path)
    with pytest.raises(AdapterError, match="no adapter is loaded"):
        runtime.logits(TOKENS, scale=1.0)
    trained = make_trained(tiny_llama_path)
    runtime.load_adapter(trained.adapter)
    with pytest.raises(AdapterError, match="already holds an adapter"):
        runtime.load_adapter(trained.adapter)


def test_the_name_tells_how_it_computes(tiny_llama_path: Path) -> None:
    name = opened(tiny_llama_path, kv_type="F16", flash_attention=True, num_ubatch=8).name
    assert "F16 KV, ubatch 8, flash attention" in name
