"""The file's tensors as modules, at the place in the module tree that their names give."""

import torch
from torch import nn

from pyggtrain import ops
from pyggtrain.gguf import GGUFFile, QuantTensor
from pyggtrain.nn import ExpertLinear, QuantLinear

_INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}


class FrozenTensor(nn.Module):
    """A tensor that no adapter changes. Its blocks are the buffer `weight`, at the file's own memory on a CPU.

    Args:
        tensor: any type and shape.
    """

    weight: torch.Tensor

    def __init__(self, tensor: QuantTensor) -> None:
        super().__init__()
        self.gguf_name = tensor.name
        self.quant_type = tensor.type
        self.shape = tensor.shape
        self.register_buffer("weight", tensor.blocks)

    @property
    def quant(self) -> QuantTensor:
        """The tensor as the file describes it."""
        return QuantTensor(name=self.gguf_name, type=self.quant_type, shape=self.shape, blocks=self.weight)

    def values(self) -> torch.Tensor:
        """The numbers in four dimensions, as a graph sees them: float32 (a view where the file stores that), or
        integers.
        """
        if self.quant_type == "F32":
            numbers = self.weight.view(torch.float32).reshape(self.shape)
        elif self.quant_type in _INTEGERS:
            numbers = self.weight.view(_INTEGERS[self.quant_type]).reshape(self.shape)
        else:
            numbers = ops.dequantize(self.quant)
        return numbers.reshape((1,) * (4 - len(self.shape)) + self.shape)

    def extra_repr(self) -> str:
        return f"{self.gguf_name}, {self.quant_type}, {tuple(self.shape)}"


def as_matrix(tensor: QuantTensor) -> QuantTensor:
    """A vector as a matrix of one row; a matrix as it is."""
    if len(tensor.shape) == 2:
        return tensor
    return QuantTensor(
        name=tensor.name, type=tensor.type, shape=(1, *tensor.shape), blocks=tensor.blocks.reshape(1, -1)
    )


class Weights:
    """Modules for the tensors that a graph asks for, each made once.

    Args:
        root: where they are put: "blk.0.attn_q.weight" becomes the buffer `weight` of `root.blk.0.attn_q`, so that the
            names in `root.state_dict()` are the file's.
        file: opened GGUF file.
        device: where blocks go; on a CPU they stay in the mapping.
        compute: of the products, see `ops.quant_linear`.

    Attributes:
        device: see above.
        modules: by the tensor's name.
    """

    def __init__(self, root: nn.Module, file: GGUFFile, *, device: str, compute: str) -> None:
        self._root = root
        self._file = file
        self.device = device
        self._compute = compute
        self.modules: dict[str, FrozenTensor | QuantLinear | ExpertLinear] = {}

    def tensor(self, name: str) -> QuantTensor:
        return self._file.place(name, self.device)

    def take_frozen(self, name: str) -> FrozenTensor:
        """The module of a tensor that is not trained."""
        module = self.modules.get(name)
        if module is None:
            module = FrozenTensor(self.tensor(name))
            self._put(name, module)
        assert isinstance(module, FrozenTensor)
        return module

    def take_linear(self, name: str, bias: str | None, *, compute: str) -> QuantLinear:
        """The module of a matrix that an adapter may train."""
        module = self.modules.get(name)
        if module is None:
            bias_N = None if bias is None else ops.dequantize(self.tensor(bias))
            module = QuantLinear(as_matrix(self.tensor(name)), bias_N, compute=compute)
            self._put(name, module)
        assert isinstance(module, QuantLinear)
        return module

    def take_experts(self, name: str) -> ExpertLinear:
        """The module of a stack of experts that an adapter may train."""
        module = self.modules.get(name)
        if module is None:
            module = ExpertLinear(self.tensor(name), compute=self._compute)
            self._put(name, module)
        assert isinstance(module, ExpertLinear)
        return module

    @property
    def linears(self) -> dict[str, QuantLinear | ExpertLinear]:
        """What an adapter may train, in the order in which the model computes with it."""
        return {
            name: module for name, module in self.modules.items() if isinstance(module, (QuantLinear, ExpertLinear))
        }

    def _put(self, name: str, module: FrozenTensor | QuantLinear | ExpertLinear) -> None:
        self.modules[name] = module
        *folders, last = name.removesuffix(".weight").split(".")
        place = self._root
        for folder in folders:
            if not hasattr(place, folder):
                place.add_module(folder, nn.Module())
            place = place.get_submodule(folder)
        # A tensor that is not called ".weight" ("blk.0.ssm_a", "blk.0.attn_q.bias") may share its path with one that
        # is.
        place.add_module(last if not hasattr(place, last) else f"{last}_", module)
