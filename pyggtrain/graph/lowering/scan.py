"""Recurrences over time: short convolutions and the state updates of linear-time models.

Every lowering here begins from the state that it is given, which in training is empty, and takes one document at a time
(`model` sees to that). Results and final states share one block of memory in ggml, so they do here.
"""

import math

import torch
from torch.nn import functional

from pyggtrain.graph.frame import Frame
from pyggtrain.graph.ir import Graph, Node
from pyggtrain.graph.lowering.kernel import Kernel, Lowering
from pyggtrain.graph.scans import gated_delta_rule, state_space


def _ssm_conv(graph: Graph, node: Node) -> Kernel:
    """Depthwise causal convolution: x [1, S, C, W - 1 + T] (the W - 1 tokens before it in front), w [C, W] -> [1, S,
    T, C].
    """

    def kernel(frame: Frame, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_channels, width = weight.shape[-2:]
        y = functional.conv1d(x[0], weight.to(x.dtype).reshape(num_channels, 1, width), groups=num_channels)
        return y.transpose(1, 2).unsqueeze(0)

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
        num_heads = x.shape[2]
        state = states[ids.reshape(-1).long()]
        delta = functional.softplus(dt[0], threshold=20)
        b, c = (part.repeat_interleave(num_heads // part.shape[2], 2) for part in (b, c))
        a = a.to(x.dtype).reshape(num_heads, -1)
        if a.shape[1] == 1:
            y, state = state_space(x * delta.unsqueeze(-1), delta * a.squeeze(1), b, c, state)
            return _with_states(y, [state], frame.shape(node.shape))
        decay = torch.exp(delta.unsqueeze(-1) * a)
        inputs = (x * delta.unsqueeze(-1)).unsqueeze(-1) * b.unsqueeze(-2)
        outputs = []
        for time in range(x.shape[1]):
            state = state * decay[:, time].unsqueeze(-2) + inputs[:, time]
            outputs.append((state @ c[:, time].unsqueeze(-1)).squeeze(-1))
        return _with_states(torch.stack(outputs, 1), [state], frame.shape(node.shape))

    return kernel


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
        bonus = u.to(k.dtype).reshape(num_heads, width, 1)
        outputs = []
        for time in range(k.shape[1]):
            new = k[:, time].unsqueeze(-1) * v[:, time].unsqueeze(-2)
            outputs.append(((states + bonus * new) * r[:, time].unsqueeze(-1)).sum(-2))
            states = states * w[:, time].unsqueeze(-1) + new
        return _with_states(torch.stack(outputs, 1), [states], frame.shape(node.shape))

    return kernel


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
        states = state.reshape(-1, num_heads, width, width)
        r, w, k, v, a, b = (x.reshape(states.shape[0], -1, num_heads, width) for x in (r, w, k, v, a, b))
        outputs = []
        for time in range(k.shape[1]):
            removed = (states @ a[:, time].unsqueeze(-1)) * b[:, time].unsqueeze(-2)
            states = states * w[:, time].unsqueeze(-2) + removed + v[:, time].unsqueeze(-1) * k[:, time].unsqueeze(-2)
            outputs.append((states @ r[:, time].unsqueeze(-1)).squeeze(-1))
        return _with_states(torch.stack(outputs, 1), [states], frame.shape(node.shape))

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
}
