"""Operations along the sequence (softmax, rotation, recurrences), each against a loop over tokens in float64."""

import math
import struct

import pytest
import torch

from pyggtrain.errors import UnsupportedError
from pyggtrain.graph.frame import Frame
from pyggtrain.graph.inputs import input_of
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering import Kernel, lower
from pyggtrain.nn import Batch

GRAPH = Graph(
    (),
    0,
    window=2,
    window_type="standard",
    is_causal=True,
    is_diffusion=False,
    uses_alibi=False,
    attn_temperature=(2.0, 0.5, 1.0),
)
BATCH = Batch.from_documents([([1, 2, 3], [1, 2, 3]), ([4, 5], [4, 5])])
FRAME = Frame(BATCH, torch.arange(5))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def node_of(op: str, params: dict[int, float] | None = None, shape: tuple[int, ...] = (1, 1, 1, 1)) -> Node:
    values = [0] * 16
    for index, value in (params or {}).items():
        values[index] = struct.unpack("<i", struct.pack("<f", value))[0] if isinstance(value, float) else value
    return Node("node", op, "node", "f32", shape, (4,) * 4, tuple(values), (), None, 0)


def kernel_of(op: str, params: dict[int, float] | None = None, shape: tuple[int, ...] = (1, 1, 1, 1)) -> Kernel:
    return lower(GRAPH, node_of(op, params, shape))


def check_gradients(kernel: Kernel, *inputs: torch.Tensor) -> None:
    assert torch.autograd.gradcheck(lambda *x: kernel(FRAME, *x), inputs)


def leaf(name: str, shape: tuple[int, ...], role: str = "input") -> Node:
    return Node(name, "NONE", role, "i32", shape, (4,) * 4, (0,) * 16, (), None, 0)


# Inputs


def test_inputs_are_what_their_meaning_says() -> None:
    def value(name: str, *shape: int) -> list[int]:
        tensor = input_of(GRAPH, leaf(name, shape))(FRAME)
        assert tensor.shape == shape
        return tensor.flatten().tolist()  # type: ignore[no-any-return]

    assert value("tokens", 1, 1, 1, 5) == [1, 2, 3, 4, 5]
    assert value("positions", 1, 1, 1, 5) == [0, 1, 2, 0, 1]
    assert value("positions_4", 1, 1, 1, 20) == [0, 1, 2, 0, 1] * 3 + [0] * 5
    assert value("out_ids", 1, 1, 1, 5) == value("k_idxs", 1, 1, 1, 5) == [0, 1, 2, 3, 4]
    assert value("s_copy", 1, 1, 1, 1) == [0]
    factors = input_of(GRAPH, leaf("attn_temperature", (1, 1, 5, 1)))(FRAME)
    # floor((0, 1, 2, 0, 1 + offset 1) / 2) is 0, 1, 1, 0, 1.
    torch.testing.assert_close(factors.flatten(), 1 + 0.5 * torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]).log())
    rotation = input_of(GRAPH, leaf("k_rot", (1, 1, 8, 8)))(FRAME)[0, 0]
    torch.testing.assert_close(rotation @ rotation, torch.eye(8))


def test_masks_keep_to_documents_past_and_window() -> None:
    every = input_of(GRAPH, leaf("kq_mask", (1, 1, 5, 5)))(FRAME)[0, 0]
    window = input_of(GRAPH, leaf("kq_mask_swa", (1, 1, 5, 5)))(FRAME)[0, 0]
    seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]])
    assert torch.equal(every == 0, seen.bool()) and torch.equal(every == -math.inf, ~seen.bool())
    seen[2, 0] = 0
    assert torch.equal(window == 0, seen.bool())


@pytest.mark.parametrize("role", ["input", "unknown_input"])
def test_an_input_of_unknown_meaning_is_named(role: str) -> None:
    with pytest.raises(UnsupportedError, match="reads an input 'leaf_7'"):
        input_of(GRAPH, leaf("leaf_7", (1, 1, 1, 5), role))


# Softmax and attention


def test_softmax_adds_its_mask_with_slopes_and_gives_weight_to_sinks() -> None:
    x, sinks = random(1, 4, 3, 5), random(1, 1, 1, 4, seed=1)
    mask = random(1, 1, 3, 5, seed=2)
    found = kernel_of("SOFT_MAX", {0: 0.5, 1: 8.0}, (1, 4, 3, 5))(FRAME, x, mask, sinks)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).reshape(4, 1, 1)
    exponentials = torch.exp(x[0] * 0.5 + slopes * mask[0])
    wanted = exponentials / (exponentials.sum(-1, keepdim=True) + sinks.exp().reshape(4, 1, 1))
    torch.testing.assert_close(found[0], wanted)
    check_gradients(kernel_of("SOFT_MAX", {0: 0.5}), x, mask, sinks)


