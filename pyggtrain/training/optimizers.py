"""The optimisers, behind one dict: name in `TrainConfig.optim` -> how torch's optimiser of that kind is made.

Each is a torch.optim.Optimizer over the same groups of float32 parameters; `optim.Optimizer` sets the learning rate of
each step and stores what they keep. Two come from libraries that are no dependency of pyggtrain, and are imported when
they are asked for.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pyggtrain.errors import ConfigError
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.paging import window_bytes

Groups = list[dict[str, Any]]

# torch's own default. A moment of gradients whose step is made orthogonal has no use for Adam's betas.
_MUON_MOMENTUM = 0.95


class DecidesOnDevice:
    """An optimiser whose steps on a GPU can be launched before the host knows norm and loss (the protocol of
    torch.amp.GradScaler with fused optimisers).

    Attributes:
        grad_scale: float32 scalar on the device; gradients are divided by it. None: they are not.
        found_inf: float32 scalar on the device; 1 leaves all as it was. None: the step is taken.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def take_back(self, state: dict[str, Any]) -> None:
        """Count a step less in what is kept for a parameter, as its last one was left out."""


class _AdamW(DecidesOnDevice, torch.optim.AdamW):
    """torch's AdamW, without what keeps torch's compiler out of these methods: it imports that compiler (torch._dynamo,
    more than a second) at the first call, whether or not anything is ever compiled.
    """

    _step = inspect.unwrap(torch.optim.AdamW.step)
    _add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    _zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_grad(set_to_none)


def _adamw(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    """Loshchilov and Hutter 2019 (1711.05101), all float32."""
    return _AdamW(groups, **_adam_settings(config), fused=True)


def _adamw_8bit(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    """Dettmers et al. 2022 (2110.02861): moments as 8-bit dynamic codes in blocks of 256 with one scale each.

    bitsandbytes makes the tables of codes, computes it on CPUs (from 0.50 on), and keeps parameters of fewer than 4,096
    numbers in float32. On a GPU its kernel knows the default stream alone: `kernels.adamw_8bit` takes its place.
    """
    # It warns of 4-bit products that it could have faster, which nobody here asks it for.
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes
    finally:
        logger.setLevel(level)

    class AdamW8bit(DecidesOnDevice, bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]
        """The library's, without a wait for the device after each parameter; a group may ask for `optim_bits` = 32."""

        def get_config(self, group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(group_index, index, group)
            return config | {"optim_bits": group.get("optim_bits", config["optim_bits"])}

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group_index, group in enumerate(self.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, group_index, index)
                    if parameter.is_cuda:
                        self._update_on_gpu(group, parameter)
                    else:
                        self.update_step(group, parameter, group_index, index)

        def _update_on_gpu(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
            from pyggtrain.kernels.adamw_8bit import adamw_8bit

            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            state["step"] += 1
            is_coded = "qmap1" in state
            adamw_8bit(
                parameter.detach(),
                gradient.contiguous(),
                state["state1"],
                state["state2"],
                tables=(state["qmap1"], state["qmap2"]) if is_coded else None,
                scales=(state["absmax1"], state["absmax2"]) if is_coded else None,
                step=state["step"],
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                divisor=self.grad_scale,
                left_out=self.found_inf,
            )

        def take_back(self, state: dict[str, Any]) -> None:
            # The host counts; torch's own counts on the device.
            state["step"] -= 1

    return AdamW8bit(groups, **_adam_settings(config))


def _muon(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    """Jordan et al. 2024: each factor's step is its momentum made orthogonal.

    Steps are scaled as in Liu et al. 2025 (2502.16982), eq. 4, to the size that AdamW's have, so that learning rates
    carry over.
    """
    return torch.optim.Muon(
        groups,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=_MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )


def _schedule_free_adamw(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    """Defazio et al. 2024 (2405.15682). Gradients are taken at y, and the average x of all steps is what is saved."""
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(groups, **_adam_settings(config))
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _adam_settings(config: TrainConfig) -> dict[str, Any]:
    return {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }


OPTIMIZERS: dict[str, Callable[[Groups, TrainConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "paged_adamw": _adamw,
    "paged_adamw_8bit": _adamw_8bit,
    "muon": _muon,
    "schedule_free_adamw": _schedule_free_adamw,
}
# Those whose gradients and moments wait in host memory while a GPU computes (`paging`); the numbers are the same.
PAGED = frozenset({"paged_adamw", "paged_adamw_8bit"})
_LIBRARIES = {
    "adamw_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "schedule_free_adamw": "schedulefree",
}


# What they keep for each trained number, in bytes.
_STATE_BYTES = {"adamw": 8, "adamw_8bit": 2, "muon": 4, "schedule_free_adamw": 8}


def device_bytes(optim: str, num_parameters: int) -> tuple[int, int]:
    """What gradients and an optimiser's state take on a GPU.

    Args:
        optim: as `TrainConfig.optim`.
        num_parameters: trained numbers.
    """
    state = _STATE_BYTES[optim.removeprefix("paged_")]
    if optim in PAGED:
        return 0, min((4 + state) * num_parameters, window_bytes(state))
    return 4 * num_parameters, state * num_parameters


def host_bytes(optim: str, num_parameters: int) -> int:
    """What a GPU's paged optimiser keeps on the host; arguments as for `device_bytes`."""
    return (4 + _STATE_BYTES[optim.removeprefix("paged_")]) * num_parameters if optim in PAGED else 0


def check_optimizer(config: TrainConfig, shapes: Mapping[str, Iterable[int]] | None = None) -> None:
    """Refuse an optimiser that this installation or these parameters do not allow.

    Args:
        shapes: parameter name -> shape, once they are known.

    Raises:
        ConfigError: a library is missing, torch is too old, or a parameter is no matrix.
    """
    library = _LIBRARIES.get(config.optim)
    if library is not None and importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"optim: {config.optim} needs the package {library}, which is not installed. "
            "`pip install 'pyggtrain[optimizers]'`, or set optim to adamw."
        )
    if config.optim != "muon":
        return
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"optim: muon needs torch 2.9 or later, found {torch.__version__}. Update torch, or set optim to adamw."
        )
    for name, shape in (shapes or {}).items():
        if len(list(shape)) != 2:
            raise ConfigError(
                f"optim: muon makes steps of matrices orthogonal, and {name} has shape {list(shape)}. "
                "Set optim to adamw, or leave that weight out with exclude_modules."
            )


def make_optimizer(parameters: Mapping[str, torch.Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimiser that `config.optim` names.

    Its groups carry `lr_ratio`: the learning rate of a step is multiplied by it. lora_b gets `loraplus_lr_ratio`
    (Hayou et al. 2024, 2402.12354: both factors move equally far only if it is larger than 1), everything else 1.

    Raises:
        ConfigError: see `check_optimizer`.
    """
    check_optimizer(config, {name: parameter.shape for name, parameter in parameters.items()})
    by_ratio: dict[float, list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        ratio = config.loraplus_lr_ratio if name.endswith(".lora_b") else 1.0
        by_ratio.setdefault(ratio, []).append(parameter)
    groups: Groups = [{"params": members, "lr_ratio": ratio} for ratio, members in by_ratio.items()]
    return OPTIMIZERS[config.optim](groups, config)
