"""Split models: any part opens the whole; a part that is missing, renamed, joined or foreign is named."""

from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.errors import GGUFError
from pyggtrain.gguf import GGUFFile, TypedValue, typed_metadata, write_gguf


def split(model: GGUFFile, folder: Path, count: int, *, name: str = "m") -> list[Path]:
    """Split as llama.cpp's gguf-split does: all metadata in the first part, equal shares of the tensors."""
    tensors = list(model.tensors.values())
    paths = []
    for number in range(count):
        share = tensors[number * len(tensors) // count : (number + 1) * len(tensors) // count]
        keys: dict[str, TypedValue] = {
            "split.no": TypedValue("u16", number),
            "split.count": TypedValue("u16", count),
            "split.tensors.count": TypedValue("i32", len(tensors)),
        }
        if number == 0:
            keys = {**typed_metadata(model), **keys}
        paths.append(folder / f"{name}-{number + 1:05d}-of-{count:05d}.gguf")
        write_gguf(paths[-1], keys, share)
    return paths


@pytest.fixture
def parts(tiny_llama_path: Path, tmp_path: Path) -> list[Path]:
    return split(GGUFFile(tiny_llama_path), tmp_path, 3)


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole_model(parts: list[Path], opened: int, tiny_llama_path: Path) -> None:
    whole, file = GGUFFile(tiny_llama_path), GGUFFile(parts[opened])
    assert file.path == parts[0]
    assert list(file.tensors) == list(whole.tensors)
    for name, tensor in whole.tensors.items():
        assert torch.equal(file.tensors[name].blocks, tensor.blocks)
    assert file.header_sha256 == GGUFFile(parts[0]).header_sha256


def test_llama_cpp_loads_what_we_take_for_the_first_part(parts: list[Path], tiny_llama_path: Path) -> None:
    tokens = [1, 2, 3]
    split_session = _bridge.Session(str(GGUFFile(parts[2]).path), num_ctx=8, num_ubatch=8, num_threads=1)
    whole_session = _bridge.Session(str(tiny_llama_path), num_ctx=8, num_ubatch=8, num_threads=1)
    assert torch.equal(torch.from_dlpack(split_session.logits(tokens)), torch.from_dlpack(whole_session.logits(tokens)))


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[2].unlink()
    with pytest.raises(GGUFError, match="m-00003-of-00003.gguf"):
        GGUFFile(parts[0])


def test_a_part_under_another_name_is_refused_with_advice(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(GGUFError, match="part 1 of 3 .*original names"):
        GGUFFile(renamed)


def test_exchanged_parts_are_refused(parts: list[Path]) -> None:
    second, third = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(third)
    parts[2].write_bytes(second)
    with pytest.raises(GGUFError, match="says it is part 3 of 3; needed: part 2"):
        GGUFFile(parts[0])


def test_parts_joined_with_cat_are_refused_with_advice(parts: list[Path], tmp_path: Path) -> None:
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(GGUFError, match="llama-gguf-split --merge"):
        GGUFFile(joined)


def test_a_part_of_another_model_is_refused(parts: list[Path], smollm2: GGUFFile, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    foreign = split(smollm2, folder, 3)
    parts[2].write_bytes(foreign[2].read_bytes())
    with pytest.raises(GGUFError, match="another model"):
        GGUFFile(parts[0])


@pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_a_name_that_counts_wrongly_is_refused_at_once(name: str, parts: list[Path]) -> None:
    wrong = parts[0].rename(parts[0].with_name(name))
    with pytest.raises(GGUFError, match="is named part"):
        GGUFFile(wrong)


def test_a_missing_file_with_a_part_name_is_just_missing(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="No such file"):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


def test_split_keys_of_another_type_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"split.count": "three"}, [])
    with pytest.raises(GGUFError, match=r"split\.count.*needed: an integer"):
        GGUFFile(tmp_path / "m.gguf")


def test_parts_that_are_one_file_over_again_are_refused(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[1].symlink_to(parts[0].name)
    with pytest.raises(GGUFError, match="says it is part 1 of 3; needed: part 2"):
        GGUFFile(parts[2])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("split.count", TypedValue("u64", 1 << 63), "is part 1 of 9223372036854775808 of a split model"),
        ("split.count", TypedValue("u16", 65535), "is part 1 of 65535"),
        ("split.count", True, "needed: an integer"),
        ("split.no", TypedValue("arr[u16]", [0]), "needed: an integer"),
    ],
)
def test_hostile_counts_look_for_no_files(key: str, value: TypedValue | bool, said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {key: value}, [])
    with pytest.raises(GGUFError, match=said):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [("split.no", -1), ("split.no", 1 << 40), ("split.count", -3), ("split.count", 0), ("split.tensors.count", -1)],
)
def test_hostile_numbers_in_a_part_are_refused(key: str, value: int, parts: list[Path]) -> None:
    file = _bridge.MappedGGUF(str(parts[0]))
    keys = {name: TypedValue(file.value_type(name), file.value(name)) for name in file.keys()}  # noqa: SIM118
    write_gguf(parts[0], {**keys, key: TypedValue("i64", value)}, [])
    with pytest.raises(GGUFError, match="needed: part 1 of 3|hold .* tensors"):
        GGUFFile(parts[1])
