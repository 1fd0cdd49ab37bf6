import pytest
import torch
from pyggtrain.kernels.columns import copy_columns_


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 64), (130, 48), (3, 1500), (5, 0)])
def test_columns_are_copied_and_nothing_else(
    rows: int, columns: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        source = torch.randn(rows, columns + 9, device=device).to(dtype)
        target = torch.full((rows, columns + 5), 7.0, device=device, dtype=dtype)
        expected = target.clone()
        expected[:, 2 : 2 + columns] = source[:, 3 : 3 + columns]
        copy_columns_(target[:, 2 : 2 + columns], source[:, 3 : 3 + columns])
        assert torch.equal(target, expected)


def test_other_shapes_and_dtypes_are_refused(device: torch.device) -> None:
    zeros = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match="source"):
        copy_columns_(zeros, zeros[:, :3])
    with pytest.raises(ValueError, match="one dtype"):
        copy_columns_(zeros, zeros.double())
