"""Operations that move numbers without changing them."""

from math import prod

import torch

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering
from pyggtrain.ops.dequantize import block_sizes

# Sizes of what flows through a graph; a view of a weight may also be of a block type.
_ITEM_BYTES = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i64": 8, "i8": 1}


def in_numbers(num_bytes: int, type: str) -> int:
    """A stride or offset in numbers instead of bytes, for a ggml type in lower case."""
    if type in _ITEM_BYTES:
        return num_bytes // _ITEM_BYTES[type]
    block_size, block_bytes = next(sizes for name, sizes in block_sizes().items() if name.lower() == type.lower())
    return num_bytes // block_bytes * block_size


def read_view(memory: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """The numbers of contiguous memory that a view addresses.

    Nearly every view is a box in some reshaping of the memory; reshaping and narrowing has a much cheaper gradient
    than `as_strided`, which remains for the others (overlapping windows).

    Args:
        memory: any shape; read in the order of its dimensions.
        shape, strides, offset: of the view, in numbers.
    """
    if 0 in shape:
        return memory.flatten()[:0].reshape(shape)
    box = _box(memory.numel(), shape, strides, offset)
    if box is None:
        return memory.contiguous().as_strided(shape, strides, offset)
    extents, starts, sizes, dims = box
    view = memory.reshape(extents)
    for dim, (start, size, extent) in enumerate(zip(starts, sizes, extents, strict=True)):
        if size != extent:
            view = view.narrow(dim, start, size)
    # The trailing extent, if the view does not step by 1, has one number left.
    return view.reshape(sizes[: len(dims)]).permute(_inverse(dims)).reshape(shape)


def write_view(
    memory: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The memory with the numbers that a view addresses replaced by x's; arguments as for `read_view`."""
    places = torch.arange(memory.numel(), device=memory.device).as_strided(shape, strides, offset)
    # Not as_strided_scatter: its gradient for the memory is that of the replaced numbers, not of the kept (torch 2.13).
    return memory.flatten().scatter(0, places.flatten(), x.to(memory.dtype).flatten()).reshape(memory.shape)


def _box(
    total: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """(extents to reshape the memory to, first number and size in each, which dimension of the view each one is), or
    None.
    """
    dims = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: -strides[dim])
    extents: list[int] = []
    starts: list[int] = []
    outer = total
    for dim in dims:
        if strides[dim] == 0 or outer % strides[dim]:
            return None
        extents.append(outer // strides[dim])
        starts.append(offset // strides[dim])
        offset %= strides[dim]
        outer = strides[dim]
    sizes = [shape[dim] for dim in dims]
    if outer > 1:
        extents.append(outer)
        starts.append(offset)
        sizes.append(1)
    if any(start + size > extent for start, size, extent in zip(starts, sizes, extents, strict=True)):
        return None
    return extents, starts, sizes, dims


def _inverse(dims: list[int]) -> list[int]:
    """Where each dimension of the view, those of size 1 left out, stands in `dims`."""
    return [dims.index(dim) for dim in sorted(dims)]


def _view(graph: Graph, node: Node) -> Kernel:
    def kernel(frame: Frame, memory: torch.Tensor) -> torch.Tensor:
        return read_view(memory, *_address(frame, node))

    return kernel


def _write(graph: Graph, node: Node) -> Kernel:
    """The memory with the view replaced by new numbers."""

    def kernel(frame: Frame, memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shape, strides, offset = _address(frame, node)
        if prod(shape) == memory.numel():
            return x.reshape(memory.shape).to(memory.dtype)
        return write_view(memory, x, shape, strides, offset)

    return kernel


def _address(frame: Frame, node: Node) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    strides = [in_numbers(stride, node.type) for stride in frame.shape(node.strides)]
    if node.type not in _ITEM_BYTES:
        strides[-1] = 1
    (offset,) = frame.shape((node.view_offset,))
    return frame.shape(node.shape), tuple(strides), in_numbers(offset, node.type)


def _reshape(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x: x.reshape(frame.shape(node.shape))


def _copy(graph: Graph, node: Node) -> Kernel:
    """The same numbers in another shape, and as another kind where integers become floats or the reverse.

    Between kinds of float nothing changes: see `rewrite.forward_casts`.
    """
    to_integers = node.type.startswith("i")

    def kernel(frame: Frame, x: torch.Tensor, *_: None) -> torch.Tensor:
        x = x.reshape(frame.shape(node.shape))
        if to_integers == (not x.is_floating_point()):
            return x
        return x.int() if to_integers else x.float()

    return kernel


def _permute(graph: Graph, node: Node) -> Kernel:
    dims = tuple(node.integer(index) for index in range(4))
    return lambda frame, x: x.permute(dims)


def _transpose(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x: x.transpose(-1, -2)


def _concat(graph: Graph, node: Node) -> Kernel:
    dim = node.integer(0)
    return lambda frame, a, b: torch.cat([a, b], dim)


def _repeat(graph: Graph, node: Node) -> Kernel:
    return lambda frame, x, *_: x.repeat(
        [want // have for want, have in zip(frame.shape(node.shape), x.shape, strict=True)]
    )


def _pad(graph: Graph, node: Node) -> Kernel:
    # Parameters 0 to 7 are (before, after) of each dimension from the last one on, which is torch's order as well.
    widths = [node.integer(index) for index in range(8)]
    return lambda frame, x: torch.nn.functional.pad(x, widths)


def _set(graph: Graph, node: Node) -> Kernel:
    """a with the box that begins at an offset replaced by b; parameters are strides and offset in bytes."""

    def kernel(frame: Frame, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        *strides, offset = (in_numbers(value, node.type) for value in frame.shape(node.params[:4]))
        return write_view(a, b, tuple(b.shape), (*strides, 1), offset)

    return kernel


LOWERINGS: dict[str, Lowering] = {
    "CONCAT": _concat,
    "CONT": _reshape,
    "CPY": _copy,
    "DUP": _reshape,
    "PAD": _pad,
    "PERMUTE": _permute,
    "REPEAT": _repeat,
    "RESHAPE": _reshape,
    "SET": _set,
    "TRANSPOSE": _transpose,
    "VIEW": _view,
    "WRITE": _write,
}
