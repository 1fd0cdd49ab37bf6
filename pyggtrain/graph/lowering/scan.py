"""Recurrences over time: short convolutions and the state updates of linear-time models.

There are two lowerings of each. One begins from the state that it is given, takes one document at a time (`model` sees
to that), and puts final states behind its results, as ggml does. The other ("<op>.empty", see `graph.empty_states`)
reads no state and begins anew with each document.
"""

import math
from collections.abc import Callable
from functools import reduce
from itertools import pairwise

import torch
from torch.nn import functional

from pyggtrain import ops
from pyggtrain.graph.frame import Frame, in_full
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering
from pyggtrain.graph.scans import gated_delta_rule, rwkv_6, rwkv_7, state_space, state_space_by_state


def _ssm_conv(graph: Graph, node: Node) -> Kernel:
    """Depthwise causal convolution: x [1, S, C, W - 1 + T] (the W - 1 tokens before it in front), w [C, W] -> [1, S,
    T, C].
    """

    def kernel(frame: Frame, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_channels, width = weight.shape[-2:]
        if x.is_cuda:
            # A sum of shifted rows: a few passes over memory, where torch's depthwise convolution has no fast kernel.
            x_STC = in_full(x[0].transpose(1, 2))
            weight_CW = weight.reshape(num_channels, width)
            num_tokens = x_STC.shape[1] - width + 1
            parts = (x_STC[:, place : place + num_tokens] * weight_CW[:, place] for place in range(width))
            return reduce(torch.add, parts).to(x.dtype).unsqueeze(0)
        y = functional.conv1d(x[0], weight.to(x.dtype).reshape(num_channels, 1, width), groups=num_channels)
        return y.transpose(1, 2).unsqueeze(0)

    return kernel


def _ssm_conv_empty(graph: Graph, node: Node) -> Kernel:
    """Depthwise causal convolution inside documents: x [1, 1, C, T], w [C, W] -> [1, 1, T, C]."""

    def kernel(frame: Frame, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight_CW = _at_least_float32(weight, x).reshape(weight.shape[-2:])
        return ops.causal_conv1d(x[0, 0].t(), weight_CW, frame.batch.documents)[None, None]

    return kernel


def _ssm_scan(graph: Graph, node: Node) -> Kernel:
    """Selective state space (Gu & Dao 2023, eq. 2; Dao & Gu 2024 with one decay per head).

    S_t = exp(d_t A) S_{t-1} + d_t x_t B_tᵀ, y_t = S_t C_t, with d = softplus(dt). H heads of P numbers, N states, G
    groups of B and C: states [R, H, P, N], x [Q, T, H, P], dt [1, Q, T, H], A [H, N or 1], B and C [Q, T, G, N], ids
        [Q] of the states to begin with.
    """

    def kernel(
        frame: Frame,
        states: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        y, state = _selective_scan(states[ids.reshape(-1).long()], x, dt[0], a, b, c)
        return _with_states(y, [state], frame.shape(node.shape))

    return kernel


def _ssm_scan_empty(graph: Graph, node: Node) -> Kernel:
    """As `_ssm_scan`, from an empty state in each document: [1, T, H, P]."""

    def kernel(
        frame: Frame, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        state = x.new_zeros(1, *x.shape[2:], b.shape[-1])

        return _each_document(frame, lambda x, dt, b, c: _selective_scan(state, x, dt, a, b, c)[0], x, dt[0], b, c)

    return kernel


def _selective_scan(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [Q, T, H, P] and the last state; dt [Q, T, H], the rest as for `_ssm_scan`."""
    state, x, dt, b, c = (in_full(part) for part in (state, x, dt, b, c))
    num_heads = x.shape[2]
    delta = functional.softplus(dt, threshold=20)
    a = a.to(x.dtype).reshape(num_heads, -1)
    if a.shape[1] == 1:
        return state_space(x * delta.unsqueeze(-1), delta * a.squeeze(1), b, c, state)
    b, c = (part.repeat_interleave(num_heads // part.shape[2], 2) for part in (b, c))
    return state_space_by_state(x * delta.unsqueeze(-1), delta.unsqueeze(-1) * a, b, c, state)


def _gated_delta_net(graph: Graph, node: Node) -> Kernel:
    """Gated delta rule (Yang et al. 2024, eq. 10), decay per head or per channel.

    S_t = S_{t-1} diag(exp g_t) + b_t (v_t - S_{t-1} diag(exp g_t) k_t) k_tᵀ, y_t = S_t q_t / sqrt(K).
    q, k [Q, T, H', K], v [Q, T, H, V], g [Q, T, H, K or 1], b [Q, T, H, 1], state [Q, H, V, K] in any shape.
    """
    num_snapshots = node.integer(0)

    def kernel(
        frame: Frame,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v, g, beta, state = (in_full(x) for x in (q, k, v, g, beta, state))
        num_sequences, num_tokens, num_heads, width = v.shape
        q, k = (x.repeat(num_sequences // x.shape[0], 1, num_heads // x.shape[2], 1) for x in (q, k))
        state = state.reshape(num_sequences, num_heads, width, -1)
        if num_snapshots <= 1:
            y, state = gated_delta_rule(q, k, v, g, beta, state)
            return _with_states(y / math.sqrt(width), [state][:num_snapshots], frame.shape(node.shape))
        snapshots, outputs = [state], []
        decay = torch.exp(g)
        for time in range(num_tokens):
            state = state * decay[:, time].unsqueeze(-2)
            key = k[:, time].unsqueeze(-1)
            change = (v[:, time] - (state @ key).squeeze(-1)) * beta[:, time]
            state = state + change.unsqueeze(-1) * key.transpose(-1, -2)
            outputs.append((state @ q[:, time].unsqueeze(-1)).squeeze(-1) / math.sqrt(width))
            snapshots.append(state)
        # Newest first; what would lie before the first token is the state that it began with.
        kept = [snapshots[max(0, num_tokens - index)] for index in range(num_snapshots)]
        return _with_states(torch.stack(outputs, 1), kept, frame.shape(node.shape))

    return kernel


def _gated_delta_net_empty(graph: Graph, node: Node) -> Kernel:
    """As `_gated_delta_net`, from an empty state in each document: [1, T, H, V]."""

    def kernel(
        frame: Frame, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (frame.rounded(x) for x in (q, k, v))
        _, _, num_heads, width = v.shape
        scale = 1 / math.sqrt(width)
        if g.shape[-1] == 1:
            chunks = frame.batch.documents.chunks(frame.rows.device)
            log_decay_TG, beta_TG = (_at_least_float32(gate[0, ..., 0], v) for gate in (g, beta))
            return ops.gated_delta_rule(q[0], k[0], v[0], log_decay_TG, beta_TG, chunks, scale=scale).unsqueeze(0)
        q, k = (x.repeat(1, 1, num_heads // x.shape[2], 1) for x in (q, k))
        state = in_full(v).new_zeros(1, num_heads, width, q.shape[-1])

        def of_document(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
        ) -> torch.Tensor:
            return gated_delta_rule(q, k, v, g, beta, state)[0] * scale

        return _each_document(frame, of_document, q, k, v, g, beta)

    return kernel


def _rwkv_wkv6(graph: Graph, node: Node) -> Kernel:
    """RWKV-6 (Peng et al. 2024, eq. 17): y_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t, S_t = diag(w_t) S_{t-1} + k_t v_tᵀ.

    k, v, r, w [1, T, H, K], u [H, K], state [Q, H, K, K] in any shape, T / Q tokens for each of Q sequences.
    """

    def kernel(
        frame: Frame,
        k: torch.Tensor,
        v: torch.Tensor,
        r: torch.Tensor,
        u: torch.Tensor,
        w: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        num_heads, width = k.shape[-2:]
        states = state.reshape(-1, num_heads, width, width)
        k, v, r, w = (x.reshape(states.shape[0], -1, num_heads, width) for x in (k, v, r, w))
        y, states = _wkv6(states, k, v, r, w, u)
        return _with_states(y, [states], frame.shape(node.shape))

    return kernel


def _rwkv_wkv6_empty(graph: Graph, node: Node) -> Kernel:
    """As `_rwkv_wkv6`, from an empty state in each document: [1, T, H, K]."""

    def kernel(
        frame: Frame, k: torch.Tensor, v: torch.Tensor, r: torch.Tensor, u: torch.Tensor, w: torch.Tensor
    ) -> torch.Tensor:
        state = k.new_zeros(1, k.shape[-2], k.shape[-1], k.shape[-1])
        k, v, r, w = (x.reshape(1, -1, *state.shape[1:3]) for x in (k, v, r, w))
        return _each_document(frame, lambda k, v, r, w: _wkv6(state, k, v, r, w, u)[0], k, v, r, w)

    return kernel


def _wkv6(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, r: torch.Tensor, w: torch.Tensor, u: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the last state, whose rows are ggml's columns."""
    state, k, v, r, w = (in_full(x) for x in (state, k, v, r, w))
    y, state = rwkv_6(k, v, r, w, u.to(k.dtype).reshape(k.shape[-2:]), state.transpose(-1, -2))
    return y, state.transpose(-1, -2)


def _rwkv_wkv7(graph: Graph, node: Node) -> Kernel:
    """RWKV-7 (Peng et al. 2025): S_t = S_{t-1} diag(w_t) + (S_{t-1} a_t) b_tᵀ + v_t k_tᵀ, y_t = S_t r_t.

    r, w, k, v, a, b [1, T, H, K], state [Q, H, K, K] in any shape.
    """

    def kernel(
        frame: Frame,
        r: torch.Tensor,
        w: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        num_heads, width = k.shape[-2:]
        states = in_full(state).reshape(-1, num_heads, width, width)
        r, w, k, v, a, b = (in_full(x).reshape(states.shape[0], -1, num_heads, width) for x in (r, w, k, v, a, b))
        y, states = rwkv_7(r, w, k, v, a, b, states)
        return _with_states(y, [states], frame.shape(node.shape))

    return kernel


def _rwkv_wkv7_empty(graph: Graph, node: Node) -> Kernel:
    """As `_rwkv_wkv7`, from an empty state in each document: [1, T, H, K]."""

    def kernel(frame: Frame, *parts: torch.Tensor) -> torch.Tensor:
        num_heads, width = parts[0].shape[-2:]
        state = in_full(parts[0]).new_zeros(1, num_heads, width, width)
        values = [x.reshape(1, -1, num_heads, width) for x in parts]
        return _each_document(frame, lambda r, w, k, v, a, b: rwkv_7(r, w, k, v, a, b, state)[0], *values)

    return kernel


def _gated_linear_attention(graph: Graph, node: Node) -> Kernel:
    """Gated linear attention (Yang et al. 2023, eq. 3): S_t = diag(g_t) S_{t-1} + k_t v_tᵀ, y_t = c S_tᵀ q_t.

    k, v, q, g [1, T, H, K], state [Q, H, K, K] in any shape, T / Q tokens for each of Q sequences.
    """
    scale = node.number(0)

    def kernel(
        frame: Frame, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, g: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        num_heads, width = k.shape[-2:]
        states = state.reshape(-1, num_heads, width, width)
        k, v, q, g = (x.reshape(states.shape[0], -1, num_heads, width) for x in (k, v, q, g))
        outputs = []
        for time in range(k.shape[1]):
            states = states * g[:, time].unsqueeze(-1) + k[:, time].unsqueeze(-1) * v[:, time].unsqueeze(-2)
            outputs.append((states * q[:, time].unsqueeze(-1)).sum(-2) * scale)
        return _with_states(torch.stack(outputs, 1), [states], frame.shape(node.shape))

    return kernel


def _concat_empty(graph: Graph, node: Node) -> Kernel:
    """The row of the token before, nothing for a document's first: rows of all tokens but the last -> of all tokens."""
    dim = node.integer(0)

    def kernel(frame: Frame, x: torch.Tensor) -> torch.Tensor:
        none = x.new_zeros([1 if axis == dim else size for axis, size in enumerate(x.shape)])
        is_first = (frame.batch.positions_T == 0).reshape([-1 if axis == dim else 1 for axis in range(4)])
        return torch.cat([none, x], dim).masked_fill(is_first, 0.0)

    return kernel


def _each_document(frame: Frame, of_document: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
    """What a function gives for each document's part of the values [1, T, ..], one after another, in float32 at
    least.
    """
    values = tuple(in_full(x) for x in values)
    outputs = [of_document(*(x[:, start:end] for x in values)) for start, end in pairwise(frame.batch.documents.bounds)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _at_least_float32(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gates and taps stay float32 beside values in half precision."""
    return x.to(torch.promote_types(like.dtype, torch.float32))


def _with_states(outputs: torch.Tensor, states: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([outputs.reshape(-1), *(state.reshape(-1) for state in states)]).reshape(shape)


# What comes before a document in the same row would reach into it.
RECURRENT = frozenset({"GATED_DELTA_NET", "GATED_LINEAR_ATTN", "RWKV_WKV6", "RWKV_WKV7", "SSM_CONV", "SSM_SCAN"})

LOWERINGS: dict[str, Lowering] = {
    "GATED_DELTA_NET": _gated_delta_net,
    "GATED_LINEAR_ATTN": _gated_linear_attention,
    "RWKV_WKV6": _rwkv_wkv6,
    "RWKV_WKV7": _rwkv_wkv7,
    "SSM_CONV": _ssm_conv,
    "SSM_SCAN": _ssm_scan,
    "CONCAT.empty": _concat_empty,
    "GATED_DELTA_NET.empty": _gated_delta_net_empty,
    "RWKV_WKV6.empty": _rwkv_wkv6_empty,
    "RWKV_WKV7.empty": _rwkv_wkv7_empty,
    "SSM_CONV.empty": _ssm_conv_empty,
    "SSM_SCAN.empty": _ssm_scan_empty,
}
