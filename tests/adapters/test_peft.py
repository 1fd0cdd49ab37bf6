"""adapters.peft: folders that PEFT reads, the way back, and what a GGUF adapter cannot hold."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pyggtrain.adapters import gguf_adapter
from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.adapters.peft import from_peft, to_peft
from pyggtrain.adapters.peft_files import CONFIG, WEIGHTS
from pyggtrain.adapters.peft_names import LAYOUTS, halved, interleaved, module_name
from pyggtrain.errors import AdapterError, UnsupportedError
from pyggtrain.gguf import GGUFFile, TypedValue, quantize_tensor, write_gguf

D, F, HEADS, KV, K, E, V = 32, 48, 8, 2, 4, 3, 40
SHAPES = {
    "attn_q": (HEADS * K, D),
    "attn_k": (KV * K, D),
    "attn_v": (KV * K, D),
    "attn_output": (D, HEADS * K),
    "attn_qkv": ((HEADS + 2 * KV) * K, D),
    "ffn_gate": (F, D),
    "ffn_up": (F, D),
    "ffn_down": (D, F),
    "ffn_gate_inp": (E, D),
    "ffn_gate_exps": (E, F, D),
    "ffn_up_exps": (E, F, D),
    "ffn_down_exps": (E, D, F),
    "ffn_gate_shexp": (F, D),
    "ffn_up_shexp": (F, D),
    "ffn_down_shexp": (D, F),
    "ffn_gate_inp_shexp": (D,),
}


def base_of(architecture, folder, *, is_tied=False, kinds=None):
    """A file with every weight that the architecture's layout knows."""
    names = {"token_embd.weight": (V, D)} | ({} if is_tied else {"output.weight": (V, D)})
    for layer in range(2):
        names |= {f"blk.{layer}.{kind}.weight": SHAPES[kind] for kind in kinds or LAYOUTS[architecture].modules}
    path = folder / f"{architecture}.gguf"
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": [KV, KV],
    }
    write_gguf(path, metadata, [quantize_tensor(name, torch.zeros(shape), "F32") for name, shape in names.items()])
    return GGUFFile.open(path)


def adapter_of(base, *, alpha=6.0, ranks=None, **fields):
    generator = torch.Generator().manual_seed(7)
    pairs = {}
    for name, info in base.tensor_infos.items():
        rank = (ranks or {}).get(name, 4)
        if name == "token_embd.weight":
            if "output.weight" in base.tensor_infos:
                shapes = (V, rank), (D, rank)
            else:
                continue
        elif len(info.shape) == 1:
            continue
        else:
            *experts, num_out, num_in = info.shape
            shapes = (*experts, rank, num_in), (*experts, num_out, rank)
        pairs[name] = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    return AdapterFile(Path("made.gguf"), base.architecture, alpha, pairs, {"version": "9"}, **fields)


