"""adapters.gguf_adapter: files that llama.cpp loads, and the ones that it must never see."""

import hashlib
import math

import pytest
import torch

from pyggtrain import _bridge, adapters, models
from pyggtrain.adapters import LoraConfig
from pyggtrain.errors import AdapterError, GGUFError
from pyggtrain.gguf import GGUFFile, QuantTensor, TypedValue, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.nn import Batch

TOKENS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def trained(file, **settings):
    """A model and its adapter with random lora_b, as after training."""
    model = models.load(file, compute="exact")
    adapter = adapters.attach(model, LoraConfig(**{"r": 4, "lora_alpha": 6.0, **settings}), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for pair in adapter.pairs.values():
            pair.lora_b.normal_(0, 0.2, generator=generator)
    return model, adapter


def write_adapter(path, tensors, **metadata):
    keys = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": TypedValue("f32", 8.0),
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    write_gguf(
        path,
        {key: value for key, value in keys.items() if value is not None},
        [quantize_tensor(name, values, "F32") for name, values in tensors.items()],
    )
    return path


def pair(name, num_out=64, num_in=64, rank=4):
    return {f"{name}.lora_a": torch.ones(rank, num_in), f"{name}.lora_b": torch.ones(num_out, rank)}


def test_file_holds_exactly_the_pairs(tied, tmp_path):
    _, adapter = trained(tied, target_modules=("attn_q", "ffn_down"))
    path = tmp_path / "adapter.gguf"
    adapters.save(path, adapter, tied, provenance={"version": "1.2", "config": '{"r": 4}'})
    file = GGUFFile.open(path)
    assert list(file.tensors) == [f"{name}.{half}" for name in adapter.pairs for half in ("lora_a", "lora_b")]
    for name, made in adapter.pairs.items():
        assert name in tied.tensors
        for half, values in (("lora_a", made.lora_a), ("lora_b", made.lora_b)):
            tensor = file.tensors[f"{name}.{half}"]
            assert tensor.type == "F32"
            assert torch.equal(tensor.blocks.view(torch.float32), values)
    metadata = typed_metadata(file)
    assert metadata["general.type"].value == "adapter"
    assert metadata["general.architecture"].value == "llama"
    assert metadata["adapter.type"].value == "lora"
    assert metadata["adapter.lora.alpha"] == TypedValue("f32", 6.0)
    assert metadata["pyggtrain.version"].value == "1.2"
    assert metadata["pyggtrain.base.header_sha256"].value == tied.header_sha256
    assert metadata["pyggtrain.base.tokenizer_sha256"].value == tied.tokenizer_sha256
    assert metadata["pyggtrain.base.chat_template_sha256"].value == ""


def test_chat_template_is_in_the_fingerprint(smollm2):
    expected = hashlib.sha256(smollm2.chat_template.encode()).hexdigest()
    assert adapters.base_fingerprint(smollm2)["base.chat_template_sha256"] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"r": 3, "lora_alpha": 0.7},
        {"use_rslora": True, "r": 3},
        {"alpha_pattern": {"attn_q": 11.0}, "rank_pattern": {"ffn_*": 7, "attn_k": 1}},
        {"target_modules": ("all-linear", "output")},
    ],
)
def test_llama_cpp_computes_what_was_trained(untied, tmp_path, settings):
    model, adapter = trained(untied, **settings)
    path = tmp_path / "adapter.gguf"
    adapters.save(path, adapter, untied)
    adapters.check_against_base(adapters.load(path), untied)
    session = _bridge.Session(
        str(untied.path), num_ctx=256, num_ubatch=64, num_threads=1, kv_type="F32", flash_attention=False
    )
    base = torch.from_dlpack(session.logits(TOKENS)).clone()
    handle = session.load_adapter(str(path))
    assert session.adapter_num_pairs(handle) == len(adapter.pairs)
    session.set_adapters([(handle, 1.0)])
    served = torch.from_dlpack(session.logits(TOKENS))
    with torch.no_grad():
        logits = model.logits(Batch.from_documents([(TOKENS, TOKENS)]))
    rms = float(served.pow(2).mean().sqrt())
    assert float((served - base).abs().max()) > 0.1 * rms, "the adapter changes nothing"
    assert float((served - logits).abs().max()) < 1e-3 * rms


