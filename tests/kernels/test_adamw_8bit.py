"""AdamW with moments of 8 bits: against float64 steps of the decoded moments, and against bitsandbytes."""

from typing import Any

import pytest
import torch
from pyggtrain.kernels.adamw_8bit import BLOCK, adamw_8bit

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.995), "eps": 1e-8, "weight_decay": 0.1}
# Part of a block, whole blocks, more blocks than a program takes.
SIZES = [(100,), (3, 512), (7, 300)]


def table(*, is_signed: bool) -> torch.Tensor:
    """256 sorted numbers, dense near zero, which is one of them."""
    magnitudes = torch.linspace(0, 1, 128 if is_signed else 256, dtype=torch.float64) ** 3
    if is_signed:
        magnitudes = torch.cat([-magnitudes.flip(0), magnitudes[1:], torch.tensor([1.0])])
        magnitudes[-2] = 0.999
    return magnitudes.float()


def coded(moment: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a moment in float64."""
    num_blocks = -(-moment.numel() // BLOCK)
    padded = torch.zeros(num_blocks * BLOCK, dtype=torch.float64)
    padded[: moment.numel()] = moment.flatten()
    scales = padded.view(num_blocks, BLOCK).abs().amax(1)
    parts = padded.view(num_blocks, BLOCK) / scales.where(scales > 0, torch.ones(()))[:, None]
    codes = (parts.flatten()[:, None] - table.double()).abs().argmin(1)[: moment.numel()]
    return codes.to(torch.uint8).view(moment.shape), scales.float()


def decoded(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    values = table.double()[codes.long().flatten()]
    return (values * scales.double().repeat_interleave(BLOCK)[: values.numel()]).view(codes.shape)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_coded", [True, False])
def test_a_step_is_that_of_float64(size: tuple[int, ...], is_coded: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter, gradient, m = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    v = torch.rand(size, generator=generator, dtype=torch.float64)
    # A block without any gradient, in its second step.
    if parameter.numel() > BLOCK:
        for tensor in (gradient, m, v):
            tensor.view(-1)[:BLOCK] = 0
    tables = table(is_signed=True), table(is_signed=False)
    states = [coded(one, its_table) for one, its_table in zip((m, v), tables, strict=True)]
    if is_coded:
        m, v = (decoded(*state, its_table) for state, its_table in zip(states, tables, strict=True))
        moments = [codes.to(device) for codes, _ in states]
    else:
        moments = [one.float().to(device) for one in (m, v)]
    parameter, gradient = parameter.float(), gradient.float()
    found = parameter.to(device, copy=True)
    scales = tuple(one.to(device, copy=True) for _, one in states)
    adamw_8bit(
        found,
        gradient.to(device),
        *moments,
        tables=tuple(one.to(device) for one in tables) if is_coded else None,  # type: ignore[arg-type]
        scales=scales if is_coded else None,  # type: ignore[arg-type]
        step=3,
        **SETTINGS,
    )
    (beta1, beta2), lr = SETTINGS["betas"], SETTINGS["lr"]
    m = beta1 * m + (1 - beta1) * gradient.double()
    v = beta2 * v + (1 - beta2) * gradient.double() ** 2
    change = m / (1 - beta1**3) / ((v / (1 - beta2**3)).sqrt() + SETTINGS["eps"])
    expected = parameter.double() * (1 - lr * SETTINGS["weight_decay"]) - lr * change
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=2e-6)
    for one, codes, scale, its_table in zip((m, v), moments, scales, tables, strict=True):
        if not is_coded:
            torch.testing.assert_close(codes.cpu().double(), one, rtol=1e-6, atol=1e-7)
            continue
        expected_codes, expected_scale = coded(one, its_table)
        torch.testing.assert_close(scale.cpu(), expected_scale, rtol=1e-6, atol=1e-8)
        # Only what lies in the middle of two entries may take the other one.
        errors = [(decoded(some.cpu(), expected_scale, its_table) - one).abs() for some in (codes, expected_codes)]
        torch.testing.assert_close(*errors, rtol=1e-4, atol=1e-6)


def test_steps_are_those_of_bitsandbytes(device: torch.device) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(20, 512, generator=generator)
    # What computes them on CPUs.
    theirs = torch.nn.Parameter(start.clone())
    optimizer = bitsandbytes.optim.AdamW8bit([theirs], **SETTINGS)
    ours, state = start.to(device, copy=True), None
    for step in range(1, 6):
        gradient = torch.randn(start.shape, generator=generator)
        theirs.grad = gradient
        if state is None:
            optimizer.init_state(optimizer.param_groups[0], theirs, 0, 0)
            state = {
                name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in optimizer.state[theirs].items()
            }
        optimizer.step()
        adamw_8bit(
            ours,
            gradient.to(device),
            state["state1"],
            state["state2"],
            tables=(state["qmap1"], state["qmap2"]),
            scales=(state["absmax1"], state["absmax2"]),
            step=step,
            **SETTINGS,
        )
    moved = (theirs.detach() - start).norm()
    assert (ours.cpu() - theirs.detach()).norm() < 1e-2 * moved
    for name in ("state1", "state2"):
        differences = (state[name].cpu().int() - optimizer.state[theirs][name].int()).abs()
        assert float((differences <= 1).float().mean()) > 0.999


@pytest.mark.parametrize("is_left_out", [False, True])
def test_what_only_the_device_knows(is_left_out: bool, device: torch.device) -> None:
    """A divisor of gradients, and whether the step is taken."""
    generator = torch.Generator().manual_seed(2)
    tables = table(is_signed=True).to(device), table(is_signed=False).to(device)
    gradient = torch.randn(600, generator=generator).to(device)
    results = []
    for divided, options in (
        (gradient / 4, {}),
        (
            gradient,
            {"divisor": torch.tensor(4.0, device=device), "left_out": torch.tensor(float(is_left_out), device=device)},
        ),
    ):
        parameter = torch.ones(600, device=device)
        codes = [torch.full((600,), 7, dtype=torch.uint8, device=device) for _ in range(2)]
        scales = tuple(torch.ones(3, device=device) for _ in range(2))
        adamw_8bit(parameter, divided, *codes, tables=tables, scales=scales, step=2, **SETTINGS, **options)  # type: ignore[arg-type]
        results.append([parameter, *codes, *scales])
    if is_left_out:
        untouched = [torch.ones(600), *(torch.full((600,), 7, dtype=torch.uint8),) * 2, *(torch.ones(3),) * 2]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(results[1], untouched, strict=True))
    else:
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_wrong_types_and_sizes_are_refused(device: torch.device) -> None:
    four = torch.zeros(4, device=device)
    with pytest.raises(ValueError, match="m holds 5"):
        adamw_8bit(four, four, torch.zeros(5, device=device), four, tables=None, scales=None, step=1, **SETTINGS)
    codes, tables = torch.zeros(4, dtype=torch.uint8, device=device), (torch.zeros(256, device=device),) * 2
    with pytest.raises(ValueError, match="needed: 256 and 1"):
        adamw_8bit(four, four, codes, codes, tables=tables, scales=(four, four), step=1, **SETTINGS)
