"""gguf.imatrix: llama-imatrix's two formats, and files that only look like them."""

import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggtrain.errors import GGUFError
from pyggtrain.gguf import quantize_tensor, write_gguf
from pyggtrain.gguf.imatrix import importance_of, read_imatrix


def write_dat(path, entries, *, count=None, tail=b""):
    """The older format as save_imatrix_legacy writes it: values are sums, divided by the number of calls on reading."""
    parts = [struct.pack("<i", len(entries) if count is None else count)]
    for name, num_calls, values in entries:
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", num_calls, len(values))]
        parts.append(struct.pack(f"<{len(values)}f", *values))
    path.write_bytes(b"".join(parts) + tail)
    return path


def write_statistics(path, **tensors):
    statistics = [quantize_tensor(name.replace("__", "."), values, "F32") for name, values in tensors.items()]
    write_gguf(path, {"general.type": "imatrix"}, statistics)
    return path


def test_both_formats_say_the_same(tmp_path):
    sums = torch.tensor([[2.0, 4.0, 0.0, 8.0]])
    new = write_statistics(tmp_path / "i.gguf", a__weight__in_sum2=sums, a__weight__counts=torch.tensor([[2.0]]))
    tail = struct.pack("<ii", 7, 3) + b"txt"
    old = write_dat(tmp_path / "i.dat", [("a.weight", 2, sums[0].tolist())], tail=tail)
    for path in (new, old):
        importance = importance_of(read_imatrix(path), "a.weight", (3, 4))
        # A column that no token reached counts as the least important one.
        assert torch.equal(importance, torch.tensor([[1.0, 2.0, 1.0, 4.0]]))


def test_experts_have_rows_of_their_own(tmp_path):
    sums = torch.tensor([[2.0, 4.0], [0.0, 0.0], [9.0, 3.0]])
    new = write_statistics(
        tmp_path / "i.gguf", e__weight__in_sum2=sums, e__weight__counts=torch.tensor([[2.0], [0.0], [3.0]])
    )
    # llama-imatrix stores 1 for an expert without data here.
    old = write_dat(tmp_path / "i.dat", [("e.weight", 6, [6.0, 12.0, 6.0, 6.0, 18.0, 6.0])])
    for path in (new, old):
        importance = importance_of(read_imatrix(path), "e.weight", (3, 5, 2))
        assert torch.equal(importance, torch.tensor([[1.0, 2.0], [1.0, 1.0], [3.0, 1.0]]))


def test_a_tensor_that_it_does_not_know_has_no_importance(tmp_path):
    weights = read_imatrix(write_dat(tmp_path / "i.dat", [("a.weight", 1, [1.0, 2.0])]))
    assert importance_of(weights, "b.weight", (3, 2)) is None


def test_a_matrix_of_another_model_is_refused(tmp_path):
    weights = read_imatrix(write_dat(tmp_path / "i.dat", [("a.weight", 1, [1.0, 2.0, 3.0])]))
    with pytest.raises(GGUFError, match="3 values for a.weight.*another model"):
        importance_of(weights, "a.weight", (4, 2))


@pytest.mark.parametrize(
    ("entries", "changes", "reason"),
    [
        ([], {"count": 0}, "0 entries"),
        ([], {"count": -1}, "-1 entries"),
        ([], {"count": 2}, "name of entry 0"),
        ([("a", 1, [])], {}, "0 values"),
        ([("a", 1, [float("nan")])], {}, "not finite"),
        ([("a", 1, [-1.0])], {}, "negative"),
    ],
)
def test_damaged_old_files_are_refused(tmp_path, entries, changes, reason):
    with pytest.raises(GGUFError, match=reason):
        read_imatrix(write_dat(tmp_path / "i.dat", entries, **changes))


def test_a_huge_length_reads_nothing(tmp_path):
    path = tmp_path / "i.dat"
    path.write_bytes(struct.pack("<iii", 1, 2**31 - 1, 0))
    with pytest.raises(GGUFError, match="2147483647 bytes, 4 are left"):
        read_imatrix(path)
    path.write_bytes(struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, 2**31 - 1))
    with pytest.raises(GGUFError, match="8589934588 bytes, 0 are left"):
        read_imatrix(path)


def test_damaged_gguf_files_are_refused(tmp_path):
    with pytest.raises(GGUFError, match="lacks F32 tensors"):
        read_imatrix(write_statistics(tmp_path / "a.gguf", a__weight__in_sum2=torch.ones(1, 4)))
    with pytest.raises(GGUFError, match="2 counts for 3 matrices"):
        read_imatrix(
            write_statistics(
                tmp_path / "b.gguf", a__weight__in_sum2=torch.ones(3, 4), a__weight__counts=torch.ones(2, 1)
            )
        )
    with pytest.raises(GGUFError, match="cannot be read"):
        read_imatrix(tmp_path / "none.dat")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=64))
def test_any_bytes_are_an_importance_matrix_or_a_stated_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("imatrix") / "i.dat"
    path.write_bytes(data)
    with suppress(GGUFError):
        read_imatrix(path)