def assert_equal(first, second):
    assert (first.alpha, first.architecture, list(first.pairs)) == (
        second.alpha,
        second.architecture,
        list(second.pairs),
    )
    assert first.provenance == second.provenance and first.other_metadata == second.other_metadata
    for name, halves in first.pairs.items():
        for ours, theirs in zip(halves, second.pairs[name], strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_names_are_those_that_llama_cpp_converts_from(architecture):
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    to_gguf = gguf.get_tensor_name_map(known[architecture], 2)
    for kind in LAYOUTS[architecture].modules:
        module = module_name(architecture, f"blk.1.{kind}.weight", prefix="model")
        # llama.cpp stacks experts under the name without a number.
        module = module.replace(".{}", "")
        if "block_sparse_moe.experts" in module:
            module = module.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        assert to_gguf.get_name(module) == f"blk.1.{kind}", module
    assert to_gguf.get_name(module_name(architecture, "token_embd.weight", prefix="model")) == "token_embd"
    # Gemma has no head of its own.
    head = to_gguf.get_name(module_name(architecture, "output.weight", prefix="model"))
    assert head == (None if architecture in ("gemma", "gemma2") else "output")


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_round_trip_gives_the_same_file(architecture, tmp_path):
    base = base_of(architecture, tmp_path)
    names = list(base.tensor_infos)
    adapter = adapter_of(
        base,
        ranks={names[2]: 3, names[-1]: 5},
        other_metadata={
            "adapter.lora.task_name": TypedValue("str", "täsk"),
            "adapter.alora.invocation_tokens": TypedValue("arr[u32]", [1, 2]),
        },
    )
    before, after = tmp_path / "before.gguf", tmp_path / "after.gguf"
    gguf_adapter.write(before, adapter)
    to_peft(gguf_adapter.load(before), base, tmp_path / "peft")
    gguf_adapter.write(after, from_peft(tmp_path / "peft", base))
    assert after.read_bytes() == before.read_bytes()


@pytest.mark.parametrize("ranks", [{}, {"blk.0.attn_q.weight": 2}])
def test_adapter_without_alpha_comes_back_without_it(tmp_path, ranks):
    base = base_of("llama", tmp_path)
    adapter = adapter_of(base, alpha=0.0, ranks=ranks)
    to_peft(adapter, base, tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    # PEFT multiplies by lora_alpha / r, which must be 1 for every pair.
    assert config["lora_alpha"] == config["r"] and config["alpha_pattern"] == config["rank_pattern"]
    assert_equal(from_peft(tmp_path / "peft", base), adapter)


def test_rows_of_q_and_k_are_reordered_and_no_others(tmp_path):
    base = base_of("llama", tmp_path)
    adapter = adapter_of(base)
    to_peft(adapter, base, tmp_path / "peft")
    stored = load_file(tmp_path / "peft" / WEIGHTS)
    prefix = "base_model.model.model.layers.0.self_attn."
    for kind, num_heads in (("q", HEADS), ("k", KV)):
        rows = adapter.pairs[f"blk.0.attn_{kind}.weight"][1]
        # llama.cpp's converter: row 2 i of a head is row i of the first half, row 2 i + 1 row i of the second.
        by_hand = torch.cat([torch.cat([head[0::2], head[1::2]]) for head in rows.split(K)])
        assert torch.equal(stored[f"{prefix}{kind}_proj.lora_B.weight"], by_hand)
        assert torch.equal(interleaved(halved(rows, num_heads), num_heads), rows)
    assert torch.equal(stored[f"{prefix}q_proj.lora_A.weight"], adapter.pairs["blk.0.attn_q.weight"][0])
    assert torch.equal(stored[f"{prefix}v_proj.lora_B.weight"], adapter.pairs["blk.0.attn_v.weight"][1])


def test_gguf_knowledge_is_where_peft_does_not_look(tmp_path):
    base = base_of("qwen3", tmp_path)
    to_peft(adapter_of(base), base, tmp_path / "peft")
    with safe_open(tmp_path / "peft" / WEIGHTS, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert all(name.startswith("base_model.model.") and ".lora_" in name for name in file.keys())  # noqa: SIM118


def test_layers_inside_a_model_that_also_sees_have_another_prefix_and_whole_names(tmp_path):
    base = base_of("gemma3", tmp_path)
    adapter = adapter_of(base)
    to_peft(adapter, base, tmp_path / "peft", prefix="model.language_model")
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert (
        "model.language_model.layers.1.mlp.up_proj" in config["target_modules"]
        and "q_proj" not in config["target_modules"]
    )
    assert_equal(from_peft(tmp_path / "peft", base), adapter)


def test_what_has_no_name_in_hugging_face_is_refused_with_the_list(tmp_path):
    base = base_of("qwen3", tmp_path, kinds=("attn_q", "ffn_gate_shexp"))
    with pytest.raises(UnsupportedError, match="2 tensors.*blk.0.ffn_gate_shexp.weight, blk.1.ffn_gate_shexp.*attn_q"):
        to_peft(adapter_of(base), base, tmp_path / "peft")
    strange = base_of("llama", tmp_path, kinds=("attn_q",))
    write_gguf(tmp_path / "mamba.gguf", {"general.architecture": "mamba"}, strange.tensors.values())
    mamba = GGUFFile.open(tmp_path / "mamba.gguf")
    with pytest.raises(UnsupportedError, match="'mamba'.*llama, smollm3"):
        to_peft(adapter_of(mamba), mamba, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


def test_folder_in_use_is_refused(tmp_path):
    base = base_of("qwen3", tmp_path)
    (tmp_path / "peft").mkdir()
    to_peft(adapter_of(base), base, tmp_path / "peft")
    with pytest.raises(AdapterError, match="exists already"):
        to_peft(adapter_of(base), base, tmp_path / "peft")
    to_peft(adapter_of(base, alpha=3.0), base, tmp_path / "peft", overwrite=True)
    assert from_peft(tmp_path / "peft", base).alpha == 3.0
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [CONFIG, WEIGHTS]


# ----- what others write


@pytest.fixture
def made(tmp_path):
    """made(config={...}, tensors={...}): a PEFT folder by hand for a qwen3, and its base."""
    base = base_of("qwen3", tmp_path)

    def make(*, tensors=None, **config):
        folder = tmp_path / "by-hand"
        folder.mkdir(exist_ok=True)
        settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **config}
        (folder / CONFIG).write_text(json.dumps(settings))
        generator = torch.Generator().manual_seed(1)
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        pair = {
            f"{module}.lora_A.weight": torch.randn(4, D, generator=generator),
            f"{module}.lora_B.weight": torch.randn(HEADS * K, 4, generator=generator),
        }
        save_file(pair | (tensors or {}), folder / WEIGHTS)
        return folder, base

    return make


def update(adapter, name):
    lora_a, lora_b = adapter.pairs[name]
    return adapter.scale(name) * (lora_b.double() @ lora_a.double())


@pytest.mark.parametrize(
    ("config", "factor", "alpha"),
    [
        ({}, 6 / 4, 6.0),
        ({"use_rslora": True}, 6 / 2, 12.0),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / 4, 10.0),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 10, "q_proj": 3}}, 10 / 4, 10.0),
        ({"alpha_pattern": {"k_proj": 10}}, 6 / 4, 6.0),
        ({"alpha_pattern": {r".*\.layers\.[01]\..*q_proj": 10}}, 10 / 4, 10.0),
    ],
)
def test_factor_is_peft_s(made, config, factor, alpha):
    folder, base = made(**config)
    adapter = from_peft(folder, base)
    stored = load_file(folder / WEIGHTS)
    lora_a, lora_b = (stored[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight"] for half in "AB")
    assert torch.allclose(
        update(adapter, "blk.0.attn_q.weight"), factor * (lora_b.double() @ lora_a.double()), rtol=1e-6
    )
    # One alpha can say all of these, so lora_b stays as it is.
    assert adapter.alpha == alpha
    assert torch.equal(adapter.pairs["blk.0.attn_q.weight"][1], lora_b)


def test_factors_that_one_alpha_cannot_say_go_into_lora_b(made, caplog):
    value = "base_model.model.model.layers.0.self_attn.v_proj"
    more = {f"{value}.lora_A.weight": torch.ones(4, D), f"{value}.lora_B.weight": torch.ones(KV * K, 4)}
    folder, base = made(tensors=more, alpha_pattern={"v_proj": 7})
    with caplog.at_level("INFO", "pyggtrain"):
        adapter = from_peft(folder, base)
    assert "rounded once" in caplog.text
    assert adapter.alpha == 6.0
    assert torch.allclose(update(adapter, "blk.0.attn_v.weight"), torch.tensor(7 / 4 * 4.0, dtype=torch.float64))


def test_half_precision_is_widened_without_loss(made):
    module = "base_model.model.model.layers.1.self_attn.o_proj"
    pair = {
        f"{module}.lora_A.weight": torch.randn(4, HEADS * K).bfloat16(),
        f"{module}.lora_B.weight": torch.randn(D, 4).half(),
    }
    folder, base = made(tensors=pair)
    lora_a, lora_b = from_peft(folder, base).pairs["blk.1.attn_output.weight"]
    assert torch.equal(lora_a, pair[f"{module}.lora_A.weight"].float())
    assert torch.equal(lora_b, pair[f"{module}.lora_B.weight"].float())


def test_everything_that_a_gguf_adapter_cannot_hold_is_listed(made):
    strangers = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(4),
        "base_model.model.model.embed_tokens.base_layer.weight": torch.ones(V + 1, D),
        "base_model.model.model.vision_tower.layers.0.fc1.lora_A.weight": torch.ones(4, D),
        "base_model.model.model.vision_tower.layers.0.fc1.lora_B.weight": torch.ones(D, 4),
    }
    folder, base = made(tensors=strangers, use_dora=True, init_lora_weights="pissa", modules_to_save=["lm_head"])
    with pytest.raises(UnsupportedError) as refusal:
        from_peft(folder, base)
    for part in ("use_dora = True", "'pissa'", "['lm_head']", "magnitude_vector", "embed_tokens.base_layer", "fc1"):
        assert part in str(refusal.value)


def test_copy_of_the_base_embedding_is_left_out(made, caplog):
    folder, base = made(tensors={"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(V, D)})
    with caplog.at_level("INFO", "pyggtrain"):
        assert list(from_peft(folder, base).pairs) == ["blk.0.attn_q.weight"]
    assert "copy of the base model's weight" in caplog.text


def test_head_of_a_tied_model_is_refused(tmp_path, made):
    base_module = "base_model.model.lm_head"
    folder, _ = made(
        tensors={f"{base_module}.lora_A.weight": torch.ones(4, D), f"{base_module}.lora_B.weight": torch.ones(V, 4)}
    )
    tied = base_of("qwen3", tmp_path, is_tied=True)
    with pytest.raises(AdapterError, match="tied"):
        from_peft(folder, tied)


def test_pair_that_does_not_fit_the_base_is_refused(made):
    module = "base_model.model.model.layers.0.self_attn.k_proj"
    folder, base = made(
        tensors={f"{module}.lora_A.weight": torch.ones(4, D), f"{module}.lora_B.weight": torch.ones(9, 4)}
    )
    with pytest.raises(AdapterError, match=r"blk.0.attn_k.weight.*\[9, 4\].*does not fit"):
        from_peft(folder, base)


def test_unreadable_folders_say_what_is_wrong(made, tmp_path):
    folder, base = made()
    with pytest.raises(AdapterError, match="cannot be read as a PEFT configuration"):
        from_peft(tmp_path / "nowhere", base)
    (folder / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(AdapterError, match="cannot be read as safetensors"):
        from_peft(folder, base)
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="is a pickle"):
        from_peft(folder, base)
    made(peft_type="LOHA")
    with pytest.raises(AdapterError, match="peft_type is 'LOHA'"):
        from_peft(folder, base)
    folder, base = made(tensors={"base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": torch.ones(4, D)})
    with pytest.raises(AdapterError, match="lora_A alone"):
        from_peft(folder, base)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lora_alpha": "16"}, r"'lora_alpha' has alpha '16'; needed: a finite number"),
        ({"lora_alpha": None}, "has alpha None"),
        ({"lora_alpha": True}, "has alpha True"),
        ({"lora_alpha": float("inf")}, "has alpha inf"),
        ({"lora_alpha": 10**400}, "has alpha 1000"),
        ({"alpha_pattern": [["q_proj", 1]]}, "alpha_pattern is .* needed: an object"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "'q_proj' has alpha nan"),
        ({"alpha_pattern": {"(": 1}}, "is no regular expression"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "could take for ever"),
        ({"alpha_pattern": {r"(a|\)])*$": 1}}, "could take for ever"),
        ({"alpha_pattern": {".*.*.*x": 1}}, "could take for ever"),
    ],
)
def test_hostile_configuration_is_refused(made, config, said):
    folder, base = made(**config)
    with pytest.raises(AdapterError, match=said):
        from_peft(folder, base)


def test_deep_json_is_refused(made):
    folder, base = made()
    (folder / CONFIG).write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="cannot be read as a PEFT configuration"):
        from_peft(folder, base)


