"""llama.cpp through the bridge: logits, intermediate tensors, generation, adapters, and calls that would make it
abort.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.errors import BridgeError, GGUFError
from pyggtrain.gguf import GGUFFile, Tokenizer, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.ops import dequantize

ADAPTER = {
    "general.type": "adapter",
    "general.architecture": "llama",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}


@pytest.fixture(scope="module")
def tokens(smollm2_path: Path) -> list[int]:
    return Tokenizer(smollm2_path).encode("The capital of France is")


@pytest.fixture(scope="module")
def session(smollm2_path: Path) -> Iterator[_bridge.Session]:
    session = _bridge.Session(str(smollm2_path), num_ctx=64, num_ubatch=64, num_threads=1)
    yield session
    session.close()


def write_pair(path: Path, name: str, a: torch.Tensor, b: torch.Tensor) -> Path:
    write_gguf(
        path, ADAPTER, [quantize_tensor(f"{name}.lora_a", a, "F32"), quantize_tensor(f"{name}.lora_b", b, "F32")]
    )
    return path


def test_logits_cover_every_position_and_repeat_exactly(session: _bridge.Session, tokens: list[int]) -> None:
    logits = torch.from_dlpack(session.logits(tokens))
    assert logits.shape == (len(tokens), session.num_tokens)
    assert torch.equal(logits, torch.from_dlpack(session.logits(tokens)))
    # Causal: a prefix has the same logits up to llama.cpp's rounding of activations in batches of another size.
    prefix = torch.from_dlpack(session.logits(tokens[:3]))
    assert torch.equal(prefix.argmax(-1), logits[:3].argmax(-1))


def test_generation_is_greedy(session: _bridge.Session, smollm2_path: Path, tokens: list[int]) -> None:
    assert Tokenizer(smollm2_path).decode(session.generate(tokens, 2)) == " Paris."
    assert session.generate(tokens, 0) == []


def test_generation_ends_when_the_context_is_full(session: _bridge.Session, tokens: list[int]) -> None:
    generated = session.generate(tokens, 10_000)
    assert len(tokens) + len(generated) <= session.num_ctx + 1


def test_eval_tensors_returns_every_node_of_a_name_in_torch_order(session: _bridge.Session, tokens: list[int]) -> None:
    captured = session.eval_tensors(tokens, ["Qcur-0", "l_out-29"])
    assert [(name, op) for name, op, _ in captured] == [
        ("Qcur-0", "MUL_MAT"),
        ("Qcur-0", "RESHAPE"),
        ("Qcur-0", "ROPE"),
        ("l_out-29", "ADD"),
    ]
    assert torch.from_dlpack(captured[1][2]).shape == (len(tokens), 9, 64)
    assert torch.from_dlpack(captured[3][2]).shape == (len(tokens), 576)


def test_adapter_changes_logits_and_scale_0_restores_them_bit_for_bit(
    session: _bridge.Session, tokens: list[int], tmp_path: Path
) -> None:
    base = torch.from_dlpack(session.logits(tokens))
    path = write_pair(tmp_path / "a.gguf", "blk.3.attn_q.weight", torch.randn(4, 576), torch.randn(576, 4))
    adapter = session.load_adapter(str(path))
    assert session.adapter_num_pairs(adapter) == 1
    session.set_adapters([(adapter, 1.0)])
    assert (torch.from_dlpack(session.logits(tokens)) - base).abs().max() > 0.1
    session.set_adapters([(adapter, 0.0)])
    assert torch.equal(torch.from_dlpack(session.logits(tokens)), base)
    session.set_adapters([])
    assert torch.equal(torch.from_dlpack(session.logits(tokens)), base)


def test_what_llama_cpp_would_abort_on_or_ignore_is_an_exception(
    session: _bridge.Session, smollm2_path: Path, tokens: list[int], tmp_path: Path
) -> None:
    tied = write_pair(tmp_path / "tied.gguf", "token_embd.weight", torch.randn(49152, 4), torch.randn(576, 4))
    with pytest.raises(BridgeError, match="also the output head"):
        session.load_adapter(str(tied))
    absent = write_pair(tmp_path / "absent.gguf", "output.weight", torch.randn(4, 576), torch.randn(49152, 4))
    with pytest.raises(BridgeError, match="does not exist in base model"):
        session.load_adapter(str(absent))
    stacked = write_pair(
        tmp_path / "stacked.gguf", "blk.0.attn_q.weight", torch.randn(2, 4, 576), torch.randn(2, 576, 4)
    )
    with pytest.raises(BridgeError, match="same number of experts"):
        session.load_adapter(str(stacked))
    with pytest.raises(GGUFError, match="cannot be opened"):
        session.load_adapter(str(tmp_path / "none.gguf"))
    with pytest.raises(BridgeError, match="cannot load the adapter"):
        session.load_adapter(str(smollm2_path))
    calls = {
        "tokens is empty": lambda: session.logits([]),
        "token id is 49152": lambda: session.logits([49152]),
        "token id is -1": lambda: session.generate([-1], 1),
        "tokens is 65 long|at most num_ctx": lambda: session.logits([1] * (session.num_ctx + 1)),
        "adapter is 99": lambda: session.set_adapters([(99, 1.0)]),
        "scale is nan": lambda: session.set_adapters([(0, float("nan"))]),
        "num_ctx is 0": lambda: _bridge.Session("x", num_ctx=0, num_ubatch=1, num_threads=1),
        "kv_type is Q4_0": lambda: _bridge.Session("x", num_ctx=8, num_ubatch=1, num_threads=1, kv_type="Q4_0"),  # type: ignore[arg-type]
        "cannot load the model": lambda: _bridge.Session("/dev/null", num_ctx=8, num_ubatch=1, num_threads=1),
    }
    for message, call in calls.items():
        with pytest.raises(BridgeError, match=message):
            call()
    # After all that the session still works.
    assert session.generate(tokens, 1)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "IQ4_NL", "MXFP4", "F16", "BF16"])
def test_exact_products_are_those_of_the_decoded_weights(type: str, tiny_llama_path: Path, tmp_path: Path) -> None:
    source = GGUFFile(tiny_llama_path)
    tensors = [
        quantize_tensor(tensor.name, dequantize(tensor), type) if len(tensor.shape) > 1 else tensor
        for tensor in source.tensors.values()
    ]
    paths = {"model": tmp_path / "m.gguf", "twin": tmp_path / "twin.gguf"}
    write_gguf(paths["model"], typed_metadata(source), tensors)
    twins = [quantize_tensor(tensor.name, dequantize(tensor), "F32") for tensor in tensors]
    write_gguf(paths["twin"], typed_metadata(source), twins)

    def logits(name: str, *, exact_products: bool = False) -> torch.Tensor:
        settings = {"num_ctx": 32, "num_ubatch": 32, "num_threads": 2}
        session = _bridge.Session(str(paths[name]), **settings, kv_type="F32", exact_products=exact_products)
        return torch.from_dlpack(session.logits(list(range(1, 30))))

    twin = logits("twin")
    error = float((logits("model", exact_products=True) - twin).abs().max())
    rounding = float((logits("model") - twin).abs().max())
    assert error < 1e-4 < 1e-3 < rounding


def test_a_closed_session_says_so(smollm2_path: Path) -> None:
    session = _bridge.Session(str(smollm2_path), num_ctx=8, num_ubatch=8, num_threads=1)
    session.close()
    session.close()
    with pytest.raises(BridgeError, match="closed"):
        session.logits([1])


def test_no_symbol_of_ggml_or_llama_is_exported() -> None:
    import ctypes

    library = ctypes.CDLL(_bridge.__file__)
    for symbol in ("ggml_init", "llama_decode", "ggml_backend_cpu_init"):
        assert not hasattr(library, symbol)
