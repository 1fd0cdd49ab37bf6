"""Dequantisation against ggml itself, bit by bit."""

import importlib
import pkgutil

import pytest
import torch
from pyggtrain.kernels import dequant
from pyggtrain.kernels.dequant import DECODERS, dequantize
from pyggtrain.kernels.dequant.grids import GRIDS
from pyggtrain.kernels.reference import dequant as reference
from pyggtrain.kernels.reference.cases import DEQUANTIZE_CASES, DequantizeCase, random_blocks
from pyggtrain.kernels.reference.checks import CHECKS, Check
from pyggtrain.kernels.reference.comparison import same_bits

from pyggtrain.errors import UnsupportedError

TYPES = pytest.mark.parametrize("type", list(DECODERS))
CASES = pytest.mark.parametrize("case", DEQUANTIZE_CASES, ids=lambda case: case.id)


def ggml_values(blocks: torch.Tensor, type: str) -> torch.Tensor:
    """float32 [rows, K] as ggml's own C code makes them."""
    bridge = pytest.importorskip("pyggtrain._bridge", reason="the bridge is not built")
    decoder = DECODERS[type]
    out = torch.empty(blocks.shape[0], blocks.shape[1] // decoder.block_bytes * decoder.block_size)
    bridge.dequantize(type, blocks, out, 1)
    return out


@TYPES
@CASES
def test_reference_equals_ggml(type: str, case: DequantizeCase) -> None:
    columns = case.row_blocks * DECODERS[type].block_size
    blocks = random_blocks(type, case.rows, columns, generator=torch.Generator().manual_seed(0))
    assert same_bits("", reference.dequantize(blocks, type, dtype=torch.float32), ggml_values(blocks, type)).passed


# The package of that name dequantises all but these two.
@pytest.mark.parametrize("type", [type for type in DECODERS if type not in ("Q1_0", "Q2_0")])
def test_reference_equals_gguf_package(type: str) -> None:
    gguf = pytest.importorskip("gguf")
    quant_type = gguf.GGMLQuantizationType[type]
    blocks = random_blocks(type, 5, 4 * DECODERS[type].block_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        reference.dequantize(blocks, type, dtype=torch.float32),
        torch.from_numpy(gguf.dequantize(blocks.numpy(), quant_type)),
    )


@pytest.mark.parametrize("check", CHECKS["dequantize"], ids=lambda check: check.id)
def test_kernel_equals_reference(check: Check, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        for comparison in check.run(dtype, device):
            assert comparison.passed, (dtype, comparison)


@TYPES
def test_kernel_reads_a_slice_of_rows(type: str, device: torch.device) -> None:
    columns = 2 * DECODERS[type].block_size
    blocks = random_blocks(type, 20, columns, generator=torch.Generator(device).manual_seed(3))
    part = dequantize(blocks[16:], type, dtype=torch.float32)
    assert torch.equal(part, reference.dequantize(blocks, type, dtype=torch.float32)[16:])


def test_sizes_are_ggmls() -> None:
    bridge = pytest.importorskip("pyggtrain._bridge", reason="the bridge is not built")
    quantised = {name: type for name, type in bridge.quant_types().items() if type.is_quantized}
    # activations inside a matrix product, never tensors of a file
    for name in ("Q8_1", "Q8_K"):
        quantised.pop(name, None)
    assert {name: (type.block_size, type.block_bytes) for name, type in quantised.items()} == {
        name: (decoder.block_size, decoder.block_bytes) for name, decoder in DECODERS.items()
    }


def test_every_type_has_one_file_and_one_reference() -> None:
    pytest.importorskip("triton")
    files = {module.name for module in pkgutil.iter_modules(dequant.__path__)} - {"unpack", "kernel", "grids"}
    assert files == {type.lower() for type in DECODERS}
    assert list(reference.FUNCTIONS) == list(DECODERS)
    for type in DECODERS:
        assert hasattr(importlib.import_module(f"pyggtrain.kernels.dequant.{type.lower()}"), "decode")


def test_grids_have_ggmls_sizes() -> None:
    shapes = {name: tuple(grid.rows().shape) for name, grid in GRIDS.items()}
    assert shapes == {
        "IQ1": (2048, 8),
        "IQ2_XXS": (256, 8),
        "IQ2_XS": (512, 8),
        "IQ2_S": (1024, 8),
        "IQ3_XXS": (256, 4),
        "IQ3_S": (512, 4),
    }


def test_unknown_type_names_those_that_exist() -> None:
    with pytest.raises(UnsupportedError, match="Q8_1.*Q4_K"):
        dequantize(torch.zeros(1, 36, dtype=torch.uint8), "Q8_1")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (torch.zeros(2, 143, dtype=torch.uint8), "multiple of 144"),
        (torch.zeros(2, 288, dtype=torch.uint8)[:, ::2], "contiguous"),
        (torch.zeros(2, 144), "uint8"),
        (torch.zeros(288, dtype=torch.uint8), "row_bytes"),
    ],
    ids=["part of a block", "strided", "float", "one-dimensional"],
)
def test_wrong_blocks_are_refused(blocks: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize(blocks, "Q4_K")


def test_wrong_out_and_crooked_address_are_refused(device: torch.device) -> None:
    blocks = torch.zeros(2, 144, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"needed: \[2, 256\]"):
        dequantize(blocks, "Q4_K", out=torch.empty(2, 255, device=device))
    crooked = torch.zeros(289, dtype=torch.uint8, device=device)[1:].view(2, 144)
    with pytest.raises(ValueError, match="multiple of 16"):
        dequantize(crooked, "Q4_K")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("out_padding", [0, 64], ids=["dense", "strided"])
def test_more_than_2_to_31_weights(out_padding: int) -> None:
    rows, columns = 2**19 + 3, 4096
    blocks = random_blocks("Q4_K", 1024, columns, generator=torch.Generator("cuda").manual_seed(4)).repeat(
        rows // 1024 + 1, 1
    )[:rows]
    out = torch.empty(rows, columns + out_padding, dtype=torch.bfloat16, device="cuda")
    dequantize(blocks.contiguous(), "Q4_K", out=out[:, :columns])
    expected = reference.dequantize(blocks[:1024].contiguous(), "Q4_K")
    assert torch.equal(out[:1024, :columns], expected)
    assert torch.equal(out[-3:, :columns], expected[:3])
