"""nn.batch: documents in one row, and the shift of labels."""

import pytest
import torch

from pyggtrain.errors import DataError
from pyggtrain.nn import Batch


def test_labels_are_shifted_inside_each_document():
    batch = Batch.from_documents([([5, 6, 7], [-100, 6, 7]), ([8], [8]), ([9, 10], [9, 10])])
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    # No document predicts the first token of the next; a first label is never used.
    assert batch.targets_T.tolist() == [6, 7, -100, -100, 10, -100]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert (batch.num_tokens, batch.num_targets, batch.num_documents) == (6, 3, 3)


def test_dtypes_are_those_promised():
    batch = Batch.from_documents([([1, 2], [1, 2])])
    assert (batch.tokens_T.dtype, batch.positions_T.dtype, batch.targets_T.dtype) == (torch.int64,) * 3
    assert batch.cu_seqlens.dtype == torch.int32


def test_tokens_move_to_the_device_and_bounds_stay():
    batch = Batch.from_documents([([1, 2, 3], [-100, 2, 3]), ([4, 5], [4, -100])])
    moved = batch.to("meta")
    for name in ("tokens_T", "positions_T", "targets_T", "supervised"):
        assert getattr(moved, name).device.type == "meta"
    assert moved.cu_seqlens.device.type == "cpu"
    # Known without asking the device.
    assert (moved.num_tokens, moved.num_documents, moved.num_targets, moved.longest_document) == (5, 2, 2, 3)


@pytest.mark.parametrize(
    ("documents", "named"),
    [
        ([], "no documents"),
        ([([1], [1]), ([], [])], "Document 1 has 0 tokens"),
        ([([1, 2], [1])], "2 tokens and 1 labels"),
    ],
)
def test_wrong_documents_are_named(documents, named):
    with pytest.raises(DataError, match=named):
        Batch.from_documents(documents)
