"""A model with its LoRA pairs, seen as one of the two sides of a comparison with llama.cpp.

What is compared are weights, pairs and operations. A model that multiplies in 8-bit floats does so in its own half
precision here: their rounding is larger than the differences that a comparison looks for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pyggtrain.nn import Batch, LoraPair, Model


class TrainedModel:
    """Logits and layer outputs of a model with its pairs at any scale, as `parity.verify_adapter` wants them.

    Args:
        model: The model, with the pairs in its linears.
        pairs: The pairs by tensor name; empty for a base model.
    """

    def __init__(self, model: Model, pairs: Mapping[str, LoraPair]) -> None:
        self._model = model
        self._pairs = dict(pairs)

    @property
    def num_pairs(self) -> int:
        return len(self._pairs)

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers' outputs, as llama.cpp has them."""
        return [f"l_out-{index}" for index in range(len(self._model.layers))]

    def logits(self, tokens: Sequence[int], *, scale: float | None) -> torch.Tensor:
        """Logits [T, V] float32 on the CPU."""
        with self._at(scale):
            return self._model.logits(self._batch(tokens)).float().cpu()

    def layer_outputs(
        self, tokens: Sequence[int], *, scale: float | None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Output [T, D] float32 of each layer on the CPU, by name.

        With `inputs`, the layer that follows a tensor named there starts from that tensor instead of from our own.
        """
        outputs: dict[str, torch.Tensor] = {}
        given = inputs or {}

        def replace_input(module: nn.Module, arguments: tuple[Any, ...], *, previous: str) -> tuple[Any, ...]:
            x_TD, *others = arguments
            return given[previous].to(x_TD), *others

        def keep_output(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor, *, name: str) -> None:
            outputs[name] = output.float().cpu()

        hooks = []
        names = self.layer_names
        for previous, name, layer in zip([None, *names[:-1]], names, self._model.layers, strict=True):
            if previous is not None and previous in given:
                hooks.append(layer.register_forward_pre_hook(partial(replace_input, previous=previous)))
            hooks.append(layer.register_forward_hook(partial(keep_output, name=name)))
        try:
            self.logits(tokens, scale=scale)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def _batch(self, tokens: Sequence[int]) -> Batch:
        device = next(iter(self._model.linears.values())).weight.device
        return Batch.from_documents([(list(tokens), list(tokens))]).to(device)

    @contextmanager
    def _at(self, scale: float | None) -> Iterator[None]:
        """Let the pairs count `scale` times their own scale, without dropout or gradients; None takes them out."""
        linears = self._model.linears
        was_training = self._model.training
        trained_scales = {name: pair.scale for name, pair in self._pairs.items()}
        in_8_bits = [linear for linear in linears.values() if linear.compute == "fp8"]
        self._model.eval()
        try:
            for linear in in_8_bits:
                linear.compute = "auto"
            for name, pair in self._pairs.items():
                if scale is None:
                    linears[name].lora = None
                else:
                    pair.scale = trained_scales[name] * scale
            with torch.inference_mode():
                yield
        finally:
            for linear in in_8_bits:
                linear.compute = "fp8"
            for name, pair in self._pairs.items():
                linears[name].lora = pair
                pair.scale = trained_scales[name]
            self._model.train(was_training)
