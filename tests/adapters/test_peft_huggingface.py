"""Adapters in the model that they came from: a tiny Hugging Face model + PEFT, the same as GGUF + adapter in llama.cpp.

Needs the extra `peft` (peft and transformers); without it these tests are skipped. The GGUF files are made by the rules
of llama.cpp's converter, and its own names (the package `gguf`), not by the tables under test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.adapters import gguf_adapter
from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.adapters.peft import from_peft, to_peft
from pyggtrain.adapters.peft_files import CONFIG
from pyggtrain.cache_folder import cache_folder
from pyggtrain.gguf import GGUFFile, quantize_tensor, write_gguf

transformers = pytest.importorskip("transformers", reason="pip install 'pyggtrain[peft]'")
peft = pytest.importorskip("peft", reason="pip install 'pyggtrain[peft]'")

TOKENS = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(0)).tolist()
# 8 heads over 2: a wrong formula for the order of k's rows (heads over kv heads) would be right for 4 over 2.
D, F, H, N_KV, K, V, E, LAYERS = 64, 96, 8, 2, 8, 96, 4, 2
COMMON = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": H,
    "num_key_value_heads": N_KV,
    "num_hidden_layers": LAYERS,
    "vocab_size": V,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.15,
    "rope_theta": 10000.0,
}
MOE = {"num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": F, "norm_topk_prob": True}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"head_dim": K, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {"head_dim": K, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": K, "tie_word_embeddings": True}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"head_dim": K, "tie_word_embeddings": False, "num_local_experts": E, "num_experts_per_tok": 2},
    ),
    "qwen3moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"head_dim": K, "tie_word_embeddings": False, **MOE}),
}
ATTENTION = {"attn_q": (H * K, D), "attn_k": (N_KV * K, D), "attn_v": (N_KV * K, D), "attn_output": (D, H * K)}
DENSE = {**ATTENTION, "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
STACKS = {"ffn_gate_exps": (E, F, D), "ffn_up_exps": (E, F, D), "ffn_down_exps": (E, D, F)}
EXPERTS = {**ATTENTION, "ffn_gate_inp": (E, D), **STACKS}
SHARED = {"ffn_gate_shexp": (F, D), "ffn_up_shexp": (F, D), "ffn_down_shexp": (D, F)}
FUSED = {
    "attn_qkv": ((H + 2 * N_KV) * K, D),
    "attn_output": (D, H * K),
    "ffn_up": (2 * F, D),
    "ffn_down": (D, F),
}
ARCHITECTURES = {**{name: name for name in MODELS}, "llama-tied": "llama", "mixtral": "llama"}


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    """(Hugging Face model, the same as a GGUF file)."""
    return make_pair(request.param, tmp_path)


def make_pair(name, folder):
    model_class, config_class, settings = MODELS[name]
    torch.manual_seed(3)
    config = getattr(transformers, config_class)(**{**COMMON, **settings})
    model = getattr(transformers, model_class)._from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.1)
        elif parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 1.0 if "embed_tokens" in parameter_name else 0.15)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model, convert(model, ARCHITECTURES[name], folder / f"{name}.gguf")


def convert(model, architecture, path):
    """What llama.cpp's converter makes of a model, all F32 (conversion/llama.py, qwen.py)."""
    keys = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(keys[architecture], LAYERS)
    tensors = []

    def emit(name, values):
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        tensors.append(quantize_tensor(mapped, values, "F32"))

    for name, values in model.state_dict().items():
        values = values.detach().float()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if architecture == "llama" and "q_proj" in name:
            values = permuted(values, H)
        if architecture == "llama" and "k_proj" in name:
            values = permuted(values, N_KV)
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), values.chunk(2, dim=1), strict=True):
                emit(name.replace("gate_up_proj", f"{part}.weight"), half.contiguous())
        elif name.endswith("experts.down_proj"):
            emit(f"{name}.weight", values)
        else:
            emit(name, values)
    a = architecture
    metadata = {
        "general.architecture": a,
        f"{a}.block_count": LAYERS,
        f"{a}.context_length": 256,
        f"{a}.embedding_length": D,
        f"{a}.feed_forward_length": F,
        f"{a}.attention.head_count": H,
        f"{a}.attention.head_count_kv": N_KV,
        f"{a}.attention.key_length": K,
        f"{a}.attention.value_length": K,
        f"{a}.rope.freq_base": 10000.0,
        f"{a}.rope.dimension_count": K,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.vocab_size": V,
        "tokenizer.ggml.model": "no_vocab",
    }
    if hasattr(model.config, "num_experts_per_tok"):
        metadata |= {f"{a}.expert_count": E, f"{a}.expert_used_count": 2, f"{a}.expert_feed_forward_length": F}
    write_gguf(path, metadata, tensors)
    return GGUFFile.open(path)


