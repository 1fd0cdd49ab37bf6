"""What a file holds, told from its header."""

import json
import math
import re
import resource
import subprocess
import sys

import pytest
import torch

from pyggtrain.cli import main
from pyggtrain.cli.tables import facts_table, table
from pyggtrain.gguf import GGUFFile, QuantTensor, TypedValue, typed_metadata, write_gguf
from pyggtrain.model_info import info


def test_types_and_sizes_of_a_real_file(smollm2_path, capsys):
    assert main(["info", str(smollm2_path)]) == 0
    text = capsys.readouterr().out
    assert "llama.block_count" in text and "93.8 MiB in 272 tensors" in text
    assert "Q4_1      210  106,168,320  63.3   5.00" in text
    # A template of many lines takes one.
    assert max(map(len, text.splitlines())) < 160 + len(str(smollm2_path))


def test_tensors_are_listed_on_request(smollm2_path, capsys):
    main(["info", str(smollm2_path), "--tensors"])
    assert "blk.29.ffn_down.weight" in capsys.readouterr().out


def test_control_characters_of_a_strangers_file_do_not_reach_the_terminal(tmp_path, capsys):
    path = tmp_path / "strange.gguf"
    write_gguf(
        path, {"general.architecture": "llama", "general.name": "a\x1b[2Jb\nc", "x": TypedValue("arr[str]", ["y"])}, []
    )
    assert info(path).facts()["general.name"] == "a\\x1b[2Jb\\nc"
    main(["info", str(path)])
    assert "\x1b" not in capsys.readouterr().out


def test_nor_do_those_in_a_message_or_a_warning(tmp_path, capsys):
    path = tmp_path / "strange.gguf"
    value = torch.tensor([float("nan")]).view(torch.uint8)
    write_gguf(path, {"general.architecture": "llama"}, [QuantTensor("a\x1b[2Jb", "F32", (1,), value)])
    assert main(["info", str(path), "--tensors", "--check"]) == 2
    captured = capsys.readouterr()
    assert "a\\x1b[2Jb (F32): 1 of 1 weights hold NaN" in captured.err
    assert "\x1b" not in captured.err + captured.out


def test_info_needs_no_torch(smollm2_path):
    code = f"""
import sys
from pyggtrain.cli import main
main(["info", {str(smollm2_path)!r}])
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_what_can_carry_lora_is_what_llama_cpp_shows(smollm2_path, capsys):
    found = info(smollm2_path)
    kinds = {tensor.kind for tensor in found.trainable}
    assert kinds == {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    assert len(found.trainable) == 7 * 30
    reasons = {tensor.name: tensor.why_no_lora for tensor in found.tensors if tensor.why_no_lora is not None}
    assert "tied" in reasons["token_embd.weight"]
    assert "no matrix that llama.cpp multiplies by" in reasons["blk.3.attn_norm.weight"]
    # Each pair of rank 16 is 16 (N + K) numbers.
    assert found.adapter_parameters == 16 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    main(["info", str(smollm2_path)])
    text = capsys.readouterr().out
    assert "attn_q x 30" in text
    assert re.search(r"1  token_embd +each is the embedding and the output head in one \(tied\)", text)


def test_json_keeps_its_schema(tiny_llama_path, capsys):
    assert main(["info", str(tiny_llama_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        *("schema", "path", "num_parts", "file_bytes", "architecture", "context_length", "num_tokens"),
        *("has_chat_template", "types", "memory", "why_no_graph", "metadata", "tensors"),
    ]
    assert found["schema"] == 1 and found["architecture"] == "llama" and found["context_length"] == 256
    assert found["file_bytes"] == tiny_llama_path.stat().st_size and found["has_chat_template"] is False
    assert list(found["memory"]) == ["base_bytes", "adapter_rank", "adapter_parameters", "adapter_bytes"]
    (f32,) = found["types"]
    assert list(f32) == ["type", "tensors", "weights", "bytes"] and f32["weights"] * 4 == f32["bytes"]
    tensor = next(tensor for tensor in found["tensors"] if tensor["name"] == "blk.0.attn_k.weight")
    assert tensor == {
        "name": "blk.0.attn_k.weight",
        "type": "F32",
        "shape": [32, 64],
        "bytes": 8192,
        "has_lora": True,
        "why_no_lora": None,
    }


def test_json_holds_no_nan(tiny_llama_path, tmp_path, capsys):
    keys = {**typed_metadata(GGUFFile(tiny_llama_path)), "x": TypedValue("f32", math.nan)}
    write_gguf(tmp_path / "m.gguf", keys, GGUFFile(tiny_llama_path).tensors.values())
    main(["info", str(tmp_path / "m.gguf"), "--json"])
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["metadata"]["x"] == "nan"


def test_a_file_that_is_no_model_is_told_too(tmp_path, capsys):
    write_gguf(tmp_path / "a.gguf", {"general.type": "adapter", "general.architecture": "llama"}, [])
    write_gguf(tmp_path / "b.gguf", {"general.architecture": "unheard-of"}, [])
    for name, reason in (("a", "no model but of type adapter"), ("b", "unknown model architecture")):
        assert main(["info", str(tmp_path / f"{name}.gguf")]) == 0
        assert reason in capsys.readouterr().out


@pytest.fixture
def huge_path(sparse_gguf, tiny_llama_path):
    """A llama of 60 layers and 100 GiB, all holes."""
    width, ff, kv = 8192, 28672, 1024
    shapes = {"token_embd.weight": ("F16", (96, width)), "output_norm.weight": ("F32", (width,))}
    for layer in range(60):
        matrices = {
            "attn_q": (width, width),
            "attn_k": (kv, width),
            "attn_v": (kv, width),
            "attn_output": (width, width),
        }
        matrices |= {"ffn_gate": (ff, width), "ffn_up": (ff, width), "ffn_down": (width, ff)}
        shapes |= {f"blk.{layer}.{name}_norm.weight": ("F32", (width,)) for name in ("attn", "ffn")}
        shapes |= {f"blk.{layer}.{name}.weight": ("F16", shape) for name, shape in matrices.items()}
    numbers = {
        "block_count": 60,
        "embedding_length": width,
        "feed_forward_length": ff,
        "attention.head_count": 64,
        "attention.head_count_kv": 8,
        "rope.dimension_count": 128,
    }
    metadata = {**typed_metadata(GGUFFile(tiny_llama_path)), **{f"llama.{key}": n for key, n in numbers.items()}}
    return sparse_gguf(shapes, metadata)


def test_100_gib_cost_their_header_only(huge_path, capsys):
    assert huge_path.stat().st_size > 95 * 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    main(["info", str(huge_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert sum(tensor["has_lora"] for tensor in found["tensors"]) == 7 * 60
    # KiB: the tables, and no weight.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_100_gib_take_about_half_a_second(huge_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pyggtrain", "info", str(huge_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # "to train: ... + adapter + activations", and what an adapter cannot reach.
    assert "MiB adapter of rank 16 with its optimiser" in done.stdout
    assert "no matrix that llama.cpp multiplies by" in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, its own child's included: 0.6 s (docs/gguf.md), and up to twice that where others share the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_tables_align_numbers_to_the_right():
    assert table([["name", "count"], ["a", "1,234"], ["bcdef", "5"]]).splitlines() == [
        "name   count",
        "-----  -----",
        "a      1,234",
        "bcdef      5",
    ]
    assert facts_table({"a": "1", "long name": "2"}) == "a          1\nlong name  2"
