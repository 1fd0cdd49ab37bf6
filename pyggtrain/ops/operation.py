"""How the operations here come into torch's dispatcher: by torch.library.Library, without torch.library.custom_op.

`custom_op` wraps each kernel so that torch's compiler leaves it alone, and imports that compiler (torch._dynamo, more
than a second) when the first kernel runs, whether or not anything is ever compiled. Its check that no result aliases an
argument, at each call, is left to the tests (`torch.library.opcheck`). The rest is the same: schema from the
signature, a kernel for each device, a fake one for shapes, and a gradient.
"""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NAMESPACE = "pyggtrain"
# Registrations last as long as this object.
_library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


class Operation(Generic[_P, _R]):
    """torch.ops.pyggtrain.<name>, callable like the function it was made from.

    Args:
        name: without the namespace.
        kernel: computes it; tensors come without gradient. No result may alias an argument.
        dispatch_keys: of the devices for which it does.
    """

    def __init__(self, name: str, kernel: Callable[_P, _R], dispatch_keys: tuple[str, ...]) -> None:
        schema = torch.library.infer_schema(kernel, mutates_args=())
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        for key in dispatch_keys:
            _library.impl(name, kernel, key)
        self._qualified_name = f"{_NAMESPACE}::{name}"
        self._overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        self.__doc__ = kernel.__doc__

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        result: _R = self._overload(*args, **kwargs)
        return result

    def register_fake(self, fake: Callable[_P, _R]) -> Callable[_P, _R]:
        """Say what the results look like without computing them, for tensors without memory; a decorator."""
        torch.library.register_fake(self._qualified_name, fake, lib=_library)
        return fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Give it a gradient, as `torch.library.register_autograd` describes."""
        torch.library.register_autograd(self._qualified_name, backward, setup_context=setup_context, lib=_library)


def operation(
    name: str, *, dispatch_keys: tuple[str, ...] = ("CPU", "CUDA")
) -> Callable[[Callable[_P, _R]], Operation[_P, _R]]:
    """Make an operation of the function below, which is its kernel.

    Args:
        name: without the namespace.
        dispatch_keys: of the devices that the kernel is for; "CompositeExplicitAutograd" is all of them.
    """

    def make(kernel: Callable[_P, _R]) -> Operation[_P, _R]:
        return Operation(name, kernel, dispatch_keys)

    return make
