"""A rehearsal: a step of a CPU run goes over tensors without memory, and every buffer that it makes is told.

Such tensors (torch's meta tensors) have shape and dtype but no numbers. An operation's `register_fake` gives the shape
of its result and nothing of what it needs on the way. So here the operations of this package run their real kernels:
each buffer that a kernel makes is made, in the order of the real run. Only the bridge's functions do nothing.

What decides sizes has to be real: tokens, targets and bounds of documents are given as ordinary tensors, and whatever
is computed from these alone is computed. Two answers are assumed, since they would need numbers: a number that is read
is 1, and a router spreads its tokens evenly over a few experts. One expert's buffers are gone before the next one's are
made, so that going over all of hundreds would take long and find less than a real router's favourites need.

This is a CPU's run. A GPU's is rehearsed by `ops.gpu_rehearsal`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pyggtrain import _bridge
from pyggtrain.ops import workspace

NewStorage = Callable[[torch.UntypedStorage, str], None]
"""Told of each storage that is made: the storage, and the innermost operation of this package that made it ("" outside
of them). A storage may be told of more than once."""

NAMESPACE = "pyggtrain"
TO_NUMBER = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_BUSY_EXPERTS = 8
_INHERITED: Any = object()
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# torch.nn.attention.SDPBackend.FLASH_ATTENTION, whose import would cost a second.
_FLASH = 1


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one that holds nothing."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Told(TorchDispatchMode):
    """Keeps real tensors and those without memory apart, runs this package's kernels, and tells of new storages."""

    def __init__(self, on_new: NewStorage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_new = on_new
        self._operations = [""]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler at the first operation, which takes a second.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((*args, *kwargs.values())))
        bare = [tensor for tensor in tensors if tensor.is_meta]
        if tensors and not bare:
            return func(*args, **kwargs)
        if func.namespace == NAMESPACE:
            return self._run_kernel(func, args, kwargs)
        if func in TO_NUMBER:
            return 1.0 if bare[0].is_floating_point() else 1
        if func is torch.ops.aten.searchsorted.Tensor:
            return _bounds(args[0].numel(), args[1].numel())
        if len(bare) < len(tensors):
            args, kwargs = map_tensors(taken_in, args), map_tensors(taken_in, kwargs)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            # torch sees another device where none is: nothing is to be copied.
            return torch.ops.aten.alias.default(args[0])
        if has_device(func):
            kwargs = kwargs | {"device": "meta"}
        result = func(*args, **kwargs)
        for tensor in tensors_in((result,)):
            self._on_new(tensor.untyped_storage(), self._operations[-1])
        return result

    def _run_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._operations.append(func._schema.name.removeprefix(f"{NAMESPACE}::"))
        try:
            with self:
                return func.redispatch(_CPU_KERNEL, *args, **kwargs)
        finally:
            self._operations.pop()


@contextmanager
def rehearsal(on_new: NewStorage) -> Iterator[None]:
    """Inside, tensors have no memory: nothing is computed, and `on_new` hears of every storage that is made.

    Tensors made outside stay real until they meet one without memory.
    """
    with workspace.set_aside(), _prepared(), _Told(on_new):
        yield


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@cache
def has_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def taken_in(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else without_memory(tensor)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, item) for item in value)
    return {name: map_tensors(change, item) for name, item in value.items()} if isinstance(value, dict) else value


def _bounds(num_rows: int, num_bounds: int) -> torch.Tensor:
    """Where each expert's rows begin among sorted ones, and the last one's end."""
    with _disable_current_modes():
        num_busy = min(num_bounds - 1, _BUSY_EXPERTS)
        return torch.arange(num_bounds).clamp(max=num_busy) * num_rows // num_busy


def silent(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A function of compiled code that returns at once when it is given a tensor without memory."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(tensor.is_meta for tensor in tensors_in((*args, *kwargs.values()))):
            return None
        return compiled(*args, **kwargs)

    return call


def _cpu_attention(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch picks attention's kernel by the device. Meta tensors have none, so the CPU is asked in their stead."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        if q.is_meta:
            with _disable_current_modes():
                small_q, small_k, small_v = (torch.empty(*x.shape[:2], 2, x.shape[3], dtype=x.dtype) for x in (q, k, v))
                is_flash = torch._fused_sdp_choice(small_q, small_k, small_v, **options) == _FLASH
            if is_flash:
                flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return flash(q, k, v, 0.0, options.get("is_causal", False), scale=options.get("scale"))[0]  # type: ignore[no-any-return]
        return attention(q, k, v, **options)

    return call


def to_numbers(to_list: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def call(tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            return to_list(tensor)
        with _disable_current_modes():
            return to_list(torch.ones(tensor.shape, dtype=tensor.dtype))

    return call


def with_meta(fused_devices: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """torch's fused optimisers run on meta tensors, but the list of devices does not say so."""
    return lambda: [*fused_devices(), "meta"]


@contextmanager
def _prepared() -> Iterator[None]:
    """Put these functions in the place of others. For real tensors, in other threads too, they do what those do."""
    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (_bridge, "dequantize", silent),
        (_bridge, "mul_mat", silent),
        (functional, "scaled_dot_product_attention", _cpu_attention),
        (torch.Tensor, "tolist", to_numbers),
        (torch_optimizer, "_get_fused_kernels_supported_devices", with_meta),
    ]
    with replaced(changes):
        yield


@contextmanager
def replaced(changes: Sequence[tuple[Any, str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Inside, attributes have other values: (owner, name, from the old value to the new one)."""
    # What an owner only inherits is taken away again.
    originals = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in changes]
    for owner, name, change in changes:
        setattr(owner, name, change(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
