"""`pyggtrain quantize`: what it writes, what it says, what it refuses."""

from pathlib import Path

import torch

from pyggtrain import _bridge
from pyggtrain.cli import main
from pyggtrain.gguf import GGUFFile


def logits(path: Path) -> torch.Tensor:
    return torch.from_dlpack(_bridge.Session(str(path), num_ctx=8, num_ubatch=8, num_threads=1).logits([1, 5, 9, 2]))


def test_a_copy_loads_in_llama_cpp_and_says_what_fell_back(tiny_llama_path: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "copy é.gguf"
    arguments = [str(tiny_llama_path), str(out), "--type", "q4_k", "--tensor-type", "*attn_v*=q8_0"]
    assert main(["quantize", *arguments]) == 0
    types = {name: info.type for name, info in GGUFFile(out).tensor_infos.items()}
    assert types["blk.0.attn_v.weight"] == "Q8_0" and types["blk.0.attn_q.weight"] == "Q5_0"
    text = capsys.readouterr().out
    assert "F32   Q5_0       13" in text
    assert "11 tensors became Q5_0: rows of 64 are no multiple of Q4_K's block" in text
    assert logits(out).isfinite().all()


def test_mistakes_are_named_and_nothing_is_written(tiny_llama_path: Path, tmp_path: Path, capsys) -> None:
    source, out = str(tiny_llama_path), tmp_path / "out.gguf"
    q8 = tmp_path / "q8.gguf"
    main(["quantize", source, str(q8), "--type", "Q8_0"])
    mistakes = {
        "Q4_K_M is a mix of types": [source, out, "--type", "Q4_K_M"],
        "needed PATTERN=TYPE": [source, out, "--type", "Q8_0", "--tensor-type", "Q4_0"],
        "matches no tensor": [source, out, "--type", "Q8_0", "--tensor-type", "none*=Q4_0"],
        "quantised already": [q8, out, "--type", "Q4_0"],
        "exists already": [source, q8, "--type", "Q4_0"],
        "the file to be read": [source, source, "--type", "Q8_0", "--overwrite"],
        "does not exist": [source, tmp_path / "no" / "out.gguf", "--type", "Q8_0"],
        "named like a part": [source, tmp_path / "m-00001-of-00002.gguf", "--type", "Q8_0"],
        "No such file": [tmp_path / "none.gguf", out, "--type", "Q8_0"],
    }
    capsys.readouterr()
    for message, arguments in mistakes.items():
        assert main(["quantize", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["q8.gguf"]
    assert main(["quantize", str(q8), str(out), "--type", "Q4_0", "--allow-requantize"]) == 0
    assert main(["quantize", source, str(q8), "--type", "Q4_0", "--overwrite"]) == 0
    assert GGUFFile(q8).metadata["general.file_type"] == 2


def test_a_full_disk_is_an_error_and_leaves_nothing(tiny_llama_path: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert main(["quantize", str(tiny_llama_path), str(tmp_path / "out.gguf"), "--type", "Q8_0"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
