"""NaN and infinity among the weights are found in every type, counted, named, and stop whoever wants to train."""

from pathlib import Path

import pytest
import torch

from pyggtrain import _bridge
from pyggtrain.cli import main
from pyggtrain.errors import GGUFError
from pyggtrain.gguf import GGUFFile, QuantTensor, quantize_tensor, typed_metadata, write_gguf
from pyggtrain.gguf.finite import check_finite, find_nonfinite

TYPES = _bridge.quant_types()


@pytest.mark.parametrize("type", sorted(TYPES))
def test_the_count_is_that_of_decoded_blocks(type: str) -> None:
    traits = TYPES[type]
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (64, 32 * traits.block_bytes), dtype=torch.uint8, generator=generator)
    decoded = torch.empty(64, 32 * traits.block_size)
    _bridge.dequantize(type, blocks, decoded, 1)
    is_bad = ~decoded.reshape(-1, traits.block_size).isfinite().all(1)
    # Random bytes hold many bad scales, in the types that can have one.
    assert bool(is_bad.any()) == (type != "NVFP4")
    first = int(is_bad.nonzero()[0]) if is_bad.any() else -1
    for num_threads in (1, 2):
        assert _bridge.count_nonfinite(type, blocks, num_threads) == (int(is_bad.sum()), first)


@pytest.mark.parametrize("type", sorted(TYPES))
def test_quantised_weights_are_finite(type: str) -> None:
    imatrix = torch.ones(512) if TYPES[type].needs_imatrix else None
    weight = quantize_tensor(
        "w", torch.randn(9, 512, generator=torch.Generator().manual_seed(3)), type, imatrix=imatrix
    )
    assert _bridge.count_nonfinite(type, weight.blocks, 1) == (0, -1)


@pytest.mark.parametrize("exponent", [252, 253, 254, 255])
def test_the_largest_scales_of_mxfp4_overflow_only_with_large_numbers(exponent: int) -> None:
    blocks = torch.tensor([[exponent, *[code * 17] * 16] for code in range(16)], dtype=torch.uint8)
    decoded = torch.empty(16, 32)
    _bridge.dequantize("MXFP4", blocks, decoded, 1)
    assert _bridge.count_nonfinite("MXFP4", blocks, 1)[0] == int((~decoded.isfinite().all(1)).sum())


def broken_copy(source: GGUFFile, path: Path) -> Path:
    """A copy with two bad blocks in one matrix and one bad number in a norm."""
    tensors = dict(source.tensors)
    name = "blk.1.attn_q.weight"
    matrix = quantize_tensor(name, torch.randn(tensors[name].shape), "Q8_0")
    matrix.blocks[3, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    matrix.blocks[9, 34:36] = torch.tensor([0x01, 0x7E], dtype=torch.uint8)
    norm = torch.ones(tensors["output_norm.weight"].shape)
    norm[5] = float("nan")
    tensors[name] = matrix
    # Not through the quantiser, which refuses what is not finite.
    tensors["output_norm.weight"] = QuantTensor("output_norm.weight", "F32", tuple(norm.shape), norm.view(torch.uint8))
    write_gguf(path, typed_metadata(source), tensors.values())
    return path


def test_bad_tensors_are_named_with_counts(tiny_llama_path: Path, tmp_path: Path) -> None:
    file = GGUFFile(broken_copy(GGUFFile(tiny_llama_path), tmp_path / "bad.gguf"))
    assert [(bad.name, bad.num_bad, bad.num_blocks, bad.first_row) for bad in find_nonfinite(file, num_threads=1)] == [
        ("output_norm.weight", 1, 64, 0),
        ("blk.1.attn_q.weight", 2, 128, 3),
    ]
    with pytest.raises(GGUFError) as caught:
        check_finite(file, num_threads=1)
    text = str(caught.value)
    assert "blk.1.attn_q.weight (Q8_0): 2 of 128 blocks of 32 weights hold NaN or infinity, the first in row 3" in text
    assert "output_norm.weight (F32): 1 of 64 weights hold" in text and "download it again" in text


def test_a_stack_of_experts_and_integers_are_taken(tmp_path: Path) -> None:
    experts = quantize_tensor("e.weight", torch.randn(3, 4, 256), "Q4_K")
    experts.blocks[2, 1, :2] = torch.tensor([0x00, 0xFC], dtype=torch.uint8)
    table = torch.full((2, 4), -1, dtype=torch.int32)
    write_gguf(tmp_path / "m.gguf", {}, [experts, QuantTensor("t", "I32", (2, 4), table.view(torch.uint8))])
    (bad,) = find_nonfinite(GGUFFile(tmp_path / "m.gguf"), num_threads=1)
    assert (bad.name, bad.num_bad, bad.first_row) == ("e.weight", 1, 9)


def test_info_and_verify_stop_at_it(smollm2: GGUFFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = dict(smollm2.tensors)
    good = tensors["blk.7.ffn_up.weight"]
    blocks = good.blocks.clone()
    blocks[11, 2:4] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    tensors[good.name] = QuantTensor(good.name, good.type, good.shape, blocks)
    path = tmp_path / "bad.gguf"
    write_gguf(path, typed_metadata(smollm2), tensors.values())
    named = "blk.7.ffn_up.weight (Q4_1): 1 of 27,648 blocks of 32 weights"
    assert main(["info", str(smollm2.path), "--check"]) == 0
    assert "All weights are finite" in capsys.readouterr().err
    for command in (
        ["info", str(path), "--check"],
        ["verify", str(path), "none.gguf"],
        ["train", str(path), "none.jsonl", "-o", str(tmp_path / "a.gguf")],
    ):
        assert main(command) == 2
        assert named in capsys.readouterr().err
