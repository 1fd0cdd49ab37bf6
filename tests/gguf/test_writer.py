"""Files that pyggtrain writes are read back equal by itself, by the gguf package, and load in llama.cpp."""

import os
from pathlib import Path

import gguf
import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf import (
    DeferredTensor,
    GGUFFile,
    QuantTensor,
    TypedValue,
    quantize_tensor,
    typed_metadata,
    write_gguf,
)

METADATA = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.int": -5,
    "a.large": 1 << 40,
    "a.float": 0.5,
    "a.text": "naïve 日本 😀",
    "a.list": [1, 2, 3],
    "a.strings": ["", "b"],
    "a.typed": TypedValue("u64", 9),
    "a.empty": TypedValue("arr[str]", []),
}


def test_copy_of_a_real_file_is_the_same_bytes(smollm2: GGUFFile, tmp_path: Path) -> None:
    write_gguf(tmp_path / "copy.gguf", typed_metadata(smollm2), smollm2.tensors.values())
    assert (tmp_path / "copy.gguf").read_bytes() == smollm2.path.read_bytes()


def test_values_come_back_with_their_types(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, METADATA, [])
    file = GGUFFile(path)
    for key, value in METADATA.items():
        assert file.metadata[key] == (value.value if isinstance(value, TypedValue) else value)
    types = {key: file.metadata.value_type(key) for key in file.metadata}
    assert (
        types["a.int"] == "i32"
        and types["a.large"] == "u64"
        and types["a.typed"] == "u64"
        and types["a.list"] == "arr[u32]"
    )
    fields = gguf.GGUFReader(path).fields
    assert fields["a.text"].contents() == METADATA["a.text"] and fields["a.list"].contents() == [1, 2, 3]


def test_every_type_and_shape_is_read_back_by_the_gguf_package(tmp_path: Path) -> None:
    # The gguf package knows no Q2_0.
    types = sorted(set(_bridge.quant_types()) - {"Q2_0"})
    tensors = []
    for type in types:
        imatrix = torch.ones(256) if _bridge.quant_types()[type].needs_imatrix else None
        tensors.append(quantize_tensor(f"{type}.weight", torch.randn(3, 2, 256), type, imatrix=imatrix))
    path = tmp_path / "types.gguf"
    write_gguf(path, {"general.architecture": "llama"}, tensors)
    mine, theirs = GGUFFile(path), {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in tensors:
        assert mine.tensors[tensor.name].shape == (3, 2, 256)
        assert torch.equal(mine.tensors[tensor.name].blocks, tensor.blocks)
        assert theirs[tensor.name].tensor_type.name == tensor.type
        assert list(theirs[tensor.name].shape) == [256, 2, 3]
        assert theirs[tensor.name].data.tobytes() == tensor.blocks.numpy().tobytes()


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_other_alignments_are_read_everywhere(alignment: int, tiny_llama_path: Path, tmp_path: Path) -> None:
    model = GGUFFile(tiny_llama_path)
    path = tmp_path / "m.gguf"
    write_gguf(path, {**typed_metadata(model), "general.alignment": alignment}, model.tensors.values())
    file = GGUFFile(path)
    assert all(info.offset % alignment == 0 for info in file.tensor_infos.values())
    for name, tensor in model.tensors.items():
        assert torch.equal(file.tensors[name].blocks, tensor.blocks)
    assert [tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors] == [
        tensor.blocks.numpy().tobytes() for tensor in model.tensors.values()
    ]
    tokens = [1, 5, 9]
    sessions = [_bridge.Session(str(p), num_ctx=8, num_ubatch=8, num_threads=1) for p in (tiny_llama_path, path)]
    first, second = (torch.from_dlpack(session.logits(tokens)) for session in sessions)
    assert torch.equal(first, second)


@pytest.mark.parametrize("failure", ["produce", "rename"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def fail(*_: object) -> torch.Tensor:
        raise OSError("disk full")

    tensors: list[QuantTensor | DeferredTensor] = [quantize_tensor("a", torch.zeros(4), "F32")]
    if failure == "produce":
        tensors.append(DeferredTensor("b", "F32", (4,), fail))
    else:
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_gguf(path, {}, tensors)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_a_new_file_has_the_rights_of_any_new_file_and_follows_no_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "m.gguf"
    target.write_bytes(b"old")
    link.symlink_to(target)
    before = os.umask(0o027)
    try:
        write_gguf(link, {}, [])
    finally:
        os.umask(before)
    assert target.read_bytes() == b"old" and not link.is_symlink()
    assert link.stat().st_mode & 0o777 == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf", "target"]


def test_a_name_of_as_many_bytes_as_the_system_allows_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("m" * 250 + ".gguf")
    write_gguf(path, {"k": 1}, [])
    assert GGUFFile(path).metadata["k"] == 1


def test_what_gguf_cannot_hold_is_refused(tmp_path: Path) -> None:
    tensor = quantize_tensor("a", torch.zeros(4), "F32")
    cases = {
        "share the names a": ({}, [tensor, tensor]),
        "empty list": ({"k": []}, []),
        "mixes": ({"k": [1, "a"]}, []),
        "at most 64 bits": ({"k": 1 << 64}, []),
        "needed: one of": ({"k": TypedValue("u128", 1)}, []),
        "cannot be stored as u8": ({"k": TypedValue("u8", 256)}, []),
        "power of two": ({"general.alignment": 48}, []),
        "of type u64": ({"general.alignment": TypedValue("u64", 32)}, []),
        "tensor 't{64}' cannot be read back": ({}, [quantize_tensor("t" * 64, torch.zeros(4), "F32")]),
        "tensor 'a.x00' cannot be read back": ({}, [quantize_tensor("a\0", torch.zeros(4), "F32")]),
        "tensor '' cannot be read back": ({}, [quantize_tensor("", torch.zeros(4), "F32")]),
        "metadata key 'k+' cannot be read back": ({"k" * 65536: 1}, []),
        "shape .0, 4.": ({}, [QuantTensor("a", "F32", (0, 4), torch.zeros(0, 16, dtype=torch.uint8))]),
        "1 to 4 sizes": ({}, [quantize_tensor("a", torch.zeros(1, 1, 1, 1, 4), "F32")]),
        "bytes of blocks": ({}, [DeferredTensor("b", "F32", (4,), lambda: torch.zeros(3, dtype=torch.uint8))]),
    }
    for message, (metadata, tensors) in cases.items():
        with pytest.raises(GGUFError, match=message):
            write_gguf(tmp_path / "bad.gguf", metadata, tensors)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with pytest.raises(GGUFError, match="multiple of 256"):
        quantize_tensor("a", torch.zeros(2, 100), "Q4_K")
    with pytest.raises(GGUFError, match="unknown"):
        quantize_tensor("a", torch.zeros(2, 100), "Q4_Z")


def test_an_f32_copy_loads_and_speaks_in_llama_cpp(smollm2_f32_path: Path) -> None:
    from pyggtrain.gguf import Tokenizer

    tokenizer = Tokenizer(smollm2_f32_path)
    session = _bridge.Session(str(smollm2_f32_path), num_ctx=32, num_ubatch=32, num_threads=1)
    assert tokenizer.decode(session.generate(tokenizer.encode("The capital of France is"), 2)) == " Paris."
