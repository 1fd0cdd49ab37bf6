"""`.scale` tensors beside weights, as NVFP4 and BitNet files have them: base and adapter as llama.cpp computes them.

llama.cpp multiplies attention's products by the scale before it adds the pair, and a feed-forward's after it; on an
NVFP4 feed-forward weight with a scale it aborts when there is a pair (llama-graph.cpp).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge, adapters, models
from pyggtrain.adapters import LoraConfig
from pyggtrain.errors import AdapterError, BridgeError, UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.model_info import info
from pyggtrain.nn import Batch

TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0)).tolist()
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


def scales(*kinds: str) -> dict[str, torch.Tensor]:
    return {
        f"blk.{layer}.{kind}.scale": torch.tensor([0.5 + 0.3 * layer + 0.1 * number])
        for layer in range(2)
        for number, kind in enumerate(kinds)
    }


def compare(file: GGUFFile, folder: Path, bound: float) -> models.Model:
    """Logits and what an adapter does to them, against llama.cpp, as rms over the rms of logits or effect."""
    model = models.load(file, compute="ggml")
    adapter = adapters.attach(model, LoraConfig(r=4, lora_alpha=8.0), seed=0)
    session = _bridge.Session(str(file.path), num_ctx=64, num_ubatch=64, num_threads=1, kv_type="F32")
    batch = Batch.from_documents([(TOKENS, TOKENS)])
    base, served_base = model.logits(batch).detach(), torch.from_dlpack(session.logits(TOKENS)).clone()
    assert (base - served_base).norm() < bound * served_base.norm()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for pair in adapter.pairs.values():
            pair.lora_b.normal_(0, 0.2, generator=generator)
        effect = model.logits(batch) - base
    adapters.save(folder / "adapter.gguf", adapter, file)
    session.set_adapters([(session.load_adapter(str(folder / "adapter.gguf")), 1.0)])
    served_effect = torch.from_dlpack(session.logits(TOKENS)) - served_base
    assert (effect - served_effect).norm() < bound * served_effect.norm()
    return model


def test_scales_of_any_type_are_llama_cpps(make_llama: Callable[..., GGUFFile], tmp_path: Path) -> None:
    file = make_llama(is_tied=False, tensors=scales(*ATTENTION, *FEED_FORWARD))
    with pytest.raises(UnsupportedError, match="tensors that scale a weight's product are not implemented"):
        models.load(file, implementation="native")
    model = compare(file, tmp_path, bound=1e-4)
    assert len(model.linears) == 15


def test_nvfp4_attention_is_trained_and_its_feed_forward_is_left_alone(
    make_llama: Callable[..., GGUFFile], tmp_path: Path
) -> None:
    types = dict.fromkeys((*ATTENTION, *FEED_FORWARD), "NVFP4")
    file = make_llama(num_ff=128, types=types, tensors=scales(*ATTENTION, *FEED_FORWARD))
    # Activations are rounded to 8 bits, on other sums here and there.
    model = compare(file, tmp_path, bound=0.1)
    assert {name.split(".")[2] for name in model.linears} == set(ATTENTION)
    reason = "is an NVFP4 weight with a scale of its own, and llama.cpp aborts when an adapter changes it"
    assert model.untrainable["blk.0.ffn_up.weight"] == reason
    assert {tensor.kind for tensor in info(file.path).tensors if tensor.why_no_lora == reason} == set(FEED_FORWARD)


def test_a_pair_that_llama_cpp_would_abort_on_is_refused(make_llama: Callable[..., GGUFFile], tmp_path: Path) -> None:
    types = dict.fromkeys((*ATTENTION, *FEED_FORWARD), "NVFP4")
    plain = make_llama(num_ff=128, types=types)
    adapter = adapters.attach(models.load(plain), LoraConfig(r=4, target_modules="blk.0.ffn_up"), seed=0)
    adapters.save(tmp_path / "adapter.gguf", adapter, plain)
    scaled = make_llama(num_ff=128, types=types, tensors=scales(*FEED_FORWARD))
    with pytest.raises(AdapterError, match="blk.0.ffn_up.weight is NVFP4 with a scale of its own"):
        adapters.check_against_base(adapters.load(tmp_path / "adapter.gguf"), scaled, ignore_hash=True)
    session = _bridge.Session(str(scaled.path), num_ctx=64, num_ubatch=64, num_threads=1)
    with pytest.raises(BridgeError, match="blk.0.ffn_up.weight is NVFP4 with a scale of its own"):
        session.load_adapter(str(tmp_path / "adapter.gguf"))
    session.close()


def test_nvfp4_without_scales_is_trained_whole(make_llama: Callable[..., GGUFFile], tmp_path: Path) -> None:
    types = dict.fromkeys((*ATTENTION, *FEED_FORWARD), "NVFP4")
    model = compare(make_llama(num_ff=128, types=types), tmp_path, bound=0.1)
    assert len(model.linears) == 14