@pytest.mark.parametrize("op", ["FLASH_ATTN_EXT.kq_mask", "FLASH_ATTN_EXT.kq_mask_swa"])
def test_attention_by_the_meaning_of_its_mask_equals_attention_with_that_mask(op: str) -> None:
    q, k, v = random(1, 4, 5, 6), random(1, 2, 5, 6, seed=1), random(1, 2, 5, 3, seed=2)
    sinks = random(1, 1, 1, 4, seed=3)
    params = {0: 0.7, 2: 1.5}
    mask = input_of(GRAPH, leaf(op.removeprefix("FLASH_ATTN_EXT."), (1, 1, 5, 5)))(FRAME)
    found = kernel_of(op, params)(FRAME, q, k, v, None, sinks)
    assert found.shape == (1, 5, 4, 3)
    torch.testing.assert_close(found, kernel_of("FLASH_ATTN_EXT", params)(FRAME, q, k, v, mask, sinks))


@pytest.mark.parametrize("mask", ["kq_mask", "kq_mask_swa"])
def test_latent_attention_is_attention_to_latent_rows_multiplied_the_other_way_round(mask: str) -> None:
    q, q_rotated, c, k_rotated = (
        random(*shape, seed=seed) for seed, shape in enumerate([(1, 2, 5, 3), (1, 5, 2, 4), (1, 1, 5, 6), (1, 5, 1, 4)])
    )
    w_k, w_v = random(1, 2, 6, 3, seed=5), random(1, 2, 7, 6, seed=6)
    kernel = kernel_of(f"LATENT_ATTENTION.{mask}", {0: 0.4})
    absorbed = torch.cat([(q @ w_k.transpose(-1, -2)).transpose(1, 2), q_rotated], -1)
    latent = torch.cat([c.reshape(1, 5, 1, 6), k_rotated], -1)
    attended = kernel_of(f"FLASH_ATTN_EXT.{mask}", {0: 0.4})(
        FRAME, absorbed.transpose(1, 2), latent.transpose(1, 2), c.reshape(1, 1, 5, 6)
    )
    inputs = q, q_rotated, c, k_rotated, w_k, w_v
    torch.testing.assert_close(kernel(FRAME, *inputs), attended.transpose(1, 2) @ w_v.transpose(-1, -2))
    check_gradients(kernel, *inputs)


# Rotation


def rope_params(mode: int, **extra: float) -> dict[int, float]:
    params: dict[int, float] = {1: 4, 2: mode, 4: 4096, 5: 100.0, 6: 1.0, 7: 0.0, 8: 1.0, 9: 32.0, 10: 1.0}
    return params | {int(key[1:]): value for key, value in extra.items()}


@pytest.mark.parametrize(("mode", "pairs"), [(0, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))])
def test_rope_turns_each_pair_by_position_over_frequency_and_back(
    mode: int, pairs: tuple[tuple[int, int], ...]
) -> None:
    x = random(1, 5, 2, 6).float().detach()
    positions, factors = BATCH.positions_T.reshape(1, 1, 1, 5), torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2)
    found = kernel_of("ROPE", rope_params(mode, p8=1.5))(FRAME, x, positions, factors)
    wanted = x.clone()
    for pair, (a, b) in enumerate(pairs):
        angle = BATCH.positions_T.reshape(5, 1) * 100.0 ** (-2 * pair / 4) / (1.0, 2.0)[pair]
        wanted[0, ..., a] = 1.5 * (x[0, ..., a] * angle.cos() - x[0, ..., b] * angle.sin())
        wanted[0, ..., b] = 1.5 * (x[0, ..., b] * angle.cos() + x[0, ..., a] * angle.sin())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    frame = Frame(BATCH, FRAME.rows)
    turned = kernel_of("ROPE", rope_params(mode))(frame, x, positions)
    torch.testing.assert_close(kernel_of("ROPE_BACK", rope_params(mode))(frame, turned, positions), x)


def test_rope_with_an_offset_turns_the_end_of_each_head() -> None:
    x = random(1, 5, 2, 6).float().detach()
    positions = BATCH.positions_T.reshape(1, 1, 1, 5)
    found = kernel_of("ROPE", rope_params(2, p15=2))(Frame(BATCH, FRAME.rows), x, positions)
    rotated = kernel_of("ROPE", rope_params(2))(Frame(BATCH, FRAME.rows), x[..., 2:], positions)
    assert torch.equal(found, torch.cat([x[..., :2], rotated], -1))


