"""Preconditions that several launchers share."""

import torch


def check_rows(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Require the shape and device of `like` [T, D], and columns side by side; rows may lie any distance apart."""
    if tensor.shape != like.shape or tensor.stride(1) != 1 or tensor.device != like.device:
        raise ValueError(
            f"{name} is {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"needed: {list(like.shape)} with unit column stride on {like.device}."
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Require a tensor without gaps."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is {list(tensor.shape)} with strides {tensor.stride()}; needed: a contiguous tensor.")