@pytest.mark.parametrize("values", [torch.ones(4, D, dtype=torch.uint8), torch.ones(0, D), torch.tensor(1.0)])
def test_tensors_that_are_no_matrices_of_numbers_are_refused(made, values):
    folder, base = made(tensors={"base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": values})
    with pytest.raises(AdapterError, match=r"up_proj.* is .*needed: F16, BF16, F32, F64 of 1 to 4 sizes, none 0"):
        from_peft(folder, base)


def test_vectors_as_halves_of_a_pair_are_refused(made):
    folder, base = made(tensors={"base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": torch.ones(D)})
    with pytest.raises(AdapterError, match=r"is a vector \[32\]; needed: a matrix"):
        from_peft(folder, base)


@pytest.mark.parametrize(
    "header",
    [
        "[" * 100_000,
        "[]",
        '{"alpha": "4"}',
        '{"metadata": {"k": 1}}',
        '{"metadata": {"k": ["u8", {}]}}',
        '{"tensors": 3}',
    ],
)
def test_a_header_that_is_not_ours_is_refused(made, header):
    folder, base = made()
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"pyggtrain": header})
    with pytest.raises(AdapterError, match="its header is not as pyggtrain writes it"):
        from_peft(folder, base)


def test_experts_without_a_pair_get_zeros(tmp_path, caplog):
    base = base_of("qwen3moe", tmp_path)
    adapter = adapter_of(base)
    to_peft(adapter, base, tmp_path / "peft")
    stored = load_file(tmp_path / "peft" / WEIGHTS)
    save_file({name: v for name, v in stored.items() if ".experts.1." not in name}, tmp_path / "peft" / WEIGHTS)
    with caplog.at_level("INFO", "pyggtrain"):
        back = from_peft(tmp_path / "peft", base)
    assert "1 of 3 experts have no pair" in caplog.text
    for ours, theirs in zip(
        adapter.pairs["blk.0.ffn_up_exps.weight"], back.pairs["blk.0.ffn_up_exps.weight"], strict=True
    ):
        assert torch.equal(theirs[[0, 2]], ours[[0, 2]]) and not theirs[1].any()