def test_rope_in_sections_turns_all_pairs_but_those_of_the_fourth_section() -> None:
    x = random(1, 5, 2, 6).float().detach()
    positions = torch.cat([BATCH.positions_T] * 3 + [torch.zeros(5, dtype=torch.int64)]).reshape(1, 1, 1, 20)
    plain = kernel_of("ROPE", rope_params(2))(Frame(BATCH, FRAME.rows), x, positions[..., :5])
    sections = kernel_of("ROPE", rope_params(8, p11=1, p14=1))(Frame(BATCH, FRAME.rows), x, positions)
    assert torch.equal(sections[..., [0, 2]], plain[..., [0, 2]])
    torch.testing.assert_close(sections[..., [1, 3]], x[..., [1, 3]])


def test_layers_with_equal_settings_share_one_table() -> None:
    frame = Frame(BATCH, FRAME.rows)
    x = torch.randn(1, 5, 2, 4)
    for params in (rope_params(0), rope_params(0), rope_params(0, p5=10.0)):
        kernel_of("ROPE", params)(frame, x, BATCH.positions_T)
    assert len(frame.rope_tables) == 2


def test_rotations_that_are_not_implemented_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="mode 24"):
        kernel_of("ROPE", rope_params(24))
    with pytest.raises(UnsupportedError, match="mixes YaRN by 0.5"):
        kernel_of("ROPE", rope_params(0, p7=0.5))


# Recurrences


def test_convolution_sees_each_channel_and_no_later_token() -> None:
    x, weight = random(1, 1, 2, 6), random(1, 1, 2, 3, seed=1)
    found = kernel_of("SSM_CONV")(FRAME, x, weight)
    for token in range(4):
        torch.testing.assert_close(found[0, 0, token], (x[0, 0, :, token : token + 3] * weight[0, 0]).sum(-1))
    check_gradients(kernel_of("SSM_CONV"), x, weight)


@pytest.mark.parametrize("num_decays", [1, 3], ids=["decay per head", "decay per state"])
def test_state_space_scan_follows_its_recurrence(num_decays: int) -> None:
    num_heads, width, num_states, num_tokens = 2, 2, 3, 4
    states, x = random(1, num_heads, width, num_states), random(1, num_tokens, num_heads, width, seed=1)
    dt, a = random(1, 1, num_tokens, num_heads, seed=2), random(1, 1, num_heads, num_decays, seed=3)
    b, c = random(1, num_tokens, 1, num_states, seed=4), random(1, num_tokens, 1, num_states, seed=5)
    size = num_tokens * num_heads * width + num_heads * width * num_states
    kernel = kernel_of("SSM_SCAN", shape=(1, 1, 1, size))
    ids = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    outputs = []
    state = states[0]
    for token in range(num_tokens):
        delta = torch.log1p(dt[0, 0, token].exp())
        decay = torch.exp(delta[:, None] * a[0, 0])[:, None]
        state = state * decay + (delta[:, None] * x[0, token])[..., None] * b[0, token, 0]
        outputs.append((state * c[0, token, 0]).sum(-1))
    wanted = torch.cat([torch.stack(outputs).flatten(), state.flatten()])
    torch.testing.assert_close(kernel(FRAME, states, x, dt, a, b, c, ids).flatten(), wanted)
    check_gradients(lambda frame, *inputs: kernel(frame, *inputs, ids), states, x, dt, a, b, c)


@pytest.mark.parametrize("num_decays", [1, 3], ids=["decay per head", "decay per channel"])
def test_gated_delta_rule_follows_its_recurrence(num_decays: int) -> None:
    num_heads, width, num_tokens = 2, 3, 4
    q, k = random(1, num_tokens, 1, width), random(1, num_tokens, 1, width, seed=1)
    v, g = random(1, num_tokens, num_heads, width, seed=2), random(1, num_tokens, num_heads, num_decays, seed=3)
    beta, state = random(1, num_tokens, num_heads, 1, seed=4), random(1, num_heads, width, width, seed=5)
    size = num_tokens * num_heads * width + 2 * num_heads * width * width
    kernel = kernel_of("GATED_DELTA_NET", {0: 2}, (1, 1, 1, size))
    outputs, snapshots = [], []
    memory = state[0]
    for token in range(num_tokens):
        memory = memory * g[0, token].exp()[:, None]
        error = v[0, token] - torch.einsum("hvk,k->hv", memory, k[0, token, 0])
        memory = memory + torch.einsum("hv,k->hvk", beta[0, token] * error, k[0, token, 0])
        outputs.append(torch.einsum("hvk,k->hv", memory, q[0, token, 0]) / math.sqrt(width))
        snapshots.append(memory)
    wanted = torch.cat([torch.stack(outputs).flatten(), snapshots[-1].flatten(), snapshots[-2].flatten()])
    torch.testing.assert_close(kernel(FRAME, q, k, v, g, beta, state).flatten(), wanted)
    check_gradients(kernel, q, k, v, g, beta, state)


