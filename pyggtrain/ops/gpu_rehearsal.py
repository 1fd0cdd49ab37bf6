"""A rehearsal of a GPU's run: its own program goes over tensors without memory, on any machine, with a GPU or without.

The operations look at their tensors to decide what they do, and ask the card a few things. So here

* a tensor without memory says that it lies on the first GPU, and what is asked for there is made without memory;
* Triton's launches, streams and events do nothing, and no product is timed. Kernels allocate before they launch, so
  every buffer is made in the order of the real run. Where Triton is missing, something with its name stands in;
* attention of torch's makes what cuDNN's and flash attention make: no scores.

The host's memory is not counted. Small tensors there are real, since bounds of documents decide sizes; floats of some
size, pinned memory and the file's own blocks have no memory either, and copying them to the GPU makes a buffer there.
"""

import importlib
import importlib.util
import pkgutil
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from pyggtrain import _bridge, kernels
from pyggtrain.gguf import file as gguf_file
from pyggtrain.ops import product_choice, workspace
from pyggtrain.ops.rehearsal import (
    NAMESPACE,
    TO_NUMBER,
    NewStorage,
    has_device,
    map_tensors,
    replaced,
    silent,
    taken_in,
    tensors_in,
    to_numbers,
    with_meta,
)

GPU = torch.device("cuda", 0)
_META = torch.device("meta")
_CUDA_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_ATEN = torch.ops.aten
# Kernels' references, which no run needs.
_NOT_RUN = f"{kernels.__name__}.reference"
_TENSOR = torch._C.TensorBase
# Floats and bytes on the host from this size on have no memory: nothing but integers decides sizes.
_LARGE_BYTES = 1 << 16
# What is taken for the card where there is none: an H200's.
_CAPABILITY, _NUM_PROCESSORS = (9, 0), 132
# Functions that take a device.
_MAKERS = (
    *("empty", "empty_strided", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint"),
    *("randperm", "tensor", "as_tensor", "scalar_tensor", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like"),
)
_METHODS = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")
Sent = Callable[[int, int, int], None]
# Storages of the host without memory, by the address of torch's own record. A model keeps some between rehearsals.
_host: dict[int, weakref.ref[torch.UntypedStorage]] = {}


class _ToldOfGpu(TorchDispatchMode):
    """Keeps apart real tensors, those on the GPU and those of the host without memory; tells of the GPU's storages."""

    def __init__(self, on_new: NewStorage, on_sent: Sent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_new, self._on_sent = on_new, on_sent
        self._operations = [""]
        # torch's own code sees tensors without memory as what they are.
        self._is_inside_torch = False
        self.makes_on_host = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler at the first operation, which takes a second.
        return False

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the GPU's."""
        return bool(_TENSOR.is_meta.__get__(tensor)) and not self._is_inside_torch and not self._is_of_host(tensor)  # type: ignore[attr-defined]

    def put_on_host(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors without memory are the host's from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            _host[key] = weakref.ref(storage, lambda _, key=key: _host.pop(key, None))  # type: ignore[misc]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((*args, *kwargs.values())))
        bare = [tensor for tensor in tensors if tensor.is_meta]
        if func.namespace == NAMESPACE and bare:
            return self._run_kernel(func, args, kwargs)
        was_inside, self._is_inside_torch = self._is_inside_torch, True
        try:
            return self._run(func, args, kwargs, tensors, bare)
        finally:
            self._is_inside_torch = was_inside

    def _run(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], bare: list[torch.Tensor]
    ) -> Any:
        device = kwargs.get("device")
        is_asked_for = device is not None and torch.device(device).type == "meta"
        if not bare:
            if not tensors and has_device(func) and not is_asked_for:
                return self._make_on_host(func, args, kwargs)
            result = func(*args, **kwargs)
            return self._tell(result) if is_asked_for else result
        if func in TO_NUMBER:
            return 1.0 if bare[0].is_floating_point() else 1
        if len(bare) < len(tensors):
            args, kwargs = map_tensors(taken_in, args), map_tensors(taken_in, kwargs)
        are_hosts = [self._is_of_host(tensor) for tensor in bare]
        if func is _ATEN.copy_.default and are_hosts == [True, False]:
            place = bare[0].untyped_storage()
            self._on_sent(bare[1].numel() * bare[1].itemsize, place._cdata, place.nbytes())
        if func in _FAKES:
            return self._tell(_FAKES[func](self._tell, *args, **kwargs))
        if has_device(func):
            kwargs = kwargs | {"device": _META}
        result = func(*args, **kwargs)
        goes_to_host = device is not None and not is_asked_for
        if goes_to_host or (all(are_hosts) and not is_asked_for):
            if all(are_hosts) or not _shares_memory(result, bare):
                self.put_on_host(list(tensors_in((result,))))
            return result
        return self._tell(result)

    def _make_on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = func(*args, **{**kwargs, "device": _META, "pin_memory": False})
        is_large = made.numel() * made.itemsize >= _LARGE_BYTES
        if self.makes_on_host or (is_large and (made.is_floating_point() or made.dtype == torch.uint8)):
            self.put_on_host([made])
            return made
        return func(*args, **kwargs)

    def _tell(self, result: Any) -> Any:
        for tensor in tensors_in((result,)):
            if not self._is_of_host(tensor):
                self._on_new(tensor.untyped_storage(), self._operations[-1])
        return result

    def _is_of_host(self, tensor: torch.Tensor) -> bool:
        return bool(_host) and tensor.untyped_storage()._cdata in _host

    def _run_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._operations.append(func._schema.name.removeprefix(f"{NAMESPACE}::"))
        try:
            with self:
                return func.redispatch(_CUDA_KERNEL, *args, **kwargs)
        finally:
            self._operations.pop()


@contextmanager
def gpu_rehearsal(on_new: NewStorage, on_sent: Sent = lambda num_bytes, place, size: None) -> Iterator[None]:
    """Inside, a program for a GPU runs and computes nothing.

    Args:
        on_new: hears of every storage that is made on the GPU.
        on_sent: hears of each copy from the GPU to the host: its bytes, a number for the storage that it goes to, and
            the size of that.
    """
    # torch imports its compiler at some operation without memory; not while its functions are others.
    import torch._dynamo  # noqa: F401

    told = _ToldOfGpu(on_new, on_sent)
    with (
        workspace.set_aside(),
        _with_kernels(),
        warnings.catch_warnings(),
        replaced([*_of_torch(told), *_of_the_card(), *_of_ours()]),
        _own_grids(),
        told,
    ):
        # torch's checkpoints ask for the GPU's kind of autocast.
        warnings.filterwarnings("ignore", message=".*CUDA is not available")
        yield


def _shares_memory(result: Any, tensors: Sequence[torch.Tensor]) -> bool:
    known = {tensor.untyped_storage()._cdata for tensor in tensors}
    return any(tensor.untyped_storage()._cdata in known for tensor in tensors_in((result,)))


_Tell = Callable[[Any], Any]


def _mm_dtype(tell: _Tell, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=_META)


def _given_out(tell: _Tell, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return out


def _cudnn_attention(tell: _Tell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The output, laid out as q, logsumexp, and the state of random numbers."""
    logsumexp = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device=_META)
    seed, offset = (torch.empty((), dtype=torch.int64, device=_META) for _ in range(2))
    return torch.empty_like(q), logsumexp, None, None, q.shape[2], k.shape[2], seed, offset, None


def _cudnn_attention_backward(
    tell: _Tell, d_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # In memory that the library asks torch for: the gradient of q is summed in float32, those of k and v are made for
    # each head of q before they are added up.
    scratch = [tell(torch.empty(q.shape, dtype=torch.float32, device=_META))]
    if k.shape[1] < q.shape[1]:
        scratch += tell((torch.empty_like(q), torch.empty_like(q)))
    gradients = tell(tuple(torch.empty_like(x) for x in (q, k, v)))
    del scratch
    return gradients


def _nonzero(tell: _Tell, x: torch.Tensor) -> torch.Tensor:
    """As if nothing were zero: a count that only a run would know."""
    return torch.empty(x.numel(), x.dim(), dtype=torch.int64, device=_META)


# What has no form without memory in each torch, or not a GPU's.
_FAKES: dict[Any, Callable[..., Any]] = {
    _ATEN.nonzero.default: _nonzero,
    _ATEN.mm.dtype: _mm_dtype,
    _ATEN.mm.dtype_out: _given_out,
    _ATEN._scaled_mm.out: _given_out,
    _ATEN._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    _ATEN._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
}


def _is_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _maker(told: _ToldOfGpu) -> Callable[[Any], Any]:
    """A function that makes tensors: the GPU's without memory, pinned ones of the host without memory too."""

    def change(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_gpu(kwargs.get("device")):
                kwargs["device"] = _META
            if not kwargs.pop("pin_memory", False):
                return make(*args, **kwargs)
            told.makes_on_host = True
            try:
                return make(*args, **kwargs)
            finally:
                told.makes_on_host = False

        return call

    return change


def _mover(told: _ToldOfGpu) -> Callable[[Any], Any]:
    """Tensor.to."""

    def change(to: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not any(_is_gpu(value) for value in (*args, *kwargs.values())):
                return to(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            if tensor.is_meta and not told.is_on_gpu(tensor):
                values = (*args, *kwargs.values())
                dtype = next((value for value in values if isinstance(value, torch.dtype)), tensor.dtype)
                return torch.empty_like(tensor, dtype=dtype, device=_META)
            args = tuple(_META if _is_gpu(value) else value for value in args)
            kwargs = {name: _META if _is_gpu(value) else value for name, value in kwargs.items()}
            return to(tensor, *args, **kwargs)  # type: ignore[no-any-return]

        return call

    return change


def _of_torch(told: _ToldOfGpu) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    def is_cuda(old: Any) -> Any:
        return property(lambda tensor: told.is_on_gpu(tensor) or old.__get__(tensor))

    def device(old: Any) -> Any:
        return property(lambda tensor: GPU if told.is_on_gpu(tensor) else _host_device(tensor, old.__get__(tensor)))

    def _host_device(tensor: torch.Tensor, real: torch.device) -> torch.device:
        is_hosts = real.type == "meta" and not told._is_inside_torch
        return torch.device("cpu") if is_hosts else real

    maker = _maker(told)
    return [
        *((torch, name, maker) for name in _MAKERS),
        *((torch.Tensor, name, maker) for name in _METHODS),
        (torch.Tensor, "to", _mover(told)),
        (torch.Tensor, "is_cuda", is_cuda),
        (torch.Tensor, "device", device),
        (torch.Tensor, "tolist", to_numbers),
        (functional, "scaled_dot_product_attention", _flash_attention),
        (torch_optimizer, "_get_fused_kernels_supported_devices", with_meta),
    ]


def _flash_attention(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch picks attention's kernel by the device, which here is none: a GPU's is flash attention in half precision.
    With a mask, or in float32, it keeps the scores away in another way, but makes results of the same sizes.
    """

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not q.is_meta or q.shape[-1] != v.shape[-1]:
            return attention(q, k, v, *args, **options)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, options.get("is_causal", False), False, scale=options.get("scale"))[0]  # type: ignore[no-any-return]

    return call


class _Stream:
    """A stream, or an event, on which nothing happens."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "_Stream":
        return self

    def nothing(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = nothing


def _instead(value: Any) -> Callable[[Any], Any]:
    return lambda old: value


def _of_the_card() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What the operations ask and tell the driver."""

    def stream(stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (torch.cuda, "Stream", _instead(_Stream)),
        (torch.cuda, "Event", _instead(_Stream)),
        (torch.cuda, "stream", _instead(stream)),
        (torch.cuda, "current_stream", _instead(_Stream)),
        (torch.cuda, "synchronize", _instead(lambda device=None: None)),
        (torch.cuda, "is_current_stream_capturing", _instead(lambda: False)),
        (torch.cuda, "current_device", _instead(lambda: 0)),
    ]
    if not torch.cuda.is_available():
        card = SimpleNamespace(name="", multi_processor_count=_NUM_PROCESSORS)
        changes += [
            (torch.cuda, "get_device_capability", _instead(lambda device=None: _CAPABILITY)),
            (torch.cuda, "get_device_properties", _instead(lambda device=None: card)),
        ]
    return changes


def _of_ours() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    def upload(blocks: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        return torch.empty(blocks.shape, dtype=torch.uint8, device=_META)

    def for_real_ones(release: Any) -> Any:
        return lambda blocks: None if blocks.is_meta else release(blocks)

    return [
        (gguf_file, "upload", _instead(upload)),
        (gguf_file, "release", for_real_ones),
        (product_choice, "choose", _instead(lambda product, ways, device: "bf16")),
        (_bridge, "dequantize", silent),
        (_bridge, "mmq", _instead(lambda *args, **kwargs: None)),
        (_bridge, "mmq_workspace_bytes", _instead(lambda *args, **kwargs: 0)),
        *_of_triton(),
    ]


def _of_triton() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Launches, compiled or interpreted, which all go through `run`."""

    def run_real(run: Any) -> Any:
        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            is_bare = any(tensor.is_meta for tensor in tensors_in((*args, *kwargs.values())))
            return None if is_bare else run(kernel, *args, **kwargs)

        return call

    if importlib.util.find_spec("triton") is None:
        return []
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return [(kind, "run", run_real) for kind in (JITFunction, InterpretedFunction)]


@contextmanager
def _own_grids() -> Iterator[None]:
    """Tables of the decoders that are made inside stay inside."""
    from pyggtrain.kernels.dequant.grids import grid_on

    grid_on.cache_clear()
    try:
        yield
    finally:
        grid_on.cache_clear()


class _StandIn(ModuleType):
    """A module of Triton's where there is none: kernels can be defined, and launching them does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything:
    def __getattr__(self, name: str) -> "_Anything":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Anything":
        return self


class _Kernel:
    """What `triton.jit` makes of a function there."""

    def __init__(self, function: Any = None, **options: Any) -> None:
        pass

    def __call__(self, function: Any) -> "_Kernel":
        return self

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextmanager
def _with_kernels() -> Iterator[None]:
    """Where there is no Triton, kernels are imported with something in its place, and are gone afterwards."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    known = dict(sys.modules)
    triton, language = _StandIn("triton"), _StandIn("triton.language")
    parts = {
        "jit": _Kernel,
        "language": language,
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
    }
    vars(triton).update(parts)
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            if not module.name.startswith(_NOT_RUN):
                importlib.import_module(module.name)
        # torch looks for the real one.
        _put_back(known, ("triton",))
        yield
    finally:
        _put_back(known, ("triton", f"{kernels.__name__}."))


def _put_back(known: dict[str, ModuleType], prefixes: tuple[str, ...]) -> None:
    for name in [name for name in sys.modules if name.startswith(prefixes)]:
        if name in known:
            sys.modules[name] = known[name]
        else:
            del sys.modules[name]