def permuted(weights, num_heads):
    """LlamaModel.permute of llama.cpp's converter."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def random_adapter(base, *, ranks=None, alpha=6.0, kinds=None):
    """A pair on every weight that an adapter can change."""
    generator = torch.Generator().manual_seed(7)
    pairs = {}
    for name, info in base.tensor_infos.items():
        kind = name.removesuffix(".weight").split(".")[-1]
        if len(info.shape) < 2 or name == "token_embd.weight" or (kinds and kind not in kinds):
            continue
        *experts, num_out, num_in = info.shape
        rank = (ranks or {}).get(kind, 4)
        lora_a = torch.randn(*experts, rank, num_in, generator=generator) / num_in**0.5
        pairs[name] = (lora_a, torch.randn(*experts, num_out, rank, generator=generator) * 0.1)
    if "output.weight" in base.tensor_infos and not kinds:
        rows = torch.randn(V, 3, generator=generator) * 0.1
        pairs["token_embd.weight"] = (rows, torch.randn(D, 3, generator=generator))
    return AdapterFile(Path("made.gguf"), base.architecture, alpha, pairs, {"version": "9"})


def in_llama_cpp(base, adapter, folder):
    session = _bridge.Session(str(base.path), num_ctx=64, num_ubatch=64, num_threads=1, kv_type="F32")
    without = torch.from_dlpack(session.logits(TOKENS)).clone()
    path = folder / "served.gguf"
    gguf_adapter.write(path, adapter, overwrite=True)
    handle = session.load_adapter(str(path))
    assert session.adapter_num_pairs(handle) == len(adapter.pairs)
    session.set_adapters([(handle, 1.0)])
    return without, torch.from_dlpack(session.logits(TOKENS)).clone()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def assert_close(ours, theirs):
    rms = float(theirs.square().mean().sqrt())
    assert float((ours - theirs).abs().max()) < 1e-3 * rms


def test_exported_adapter_computes_the_same_in_peft_as_in_llama_cpp(pair, tmp_path):
    model, base = pair
    adapter = random_adapter(base, ranks={"attn_v": 3, "output": 2})
    without, served = in_llama_cpp(base, adapter, tmp_path)
    assert_close(logits(model), without)
    to_peft(adapter, base, tmp_path / "peft")
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
    adapted = logits(loaded)
    rms = float(without.square().mean().sqrt())
    assert float((served - without).abs().max()) > 0.1 * rms, "the adapter changes nothing"
    assert_close(adapted, served)


def test_adapter_trained_in_peft_computes_the_same_in_llama_cpp(pair, tmp_path):
    model, base = pair
    is_moe = "blk.0.ffn_down_exps.weight" in base.tensor_infos
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            *([] if is_moe else ["gate_proj", "up_proj", "down_proj"]),
        ],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"] if is_moe else None,
        rank_pattern={"k_proj": 3},
        alpha_pattern={"layers.1.self_attn.q_proj": 11},
        use_rslora=True,
    )
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    wrapped.save_pretrained(tmp_path / "trained")
    adapter = from_peft(tmp_path / "trained", base)
    without, served = in_llama_cpp(base, adapter, tmp_path)
    assert float((served - without).abs().max()) > 0.1 * float(without.square().mean().sqrt())
    assert_close(logits(wrapped), served)


def test_adapter_survives_being_saved_again_by_peft(pair, tmp_path):
    model, base = pair
    adapter = random_adapter(base, ranks={"attn_v": 3})
    to_peft(adapter, base, tmp_path / "out")
    peft.PeftModel.from_pretrained(model, tmp_path / "out").save_pretrained(tmp_path / "again")
    back = from_peft(tmp_path / "again", base)
    _, wanted = in_llama_cpp(base, adapter, tmp_path)
    _, got = in_llama_cpp(base, back, tmp_path)
    assert_close(got, wanted)
    for name, halves in adapter.pairs.items():
        assert all(torch.equal(*both) for both in zip(halves, back.pairs[name], strict=True)), name


def test_targets_are_named_shortly_and_hit_nothing_else(pair, tmp_path):
    model, base = pair
    adapter = random_adapter(base, kinds=("attn_q", "attn_output"))
    to_peft(adapter, base, tmp_path / "peft", base_model="someone/tiny")
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert config["target_modules"] == ["q_proj", "o_proj"] and config["base_model_name_or_path"] == "someone/tiny"
    del adapter.pairs["blk.1.attn_q.weight"]
    to_peft(adapter, base, tmp_path / "partly")
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "partly")
    adapted = {name for name, module in loaded.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    assert len(adapted) == 3 and not any(name.endswith("layers.1.self_attn.q_proj") for name in adapted)


CONFIGS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DENSE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", DENSE),
    "granite": ("GraniteConfig", "GraniteForCausalLM", DENSE),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DENSE),
    "qwen2moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**EXPERTS, **SHARED}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DENSE),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", DENSE),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", DENSE),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", DENSE),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", DENSE),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", DENSE),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", FUSED),
}


# Before the tests' own cache folder takes its place.
BUILD_CACHE = cache_folder()


@pytest.fixture(scope="session")
def converter():
    """llama.cpp's own convert_lora_to_gguf.py, in the source that the bridge was built from."""
    own = os.environ.get("PYGGTRAIN_LLAMA_CPP_DIR")
    found = [Path(own)] if own else sorted(BUILD_CACHE.glob("llama.cpp-*/source/vendor/llama.cpp"))
    scripts = [folder / "convert_lora_to_gguf.py" for folder in found]
    if not scripts or not scripts[-1].exists():
        pytest.skip("no llama.cpp source: build pyggtrain here, or set PYGGTRAIN_LLAMA_CPP_DIR")
    return scripts[-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_converts_the_exported_folder_back_to_the_same_numbers(name, converter, tmp_path):
    config_class, model_class, kinds = CONFIGS[name]
    architecture = "llama" if name == "mixtral" else name
    base = tmp_path / "base.gguf"
    tensors = [
        quantize_tensor(f"blk.{layer}.{kind}.weight", torch.zeros(shape), "F32")
        for layer in range(LAYERS)
        for kind, shape in kinds.items()
    ]
    heads = {f"{architecture}.attention.head_count": H, f"{architecture}.attention.head_count_kv": N_KV}
    write_gguf(base, {"general.architecture": architecture, **heads}, tensors)
    adapter = random_adapter(GGUFFile.open(base))
    to_peft(adapter, GGUFFile.open(base), tmp_path / "peft")
    settings = {**COMMON, "head_dim": K, **MOE, "num_local_experts": E, "shared_expert_intermediate_size": F}
    config = getattr(transformers, config_class)(**settings, original_max_position_embeddings=4096).to_dict()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "architectures": [model_class]}, default=str))
    made = tmp_path / "theirs.gguf"
    done = subprocess.run(
        [sys.executable, converter, "--base", tmp_path / "hf", "--outfile", made, tmp_path / "peft"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    theirs = gguf_adapter.load(made)
    assert theirs.alpha == adapter.alpha and theirs.pairs.keys() == adapter.pairs.keys()
    for tensor, halves in adapter.pairs.items():
        assert all(torch.equal(*both) for both in zip(halves, theirs.pairs[tensor], strict=True)), tensor
