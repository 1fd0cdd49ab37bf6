"""adapters.merge: W + s B A, tensor by tensor; everything else byte for byte."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyggtrain.adapters import gguf_adapter
from pyggtrain.adapters.arithmetic import factors
from pyggtrain.adapters.gguf_adapter import AdapterFile
from pyggtrain.adapters.merge import PROVENANCE, merge
from pyggtrain.errors import AdapterError, ConfigError, UnsupportedError
from pyggtrain.gguf import GGUFFile, TypedValue, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.ops import dequantize


def adapter_for(base, folder, *, seed=1, names=None, rank=4, alpha=6.0, std=0.1):
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, info in base.tensor_infos.items():
        if len(info.shape) < 2 or (name == "token_embd.weight" and "output.weight" not in base.tensor_infos):
            continue
        if names is not None and name not in names:
            continue
        *experts, num_out, num_in = info.shape
        shapes = (*experts, rank, num_in), (*experts, num_out, rank)
        if name == "token_embd.weight":
            shapes = (num_out, rank), (num_in, rank)
        pairs[name] = tuple(torch.randn(shape, generator=generator) * std for shape in shapes)
    path = folder / f"adapter-{seed}.gguf"
    gguf_adapter.write(path, AdapterFile(path, base.architecture, alpha, pairs, {}))
    return gguf_adapter.load(path)


def wanted(base, name, *scaled):
    """W + sum of scale s B A, in float64."""
    values = dequantize(base.tensors[name]).double()
    for adapter, scale in scaled:
        if name in adapter.pairs:
            lora_a, lora_b = (half.double() for half in factors(name, adapter.pairs[name]))
            values = values + scale * adapter.scale(name) * (lora_b @ lora_a).reshape(values.shape)
    return values


def with_types(base, folder, **types):
    """The same file with some tensors in other types."""
    path = folder / "typed.gguf"
    tensors = [
        quantize_tensor(name, dequantize(tensor), types[kind]) if (kind := name.split(".")[-2]) in types else tensor
        for name, tensor in base.tensors.items()
    ]
    write_gguf(path, typed_metadata(base), tensors)
    return GGUFFile.open(path)


def test_merged_weight_is_w_plus_s_b_a_of_all_adapters(untied, tmp_path):
    first = adapter_for(untied, tmp_path)
    second = adapter_for(untied, tmp_path, seed=2, names=("blk.0.attn_q.weight", "output.weight"), rank=3, alpha=0.7)
    done = merge(untied, [(first, 1.0), (second, -0.5)], tmp_path / "m.gguf")
    merged = GGUFFile.open(tmp_path / "m.gguf")
    for name in untied.tensors:
        values = wanted(untied, name, (first, 1.0), (second, -0.5))
        error = float((dequantize(merged.tensors[name]).double() - values).abs().max())
        assert error <= 1e-6 * float(values.abs().max()), name
    # F32 holds what was wanted: nothing is rounded but sums of float32.
    assert done.rounding.keys() == first.pairs.keys() and max(r.rms for r in done.rounding.values()) == 0.0


def test_untouched_tensors_and_metadata_are_those_of_the_base(untied, tmp_path):
    base = with_types(untied, tmp_path, attn_v="Q8_0", ffn_up="F16", attn_k="Q4_0")
    adapter = adapter_for(base, tmp_path, names=("blk.0.attn_q.weight", "blk.1.attn_v.weight"))
    done = merge(base, [(adapter, 1.0)], tmp_path / "m.gguf")
    merged = GGUFFile.open(tmp_path / "m.gguf")
    for name, tensor in base.tensors.items():
        assert merged.tensors[name].type == tensor.type
        assert torch.equal(merged.tensors[name].blocks, tensor.blocks) is (name not in adapter.pairs), name
    assert done.num_copied == len(base.tensors) - 2
    kept = {key: value for key, value in typed_metadata(merged).items() if key != PROVENANCE}
    assert kept == typed_metadata(base)


def test_provenance_names_each_merge(untied, tmp_path):
    adapter = adapter_for(untied, tmp_path, names=("blk.0.attn_q.weight",))
    merge(untied, [(adapter, 0.25)], tmp_path / "once.gguf")
    once = GGUFFile.open(tmp_path / "once.gguf")
    merge(once, [(adapter, 1.0)], tmp_path / "twice.gguf", ignore_hash=True)
    entries = json.loads(str(GGUFFile.open(tmp_path / "twice.gguf").metadata[PROVENANCE]))
    assert [entry["base.header_sha256"] for entry in entries] == [untied.header_sha256, once.header_sha256]
    sha256 = GGUFFile.open(adapter.path).sha256()
    assert entries[0]["adapters"] == [{"file": "adapter-1.gguf", "sha256": sha256, "scale": 0.25}]


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "F16", "BF16"])
def test_rounding_is_that_of_one_encoding_by_ggml(untied, tmp_path, type):
    adapter = adapter_for(untied, tmp_path)
    done = merge(untied, [(adapter, 1.0)], tmp_path / "m.gguf", type=type)
    merged = GGUFFile.open(tmp_path / "m.gguf")
    for name, rounded in done.rounding.items():
        assert rounded.made == merged.tensors[name].type == type
        values = wanted(untied, name, (adapter, 1.0))
        once = dequantize(quantize_tensor(name, values.float(), type)).double()
        written = dequantize(merged.tensors[name]).double()
        assert rounded.rms == pytest.approx(float((written - values).square().mean().sqrt()), rel=1e-3)
        assert rounded.rms <= 1.001 * float((once - values).square().mean().sqrt())
        assert rounded.relative == pytest.approx(rounded.rms / float(values.square().mean().sqrt()), rel=1e-3)
    vectors = [name for name, tensor in merged.tensors.items() if len(tensor.shape) == 1]
    assert vectors and all(merged.tensors[name].type == "F32" for name in vectors)


def test_patterns_win_over_the_type_and_keep_keeps_the_rest(untied, tmp_path):
    adapter = adapter_for(untied, tmp_path, names=("blk.0.attn_q.weight",))
    merge(untied, [(adapter, 1.0)], tmp_path / "k.gguf", tensor_types={"*ffn_down*": "Q8_0", "blk.1.ffn_down*": "Q4_0"})
    types = {name: tensor.type for name, tensor in GGUFFile.open(tmp_path / "k.gguf").tensors.items()}
    assert (types.pop("blk.0.ffn_down.weight"), types.pop("blk.1.ffn_down.weight")) == ("Q8_0", "Q4_0")
    assert set(types.values()) == {"F32"}
    merge(untied, [(adapter, 1.0)], tmp_path / "t.gguf", type="Q4_0", tensor_types={"output.weight": "Q8_0"})
    merged = GGUFFile.open(tmp_path / "t.gguf")
    assert merged.tensors["output.weight"].type == "Q8_0" and merged.tensors["blk.0.attn_v.weight"].type == "Q4_0"
    assert merged.metadata["general.file_type"] == 2


def experts_base(folder, columns=64):
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "token_embd.weight": torch.randn(40, columns, generator=generator),
        "blk.0.ffn_up_exps.weight": torch.randn(3, 96, columns, generator=generator),
        "blk.0.ffn_gate_inp.weight": torch.randn(3, columns, generator=generator),
    }
    path = folder / "experts.gguf"
    metadata = {"general.architecture": "qwen3moe"}
    write_gguf(path, metadata, [quantize_tensor(name, values, "F32") for name, values in tensors.items()])
    return GGUFFile.open(path)


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 25])
def test_experts_and_small_chunks_give_the_same_weights(tmp_path, monkeypatch, chunk_bytes):
    base = experts_base(tmp_path)
    adapter = adapter_for(base, tmp_path)
    monkeypatch.setattr("pyggtrain.adapters.merge.CHUNK_BYTES", chunk_bytes)
    merge(base, [(adapter, 2.0)], tmp_path / "m.gguf", type="Q8_0")
    merged = GGUFFile.open(tmp_path / "m.gguf")
    assert merged.tensors["blk.0.ffn_gate_inp.weight"].type == "F32", "routers stay as they are stored"
    for name in adapter.pairs:
        values = wanted(base, name, (adapter, 2.0))
        written = dequantize(merged.tensors[name]).double()
        assert float((written - values).norm() / values.norm()) < 0.01


def test_importance_is_used_expert_by_expert(tmp_path):
    base, name = experts_base(tmp_path, columns=256), "blk.0.ffn_up_exps.weight"
    adapter = adapter_for(base, tmp_path, names=(name,), std=0.0)
    importance = torch.rand(3, 256, generator=torch.Generator().manual_seed(5)) ** 8 + 1e-3
    merge(base, [(adapter, 1.0)], tmp_path / "m.gguf", tensor_types={"*_exps*": "Q2_K"}, imatrix={name: importance})
    written = GGUFFile.open(tmp_path / "m.gguf").tensors[name].blocks
    for expert, values in enumerate(dequantize(base.tensors[name])):
        by_ggml = [quantize_tensor(name, values, "Q2_K", imatrix=row).blocks for row in importance]
        assert [torch.equal(written[expert], blocks) for blocks in by_ggml] == [i == expert for i in range(3)]


def test_types_that_need_an_importance_matrix_are_refused_without_one(tmp_path):
    base = experts_base(tmp_path, columns=256)
    adapter = adapter_for(base, tmp_path)
    with pytest.raises(ConfigError, match="2 tensors must be encoded.*IQ2_XXS"):
        merge(base, [(adapter, 1.0)], tmp_path / "m.gguf", type="IQ2_XXS")
    assert not (tmp_path / "m.gguf").exists()
    merge(base, [(adapter, 1.0)], tmp_path / "m.gguf", type="IQ2_XXS", is_uniform_allowed=True)
    assert GGUFFile.open(tmp_path / "m.gguf").tensors["blk.0.ffn_up_exps.weight"].type == "IQ2_XXS"


def test_what_cannot_be_meant_is_refused(untied, tmp_path):
    adapter = adapter_for(untied, tmp_path)
    out = tmp_path / "m.gguf"
    with pytest.raises(AdapterError, match="No adapter"):
        merge(untied, [], out)
    with pytest.raises(ConfigError, match="scale 0"):
        merge(untied, [(adapter, 0.0)], out)
    with pytest.raises(ConfigError, match="never changed"):
        merge(untied, [(adapter, 1.0)], untied.path, overwrite=True)
    with pytest.raises(ConfigError, match="Q4_Z"):
        merge(untied, [(adapter, 1.0)], out, type="Q4_Z")
    with pytest.raises(AdapterError, match="'qwen2'"):
        merge(untied, [(replace(adapter, architecture="qwen2"), 1.0)], out)
    other = replace(adapter, provenance={"base.header_sha256": "0" * 64})
    with pytest.raises(AdapterError, match="trained on another file"):
        merge(untied, [(other, 1.0)], out)
    assert not out.exists()
    merge(untied, [(other, 1.0)], out, ignore_hash=True)
    with pytest.raises(ConfigError, match="exists already"):
        merge(untied, [(adapter, 1.0)], out)


def test_weight_with_a_scale_of_its_own_is_refused(untied, tmp_path):
    scaled = [*untied.tensors.values(), quantize_tensor("blk.0.attn_q.scale", torch.ones(1), "F32")]
    write_gguf(tmp_path / "scaled.gguf", typed_metadata(untied), scaled)
    base = GGUFFile.open(tmp_path / "scaled.gguf")
    with pytest.raises(UnsupportedError, match="attn_q.scale"):
        merge(base, [(adapter_for(base, tmp_path), 1.0)], tmp_path / "m.gguf")


def test_parts_of_a_split_model_become_one_file(untied, tmp_path):
    names = list(untied.tensors)
    for number, part in enumerate((names[:5], names[5:])):
        metadata = typed_metadata(untied) if number == 0 else {}
        metadata |= {
            "split.no": TypedValue("u16", number),
            "split.count": TypedValue("u16", 2),
            "split.tensors.count": TypedValue("i32", len(names)),
        }
        write_gguf(tmp_path / f"s-0000{number + 1}-of-00002.gguf", metadata, [untied.tensors[name] for name in part])
    base = GGUFFile.open(tmp_path / "s-00001-of-00002.gguf")
    merge(base, [(adapter_for(base, tmp_path), 1.0)], tmp_path / "m.gguf")
    merged = GGUFFile.open(tmp_path / "m.gguf")
    assert list(merged.tensors) == names and not any(key.startswith("split.") for key in merged.metadata)


def test_a_merge_that_fails_leaves_nothing(untied, tmp_path):
    broken = adapter_for(untied, tmp_path, std=1e25)
    with pytest.raises(AdapterError, match="token_embd.weight.*not finite"):
        merge(untied, [(broken, 1.0)], tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*m.gguf*"))


PEAK = """
import resource, sys
from pyggtrain.adapters import gguf_adapter
from pyggtrain.adapters.merge import merge
from pyggtrain.gguf import GGUFFile
base, adapter = GGUFFile.open(sys.argv[1]), gguf_adapter.load(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge(base, [(adapter, 1.0)], sys.argv[3], type="Q8_0")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Sixteen weights of 16 MiB as float32: together 256 MiB, and one with its pieces and blocks about 70."""
    path = tmp_path / "large.gguf"
    names = [f"blk.{layer}.ffn_up.weight" for layer in range(16)]
    values = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    write_gguf(path, {"general.architecture": "llama"}, [quantize_tensor(name, values, "Q8_0") for name in names])
    base = GGUFFile.open(path)
    adapter = adapter_for(base, tmp_path, rank=2)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path, adapter.path, tmp_path / "m.gguf"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    # The mapped base (68 MiB of pages that the kernel may drop) counts as well.
    assert int(done.stdout) / 1024 < 68 + 110
    assert Path(tmp_path / "m.gguf").stat().st_size == pytest.approx(path.stat().st_size, rel=0.01)