def test_rwkv_recurrences_follow_their_equations() -> None:
    num_tokens, num_heads, width = 3, 2, 2
    r, w, k, v, a, b = (random(1, num_tokens, num_heads, width, seed=seed) for seed in range(6))
    w = w.detach().sigmoid().requires_grad_()
    u, state = random(1, 1, num_heads, width, seed=6), random(1, 1, 1, num_heads * width * width, seed=7)
    size = num_tokens * num_heads * width + num_heads * width * width
    six = kernel_of("RWKV_WKV6", shape=(1, 1, 1, size))
    seven = kernel_of("RWKV_WKV7", shape=(1, 1, 1, size))
    old, new = state.reshape(num_heads, width, width), state.reshape(num_heads, width, width)
    outputs_six, outputs_seven = [], []
    for t in range(num_tokens):
        kv = torch.einsum("hk,hv->hkv", k[0, t], v[0, t])
        outputs_six.append(torch.einsum("hkv,hk->hv", old + u[0, 0][..., None] * kv, r[0, t]))
        old = old * w[0, t][..., None] + kv
        removed = torch.einsum("hvk,hk,hj->hvj", new, a[0, t], b[0, t])
        new = new * w[0, t][:, None] + removed + torch.einsum("hv,hk->hvk", v[0, t], k[0, t])
        outputs_seven.append(torch.einsum("hvk,hk->hv", new, r[0, t]))
    wanted_six = torch.cat([torch.stack(outputs_six).flatten(), old.flatten()])
    wanted_seven = torch.cat([torch.stack(outputs_seven).flatten(), new.flatten()])
    torch.testing.assert_close(six(FRAME, k, v, r, u, w, state).flatten(), wanted_six)
    torch.testing.assert_close(seven(FRAME, r, w, k, v, a, b, state).flatten(), wanted_seven)
    check_gradients(six, k, v, r, u, w, state)
    check_gradients(seven, r, w, k, v, a, b, state)


# Recurrences that know documents: the same as the one that is given a state, on each document with an empty one.


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return random(1, 5, *shape, seed=seed)


def of_each_document(op: str, sources: list[torch.Tensor], state_at: int, state: tuple[int, ...], **options):  # type: ignore[no-untyped-def]
    """What `op` with a state gives for each document of `BATCH`; sources with 5 tokens in dimension 1 are cut."""
    outputs = []
    for start, end in ((0, 3), (3, 5)):
        parts = [x[:, start:end] if x.shape[1] == 5 else x for x in sources]
        parts.insert(state_at, torch.zeros(state, dtype=torch.float64))
        num_outputs = (end - start) * options["width"]
        kernel = kernel_of(op, {0: 1}, (1, 1, 1, num_outputs + math.prod(state)))
        frame = Frame(Batch.from_documents([([1] * (end - start),) * 2]), torch.arange(end - start))
        outputs.append(kernel(frame, *parts, *options.get("rest", ())).flatten()[:num_outputs])
    return torch.cat(outputs)


@pytest.mark.parametrize("num_decays", [1, 4], ids=["decay per head", "decay per channel"])
def test_gated_delta_rule_begins_anew_with_each_document(num_decays: int) -> None:
    g = -tokens(4, num_decays, seed=3).detach().abs()
    sources = [tokens(2, 4), tokens(2, 4, seed=1), tokens(4, 4, seed=2), g.requires_grad_(), tokens(4, 1, seed=4)]
    kernel = kernel_of("GATED_DELTA_NET.empty")
    found = kernel(FRAME, *sources)
    assert found.shape == (1, 5, 4, 4)
    wanted = of_each_document("GATED_DELTA_NET", sources, 5, (1, 4, 4, 4), width=16)
    torch.testing.assert_close(found.flatten(), wanted)
    check_gradients(kernel, *sources)