def test_fused_experts_that_share_lora_a_give_both_stacks_that_lora_a(tmp_path, made):
    base = base_of("qwen3moe", tmp_path)
    experts = "base_model.model.model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(4)
    rank = 2
    fused = {
        f"{experts}.base_layer.lora_A.weight": torch.randn(rank * E, D, generator=generator),
        f"{experts}.base_layer.lora_B.weight": torch.randn(2 * F, rank * E, generator=generator),
        f"{experts}.lora_A.weight": torch.randn(rank * E, F, generator=generator),
        f"{experts}.lora_B.weight": torch.randn(D, rank * E, generator=generator),
    }
    folder, _ = made(tensors=fused, alpha_pattern={r".*experts\.gate_up_proj": 5, r".*experts\.down_proj": 4})
    adapter = from_peft(folder, base)

    def whole(inner, num_out, num_in):
        a = fused[f"{experts}{inner}.lora_A.weight"].reshape(E, rank, num_in)
        b = fused[f"{experts}{inner}.lora_B.weight"].reshape(num_out, rank, E)
        return torch.einsum("ore,eri->eoi", b.double(), a.double())

    gate_up = 5 / rank * whole(".base_layer", 2 * F, D)
    assert torch.allclose(update(adapter, "blk.0.ffn_gate_exps.weight"), gate_up[:, :F], rtol=1e-5, atol=1e-6)
    assert torch.allclose(update(adapter, "blk.0.ffn_up_exps.weight"), gate_up[:, F:], rtol=1e-5, atol=1e-6)
    down = 4 / rank * whole("", D, F)
    assert torch.allclose(update(adapter, "blk.0.ffn_down_exps.weight"), down, rtol=1e-5, atol=1e-6)