def test_each_kind_of_target_changes_what_llama_cpp_computes(untied, tmp_path):
    session = _bridge.Session(str(untied.path), num_ctx=256, num_ubatch=64, num_threads=1, kv_type="F32")
    base = torch.from_dlpack(session.logits(TOKENS)).clone()
    kinds = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output"]
    for kind in kinds:
        _, adapter = trained(untied, target_modules=kind)
        path = tmp_path / f"{kind}.gguf"
        adapters.save(path, adapter, untied)
        session.set_adapters([(session.load_adapter(str(path)), 1.0)])
        assert (torch.from_dlpack(session.logits(TOKENS)) - base).abs().max() > 1e-3, kind


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "alpha_pattern": {"attn_q": 3.0}}])
def test_restored_adapter_is_the_saved_one(tied, tmp_path, settings):
    _, adapter = trained(tied, **settings)
    adapters.save(tmp_path / "adapter.gguf", adapter, tied)
    other = adapters.attach(models.load(tied), LoraConfig(r=4, lora_alpha=6.0, **settings), seed=9)
    adapters.restore(other, adapters.load(tmp_path / "adapter.gguf"))
    for name, made in adapter.pairs.items():
        assert torch.equal(other.pairs[name].lora_a, made.lora_a)
        torch.testing.assert_close(other.pairs[name].lora_b, made.lora_b, rtol=3e-7, atol=0)


def test_restore_refuses_other_pairs(tied, tmp_path):
    _, adapter = trained(tied, target_modules="attn_q")
    adapters.save(tmp_path / "adapter.gguf", adapter, tied)
    file = adapters.load(tmp_path / "adapter.gguf")
    other = adapters.attach(models.load(tied), LoraConfig(r=4, target_modules="attn_k"), seed=0)
    with pytest.raises(AdapterError, match=r"2 missing \(blk.0.attn_k.weight.*2 too many"):
        adapters.restore(other, file)
    other = adapters.attach(models.load(tied), LoraConfig(r=5, target_modules="attn_q"), seed=0)
    with pytest.raises(AdapterError, match="has rank 4: needed 5"):
        adapters.restore(other, file)


# ---- writing


def test_an_existing_file_is_kept_unless_overwriting_is_asked_for(tied, tmp_path):
    _, adapter = trained(tied)
    path = tmp_path / "adapter.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(AdapterError, match="exists already"):
        adapters.save(path, adapter, tied)
    assert path.read_bytes() == b"precious"
    adapters.save(path, adapter, tied, overwrite=True)
    adapters.check_against_base(adapters.load(path), tied)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_never_written(tied, tmp_path, value):
    _, adapter = trained(tied)
    with torch.no_grad():
        adapter.pairs["blk.1.ffn_up.weight"].lora_b[3, 1] = value
    with pytest.raises(AdapterError, match=r"blk.1.ffn_up.weight.lora_b holds numbers that are not finite"):
        adapters.save(tmp_path / "adapter.gguf", adapter, tied)
    assert list(tmp_path.iterdir()) == []


def test_saving_against_another_base_is_refused(tied, smollm2, tmp_path):
    _, adapter = trained(tied)
    with pytest.raises(AdapterError, match=r"blk.0.attn_q.weight.*does not fit.*\[576, 576\]"):
        adapters.save(tmp_path / "adapter.gguf", adapter, smollm2)