@pytest.mark.parametrize("num_decays", [1, 3], ids=["decay per head", "decay per state"])
def test_state_space_scan_begins_anew_with_each_document(num_decays: int) -> None:
    x, dt, a = tokens(2, 2), random(1, 1, 5, 2, seed=1), -random(1, 1, 2, num_decays, seed=2).detach().abs()
    b, c = tokens(1, 3, seed=3), tokens(1, 3, seed=4)
    kernel = kernel_of("SSM_SCAN.empty")
    found = kernel(FRAME, x, dt, a, b, c)
    assert found.shape == (1, 5, 2, 2)
    outputs = []
    for start, end in ((0, 3), (3, 5)):
        part = slice(start, end)
        frame = Frame(Batch.from_documents([([1] * (end - start),) * 2]), torch.arange(end - start))
        whole = kernel_of("SSM_SCAN", shape=(1, 1, 1, (end - start) * 4 + 12))(
            frame,
            torch.zeros(1, 2, 2, 3, dtype=torch.float64),
            x[:, part],
            dt[:, :, part],
            a,
            b[:, part],
            c[:, part],
            torch.zeros(1, 1, 1, 1),
        )
        outputs.append(whole.flatten()[: (end - start) * 4])
    torch.testing.assert_close(found.flatten(), torch.cat(outputs))
    check_gradients(kernel, x, dt, a.requires_grad_(), b, c)


def test_rwkv_begins_anew_with_each_document() -> None:
    k, v, r, w, a, b = (tokens(2, 2, seed=seed) for seed in range(6))
    w = w.detach().sigmoid().requires_grad_()
    u = random(1, 1, 2, 2, seed=6)
    six, seven = kernel_of("RWKV_WKV6.empty"), kernel_of("RWKV_WKV7.empty")
    wanted_six = of_each_document("RWKV_WKV6", [k, v, r, u, w], 5, (1, 2, 2, 2), width=4)
    wanted_seven = of_each_document("RWKV_WKV7", [r, w, k, v, a, b], 6, (1, 2, 2, 2), width=4)
    torch.testing.assert_close(six(FRAME, k, v, r, u, w).flatten(), wanted_six)
    torch.testing.assert_close(seven(FRAME, r, w, k, v, a, b).flatten(), wanted_seven)
    check_gradients(six, k, v, r, u, w)
    check_gradients(seven, r, w, k, v, a, b)


def test_convolution_begins_anew_with_each_document() -> None:
    x, weight = random(1, 1, 2, 5), random(1, 1, 2, 3, seed=1).detach()
    kernel = kernel_of("SSM_CONV.empty")
    found = kernel(FRAME, x, weight)
    for start, end in ((0, 3), (3, 5)):
        padded = torch.nn.functional.pad(x[..., start:end], (2, 0))
        torch.testing.assert_close(found[:, :, start:end], kernel_of("SSM_CONV")(FRAME, padded, weight))
    check_gradients(lambda frame, x: kernel(frame, x, weight), x)


def test_the_token_before_is_none_for_the_first_of_a_document() -> None:
    x = random(1, 1, 5, 2)
    kernel = kernel_of("CONCAT.empty", {0: 2})
    zero = torch.zeros(2, dtype=torch.float64)
    wanted = torch.stack([zero, x[0, 0, 0], x[0, 0, 1], zero, x[0, 0, 3]])
    torch.testing.assert_close(kernel(FRAME, x[:, :, :-1])[0, 0], wanted)
    check_gradients(lambda frame, x: kernel(frame, x[:, :, :-1]), x)


def test_gated_linear_attention_follows_its_recurrence() -> None:
    num_tokens, num_heads, width = 3, 2, 2
    k, v, q, g = (random(1, num_tokens, num_heads, width, seed=seed) for seed in range(4))
    state = random(1, 1, 1, num_heads * width * width, seed=4)
    kernel = kernel_of("GATED_LINEAR_ATTN", {0: 0.5}, (1, 1, 1, num_tokens * num_heads * width + state.numel()))
    memory, outputs = state.reshape(num_heads, width, width), []
    for t in range(num_tokens):
        memory = g[0, t][..., None] * memory + torch.einsum("hk,hv->hkv", k[0, t], v[0, t])
        outputs.append(0.5 * torch.einsum("hkv,hk->hv", memory, q[0, t]))
    wanted = torch.cat([torch.stack(outputs).flatten(), memory.flatten()])
    torch.testing.assert_close(kernel(FRAME, k, v, q, g, state).flatten(), wanted)
    check_gradients(kernel, k, v, q, g, state)