# ---- reading


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general__type": "model"}, "general.type = 'model': needed 'adapter'"),
        ({"adapter__type": "control_vector"}, "adapter.type = 'control_vector': needed 'lora'"),
        ({"adapter__type": None}, "adapter.type = None"),
        ({"adapter__lora__alpha": TypedValue("u32", 8)}, "of type u32: needed f32"),
        ({"adapter__lora__alpha": TypedValue("f32", math.nan)}, "is nan: needed a finite number"),
    ],
)
def test_wrong_metadata_is_named(tmp_path, metadata, named):
    path = write_adapter(tmp_path / "adapter.gguf", pair("blk.0.attn_q.weight"), **metadata)
    with pytest.raises(AdapterError, match=named):
        adapters.load(path)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, "holds no pair"),
        ({"blk.0.attn_q.weight.lora_a": torch.ones(4, 64)}, r"blk.0.attn_q.weight.lora_a.*stands alone"),
        (
            {**pair("blk.0.attn_q.weight"), "rope_freqs.weight": torch.ones(8)},
            "rope_freqs.weight.*refuses the whole file",
        ),
        ({**pair("blk.0.attn_q.weight"), "output_norm.weight": torch.ones(64)}, "output_norm.weight.*silently ignores"),
    ],
)
def test_tensors_that_are_no_pairs_are_named(tmp_path, tensors, named):
    with pytest.raises(AdapterError, match=named):
        adapters.load(write_adapter(tmp_path / "adapter.gguf", tensors))


@pytest.mark.parametrize("type", ["Q4_0", "I32"])
def test_halves_of_other_types_are_refused(tmp_path, type):
    shape = (2, 64)
    blocks = torch.zeros(2, 36 if type == "Q4_0" else 256, dtype=torch.uint8)
    half = QuantTensor("blk.0.attn_q.weight.lora_a", type, shape, blocks)
    keys = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    other = quantize_tensor("blk.0.attn_q.weight.lora_b", torch.ones(64, 2), "F32")
    write_gguf(tmp_path / "adapter.gguf", keys, [half, other])
    with pytest.raises(AdapterError, match=f"lora_a in .* is {type}: needed F32, F16, BF16, Q8_0"):
        adapters.load(tmp_path / "adapter.gguf")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_halves_that_are_not_finite_are_refused(tmp_path, value):
    tensors = pair("blk.0.attn_q.weight")
    tensors["blk.0.attn_q.weight.lora_b"] = torch.full((64, 4), value)
    blocks = {name: values.view(torch.uint8) for name, values in tensors.items()}
    keys = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    halves = [QuantTensor(name, "F32", tuple(tensors[name].shape), blocks[name]) for name in tensors]
    write_gguf(tmp_path / "adapter.gguf", keys, halves)
    with pytest.raises(AdapterError, match="lora_b in .* holds NaN or infinity"):
        adapters.load(tmp_path / "adapter.gguf")


def test_a_file_without_alpha_has_factor_one_as_in_llama_cpp(tmp_path):
    for alpha in (None, TypedValue("f32", 0.0)):
        file = adapters.load(
            write_adapter(tmp_path / "adapter.gguf", pair("blk.0.attn_q.weight"), adapter__lora__alpha=alpha)
        )
        assert file.scale("blk.0.attn_q.weight") == 1.0
    file = adapters.load(write_adapter(tmp_path / "adapter.gguf", pair("blk.0.attn_q.weight")))
    assert file.scale("blk.0.attn_q.weight") == 2.0


def test_a_broken_file_is_a_gguf_error(tmp_path):
    (tmp_path / "adapter.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    with pytest.raises(GGUFError):
        adapters.load(tmp_path / "adapter.gguf")


# ---- matching a base


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (pair("blk.9.attn_q.weight"), "there is no such tensor"),
        (pair("output.weight", num_out=96), r"the token embedding \(tied\)"),
        ({"token_embd.weight.lora_a": torch.ones(96, 4), "token_embd.weight.lora_b": torch.ones(64, 4)}, "aborts"),
        (pair("blk.0.attn_norm.weight", num_out=1), "silently ignores pairs on vectors"),
        (pair("blk.0.attn_k.weight", num_out=64), r"needed lora_a \[4, 64\] and lora_b \[32, 4\]"),
        (
            {"blk.0.attn_q.weight.lora_a": torch.ones(3, 64), "blk.0.attn_q.weight.lora_b": torch.ones(64, 4)},
            "does not fit",
        ),
        (
            {"blk.0.attn_q.weight.lora_a": torch.ones(2, 4, 64), "blk.0.attn_q.weight.lora_b": torch.ones(2, 64, 4)},
            "does not fit",
        ),
    ],
)
def test_pairs_that_do_not_fit_are_named(tied, tmp_path, tensors, named):
    file = adapters.load(write_adapter(tmp_path / "adapter.gguf", tensors))
    with pytest.raises(AdapterError, match=named):
        adapters.check_against_base(file, tied)


def test_flat_pair_on_a_stack_of_experts_is_refused(tied, tmp_path):
    stack = quantize_tensor("blk.0.ffn_up_exps.weight", torch.randn(3, 96, 64), "F32")
    write_gguf(tmp_path / "experts.gguf", typed_metadata(tied), [*tied.tensors.values(), stack])
    base = GGUFFile.open(tmp_path / "experts.gguf")
    flat = adapters.load(write_adapter(tmp_path / "flat.gguf", pair("blk.0.ffn_up_exps.weight", num_out=96)))
    with pytest.raises(AdapterError, match=r"needed lora_a \[3, 4, 64\] and lora_b \[3, 96, 4\]"):
        adapters.check_against_base(flat, base)
    name = "blk.0.ffn_up_exps.weight"
    stacked = {f"{name}.lora_a": torch.ones(3, 4, 64), f"{name}.lora_b": torch.ones(3, 96, 4)}
    adapters.check_against_base(adapters.load(write_adapter(tmp_path / "stacked.gguf", stacked)), base)


def test_embedding_pair_of_an_untied_model_lies_the_other_way_round(untied, tmp_path):
    tensors = {"token_embd.weight.lora_a": torch.ones(96, 4), "token_embd.weight.lora_b": torch.ones(64, 4)}
    adapters.check_against_base(adapters.load(write_adapter(tmp_path / "right.gguf", tensors)), untied)
    wrong = adapters.load(write_adapter(tmp_path / "wrong.gguf", pair("token_embd.weight", num_out=96)))
    with pytest.raises(AdapterError, match="does not fit"):
        adapters.check_against_base(wrong, untied)


def test_another_architecture_is_named_on_both_sides(tied, tmp_path):
    file = adapters.load(
        write_adapter(tmp_path / "adapter.gguf", pair("blk.0.attn_q.weight"), general__architecture="qwen2")
    )
    with pytest.raises(AdapterError, match="is for architecture 'qwen2'.*is 'llama'"):
        adapters.check_against_base(file, tied)


def test_another_file_of_the_same_shape_is_refused_unless_asked_for(tied, tmp_path):
    _, adapter = trained(tied)
    adapters.save(tmp_path / "adapter.gguf", adapter, tied)
    write_gguf(
        tmp_path / "other.gguf",
        {**typed_metadata(tied), "tokenizer.chat_template": "{{ messages }}"},
        tied.tensors.values(),
    )
    file, other = adapters.load(tmp_path / "adapter.gguf"), GGUFFile.open(tmp_path / "other.gguf")
    with pytest.raises(AdapterError, match=r"adapter.gguf was trained on another file than .*other.gguf") as error:
        adapters.check_against_base(file, other)
    assert "chat template (trained on none, found" in str(error.value)
    assert "tokenizer" not in str(error.value)
    adapters.check_against_base(file, other, ignore_hash=True)
    adapters.check_against_base(file, tied)


def test_one_changed_weight_is_found_by_the_hash_of_the_whole_file(tied, tmp_path):
    _, adapter = trained(tied)
    adapters.save(tmp_path / "plain.gguf", adapter, tied)
    adapters.save(tmp_path / "hashed.gguf", adapter, tied, provenance={"base.sha256": tied.sha256()})
    content = bytearray(tied.path.read_bytes())
    content[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    other, hashed = GGUFFile.open(tmp_path / "other.gguf"), adapters.load(tmp_path / "hashed.gguf")
    adapters.check_against_base(hashed, tied, hash_base=True)
    adapters.check_against_base(hashed, other)
    with pytest.raises(AdapterError, match="file contents"):
        adapters.check_against_base(hashed, other, hash_base=True)
    with pytest.raises(AdapterError, match="holds no hash of its whole base"):
        adapters.check_against_base(adapters.load(tmp_path / "plain.gguf"), tied, hash_base=True)
