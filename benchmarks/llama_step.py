"""One LoRA training step of a llama-shaped model on ggml blocks, written out by hand from `pyggtrain.kernels`.

No autograd and no modules: forward and backward are two loops over layers with every buffer named, so that time and
memory are those of the kernels and of nothing else. It is what a bench needs, not a product: random weights, one length
for all documents.

Per layer forward keeps the stream before and after attention, rotated q k v and the attention output (the *stash*), and
the rank-sized products of the adapters. Backward makes the norms again always, and gate and up unless they were kept.
The stash of layers that do not fit waits in pinned host memory: copies run beside the matrix products, one layer ahead.

Linears that share their input are one *group*, one matrix product, and one extended weight (`kernels/lora.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from pyggtrain.kernels.cross_entropy import linear_cross_entropy
from pyggtrain.kernels.dequant import dequantize
from pyggtrain.kernels.lora import lora_extend_
from pyggtrain.kernels.reference.cases import random_blocks
from pyggtrain.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from pyggtrain.kernels.rope import rope_backward, rope_forward
from pyggtrain.kernels.swiglu import swiglu_backward, swiglu_forward

PADDING = 64
"""Columns and rows that an extended weight has beyond the weight."""

GROUPS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama model, in its metadata's order."""

    block_count: int
    embedding_length: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_size: int
    vocabulary: int
    freq_base: float = 5e5
    eps: float = 1e-5

    def rows(self, group: str) -> tuple[int, ...]:
        """Output widths of the linears of a group."""
        kv = self.head_count_kv * self.head_size
        return {
            "qkv": (self.head_count * self.head_size, kv, kv),
            "o": (self.embedding_length,),
            "gate_up": (self.feed_forward_length, self.feed_forward_length),
            "down": (self.embedding_length,),
        }[group]

    def columns(self, group: str) -> int:
        """Input width of a group."""
        return {"o": self.head_count * self.head_size, "down": self.feed_forward_length}.get(
            group, self.embedding_length
        )


LLAMA_3_1_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256)


def q4_k_m_types(layer: int, layers: int, group: str) -> tuple[str, ...]:
    """Types that llama.cpp's Q4_K_M gives the linears of a group: attn_v and ffn_down of half the layers are Q6_K."""
    more_bits = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    better = "Q6_K" if more_bits else "Q4_K"
    return {"qkv": ("Q4_K", "Q4_K", better), "o": ("Q4_K",), "gate_up": ("Q4_K", "Q4_K"), "down": (better,)}[group]


@dataclass
class Linears:
    """The linears of a group in one layer, their adapters in the compute dtype, and where their gradients go."""

    blocks: list[torch.Tensor]
    types: tuple[str, ...]
    row_counts: tuple[int, ...]
    columns: int
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    d_lora_a: torch.Tensor
    d_lora_b: torch.Tensor

    @property
    def num_rows(self) -> int:
        return sum(self.row_counts)

    @property
    def rank(self) -> int:
        return self.lora_b.shape[1]

    @property
    def num_ranks(self) -> int:
        return self.lora_a.shape[0]


@dataclass
class Stash:
    """What backward needs of one layer. `sent` and `fetched` mark the end of copies to and from the host."""

    h1: torch.Tensor
    h2: torch.Tensor
    qkv: torch.Tensor
    attention: torch.Tensor | None = None
    sent: torch.cuda.Event | None = None
    fetched: torch.cuda.Event | None = None


@dataclass
class Kept:
    """Small things that every layer keeps on the GPU: rank-sized products, and what attention wants back."""

    xa: dict[str, torch.Tensor] = field(default_factory=dict)
    attention: tuple[object, ...] = ()
    gate_up: torch.Tensor | None = None


@dataclass(frozen=True)
class Policy:
    """What a step trades between memory and time.

    resident_layers: layers whose stash stays on the GPU; fewer than all means that the others go to the host and back.
    kept_gate_up: layers, counted from the last, that keep gate and up instead of computing them again.
    shares_decode: gate and up, decoded for the second forward, stay decoded for their backward.
    kept_weights: layers, counted from the last, whose weights stay decoded from forward to backward.
    token_chunk: tokens whose logits are held at once.
    head_rows: rows of the head that are held decoded at once.
    """

    resident_layers: int
    kept_gate_up: int
    shares_decode: bool
    token_chunk: int
    head_rows: int
    kept_weights: int = 0


class LlamaStep:
    """Random weights, adapters and buffers of one model, and the step over them."""

    def __init__(
        self,
        shape: Shape,
        *,
        batch_size: int,
        sequence_length: int,
        rank: int,
        scale: float,
        policy: Policy,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.shape, self.policy, self.scale, self.dtype, self.device = shape, policy, scale, dtype, device
        self.batch_size, self.sequence_length = batch_size, sequence_length
        generator = torch.Generator(device).manual_seed(seed)
        self.make_weights(rank, generator)
        self.make_buffers()

    def make_weights(self, rank: int, generator: torch.Generator) -> None:
        """Random blocks of about the size of trained weights, and adapters with B not zero, so that nothing is
        multiplied by it.
        """
        shape = self.shape
        layers = range(shape.block_count)
        num_a = sum(rank * len(shape.rows(g)) * shape.columns(g) for g in GROUPS) * shape.block_count
        num_b = sum(rank * sum(shape.rows(g)) for g in GROUPS) * shape.block_count
        # all A, then all B: one multiplication gives every gradient of B its factor s
        self.master = torch.nn.Parameter(torch.randn(num_a + num_b, device=self.device, generator=generator) * 0.01)
        self.master.grad = torch.zeros_like(self.master)
        self.adapters = self.master.detach().to(self.dtype)
        self.num_a = num_a
        position = {"a": 0, "b": num_a}

        def take(flat: torch.Tensor, kind: str, rows: int, columns: int) -> torch.Tensor:
            return flat[position[kind] : position[kind] + rows * columns].view(rows, columns)

        self.layers: list[dict[str, Linears]] = []
        for layer in layers:
            groups = {}
            for group in GROUPS:
                rows, columns = shape.rows(group), shape.columns(group)
                types = q4_k_m_types(layer, shape.block_count, group)
                blocks = [
                    random_blocks(
                        type, count, columns, generator=generator, magnitude=6e-5 if type == "Q4_K" else 1.5e-5
                    )
                    for type, count in zip(types, rows, strict=True)
                ]
                a, b = (rank * len(rows), columns), (sum(rows), rank)
                groups[group] = Linears(
                    blocks,
                    types,
                    rows,
                    columns,
                    take(self.adapters, "a", *a),
                    take(self.adapters, "b", *b),
                    take(self.master.grad, "a", *a),
                    take(self.master.grad, "b", *b),
                )
                position["a"] += a[0] * a[1]
                position["b"] += b[0] * b[1]
            self.layers.append(groups)
        width = shape.embedding_length
        self.norms = [
            (
                torch.rand(width, device=self.device, generator=generator) + 0.5,
                torch.rand(width, device=self.device, generator=generator) + 0.5,
            )
            for _ in layers
        ]
        self.output_norm = torch.rand(width, device=self.device, generator=generator) + 0.5
        self.token_embd = random_blocks("Q4_K", shape.vocabulary, width, generator=generator, magnitude=6e-5)
        self.output = random_blocks("Q6_K", shape.vocabulary, width, generator=generator, magnitude=1.5e-5)

    def make_buffers(self) -> None:
        """Everything that lives for the whole step; see Policy for what may be left out."""
        shape, policy = self.shape, self.policy
        tokens, width, ff = self.batch_size * self.sequence_length, shape.embedding_length, shape.feed_forward_length
        qkv = sum(shape.rows("qkv"))

        def empty(*sizes: int) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=self.dtype, device=self.device)

        self.x, self.dh = empty(tokens, width + PADDING), empty(tokens, width + PADDING)
        self.y = empty(tokens, width)
        self.act = empty(tokens, ff + PADDING)
        # gradients of q, k, v are wanted when nobody wants the activation
        self.d_qkv = self.act.view(-1)[: tokens * (qkv + PADDING)].view(tokens, qkv + PADDING)
        self.gate_up = [empty(tokens, 2 * ff + PADDING) for _ in range(max(1, policy.kept_gate_up))]
        sizes = {g: (sum(shape.rows(g)) + PADDING) * (shape.columns(g) + PADDING) for g in GROUPS}
        self.workspace = empty(max(sizes.values()) + (max(sizes["down"], sizes["o"]) if policy.shares_decode else 0))
        self.stashes = [
            Stash(empty(tokens, width), empty(tokens, width), empty(tokens, qkv))
            for _ in range(min(policy.resident_layers, shape.block_count))
        ]
        self.host: list[dict[str, torch.Tensor]] = []
        for _ in range(shape.block_count - len(self.stashes)):
            self.host.append(
                {
                    name: torch.empty(tokens, columns, dtype=self.dtype, pin_memory=True)
                    for name, columns in (("h1", width), ("h2", width), ("qkv", qkv), ("attention", shape.columns("o")))
                }
            )
        if self.device.type == "cuda":
            self.copies = torch.cuda.Stream()
            for stash in self.stashes:
                stash.sent, stash.fetched = torch.cuda.Event(), torch.cuda.Event()
        self.kept = [Kept() for _ in range(shape.block_count)]
        self.weights = {
            (layer, group): empty(sum(shape.rows(group)) + PADDING, shape.columns(group) + PADDING)
            for layer in range(shape.block_count - policy.kept_weights, shape.block_count)
            for group in GROUPS
        }
        half = shape.head_size // 2
        frequencies = shape.freq_base ** (-torch.arange(half, device=self.device, dtype=torch.float64) / half)
        angles = torch.arange(self.sequence_length, device=self.device)[:, None] * frequencies
        self.cos = angles.cos().float().repeat(self.batch_size, 1)
        self.sin = angles.sin().float().repeat(self.batch_size, 1)

    def decode(self, layer: int, group: str, *, is_backward: bool = False, beside: bool = False) -> torch.Tensor:
        """Extended weight of a group, in a place of its own or else in the workspace; `beside` leaves the workspace's
        first part alone.
        """
        linears = self.layers[layer][group]
        rows, columns = linears.num_rows + PADDING, linears.columns + PADDING
        extended = self.weights.get((layer, group))
        if extended is not None and is_backward:
            return extended
        if extended is None:
            flat = self.workspace[-rows * columns :] if beside else self.workspace[: rows * columns]
            extended = flat.view(rows, columns)
        first = 0
        for blocks, type, count in zip(linears.blocks, linears.types, linears.row_counts, strict=True):
            dequantize(blocks, type, out=extended[first : first + count, : linears.columns])
            first += count
        lora_extend_(extended, linears.lora_a, linears.lora_b, row_counts=linears.row_counts, scale=self.scale)
        return extended

    def low_rank(self, x: torch.Tensor, linears: Linears) -> torch.Tensor:
        """x Aᵀ into the columns of `x` behind its first `columns`; returns a copy, which backward keeps."""
        xa = x[:, linears.columns : linears.columns + linears.num_ranks]
        torch.mm(x[:, : linears.columns], linears.lora_a.t(), out=xa)
        return xa.contiguous()

    def gradients(
        self, dy: torch.Tensor, extended: torch.Tensor, x: torch.Tensor, xa: torch.Tensor, linears: Linears
    ) -> None:
        """dy s B into the columns of `dy` behind its rows' first N, and the gradients of all A and B of a group."""
        rows = linears.num_rows
        torch.mm(dy[:, :rows], extended[:rows, linears.columns :], out=dy[:, rows:])
        product(dy[:, rows : rows + linears.num_ranks].t(), x, linears.d_lora_a)
        first = 0
        for i, count in enumerate(linears.row_counts):
            columns = slice(i * linears.rank, (i + 1) * linears.rank)
            product(dy[:, first : first + count].t(), xa[:, columns], linears.d_lora_b[first : first + count])
            first += count

    def heads(self, qkv: torch.Tensor) -> Iterator[torch.Tensor]:
        """q, k, v as [T, heads, K] views of their rows."""
        kv = self.shape.head_count_kv
        heads = qkv[:, : sum(self.shape.rows("qkv"))].unflatten(1, (-1, self.shape.head_size))
        return iter(heads.split((self.shape.head_count, kv, kv), 1))

    def batched(self, heads: torch.Tensor) -> torch.Tensor:
        """[T, heads, K] as [B, heads, S, K]."""
        return heads.unflatten(0, (self.batch_size, self.sequence_length)).transpose(1, 2)

    def run_feed_forward(self, layer: int, extended: torch.Tensor) -> torch.Tensor:
        """gate and up of `self.x`, in the layer's buffer."""
        linears = self.layers[layer]["gate_up"]
        gate_up = self.kept[layer].gate_up
        assert gate_up is not None
        torch.mm(self.x, extended[: linears.num_rows].t(), out=gate_up[:, : linears.num_rows])
        return gate_up

    def forward_layer(self, layer: int, stash: Stash, stream: torch.Tensor | None) -> None:
        """From `stream` (None: stash.h1 holds the embedding) and the last product `self.y` to the next `self.y`."""
        shape, groups, kept = self.shape, self.layers[layer], self.kept[layer]
        width, ff = shape.embedding_length, shape.feed_forward_length
        x = self.x[:, :width]
        if stream is None:
            rms_norm_forward(stash.h1, self.norms[layer][0], eps=shape.eps, out=x)
        else:
            rms_norm_forward(stream, self.norms[layer][0], eps=shape.eps, residual=self.y, total=stash.h1, out=x)
        kept.xa["qkv"] = self.low_rank(self.x, groups["qkv"])
        torch.mm(self.x, self.decode(layer, "qkv")[: groups["qkv"].num_rows].t(), out=stash.qkv)
        q, k, v = self.heads(stash.qkv)
        q_k = stash.qkv[:, : sum(groups["qkv"].row_counts[:2])].unflatten(1, (-1, shape.head_size))
        rope_forward(q_k, self.cos, self.sin, is_neox=False, out=q_k)
        attention, kept.attention = attention_forward(*(self.batched(heads) for heads in (q, k, v)))
        stash.attention = attention.transpose(1, 2).reshape(x.shape[0], -1)
        kept.xa["o"] = torch.mm(stash.attention, groups["o"].lora_a.t())
        torch.mm(
            stash.attention, self.decode(layer, "o")[: groups["o"].num_rows, : groups["o"].columns].t(), out=self.y
        )
        self.y.addmm_(kept.xa["o"], groups["o"].lora_b.t(), alpha=self.scale)

        rms_norm_forward(stash.h1, self.norms[layer][1], eps=shape.eps, residual=self.y, total=stash.h2, out=x)
        kept.xa["gate_up"] = self.low_rank(self.x, groups["gate_up"])
        gate_up = self.run_feed_forward(layer, self.decode(layer, "gate_up"))
        swiglu_forward(gate_up[:, :ff], gate_up[:, ff : 2 * ff], out=self.act[:, :ff])
        kept.xa["down"] = self.low_rank(self.act, groups["down"])
        torch.mm(self.act, self.decode(layer, "down")[: groups["down"].num_rows].t(), out=self.y)

    def backward_layer(self, layer: int, stash: Stash) -> None:
        """`self.dh` from the gradient of the layer's output to that of its input."""
        shape, policy, groups, kept = self.shape, self.policy, self.layers[layer], self.kept[layer]
        width, ff = shape.embedding_length, shape.feed_forward_length
        x, dh = self.x[:, :width], self.dh[:, :width]
        _, _, inverse_rms = rms_norm_forward(stash.h2, self.norms[layer][1], eps=shape.eps, out=x)
        extended = None
        if layer < shape.block_count - policy.kept_gate_up:
            linears = groups["gate_up"]
            self.x[:, width : width + linears.num_ranks] = kept.xa["gate_up"]
            extended = self.decode(layer, "gate_up", is_backward=True)
            self.run_feed_forward(layer, extended)
        gate_up = kept.gate_up
        assert gate_up is not None and stash.attention is not None

        down = self.decode(layer, "down", is_backward=True, beside=policy.shares_decode)
        rows = groups["down"].num_rows
        torch.mm(dh, down[:rows, ff:], out=self.dh[:, width:])
        torch.mm(self.dh, down[:, :ff], out=self.act[:, :ff])
        gate, up = gate_up[:, :ff], gate_up[:, ff : 2 * ff]
        swiglu_backward(self.act[:, :ff], gate, up, d_gate=gate, d_up=up, y=self.act[:, :ff])
        product(self.dh[:, width : width + groups["down"].num_ranks].t(), self.act[:, :ff], groups["down"].d_lora_a)
        product(dh.t(), kept.xa["down"], groups["down"].d_lora_b)

        if extended is None or not policy.shares_decode:
            extended = self.decode(layer, "gate_up", is_backward=True)
        self.gradients(gate_up, extended, x, kept.xa["gate_up"], groups["gate_up"])
        torch.mm(gate_up, extended[:, :width], out=self.y)
        rms_norm_backward(self.y, stash.h2, self.norms[layer][1], inverse_rms, d_residual=dh, out=dh)

        extended = self.decode(layer, "o", is_backward=True)
        self.gradients(self.dh, extended, stash.attention, kept.xa["o"], groups["o"])
        torch.mm(self.dh, extended[:, : groups["o"].columns], out=self.y)
        gradients = attention_backward(
            self.batched(self.y.unflatten(1, (-1, shape.head_size))),
            *(self.batched(heads) for heads in self.heads(stash.qkv)),
            self.batched(stash.attention.unflatten(1, (-1, shape.head_size))),
            kept.attention,
        )
        d_q, d_k, d_v = (gradient.transpose(1, 2).flatten(0, 1) for gradient in gradients)
        places = list(self.heads(self.d_qkv))
        rope_backward(d_q, self.cos, self.sin, is_neox=False, out=places[0])
        rope_backward(d_k, self.cos, self.sin, is_neox=False, out=places[1])
        places[2].copy_(d_v)

        _, _, inverse_rms = rms_norm_forward(stash.h1, self.norms[layer][0], eps=shape.eps, out=x)
        extended = self.decode(layer, "qkv", is_backward=True)
        self.gradients(self.d_qkv, extended, x, kept.xa["qkv"], groups["qkv"])
        if layer > 0:
            torch.mm(self.d_qkv, extended[:, :width], out=self.y)
            rms_norm_backward(self.y, stash.h1, self.norms[layer][0], inverse_rms, d_residual=dh, out=dh)

    def send(self, layer: int, stash: Stash) -> None:
        """Copy a layer's stash to the host, beside whatever the GPU does next."""
        assert stash.attention is not None and stash.sent is not None
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for name, host in self.host[layer].items():
                host.copy_(getattr(stash, name), non_blocking=True)
            stash.sent.record()

    def fetch(self, layer: int, stash: Stash) -> None:
        """Copy a layer's stash back from the host into one that is no longer needed."""
        assert stash.fetched is not None
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for name, host in self.host[layer].items():
                getattr(stash, name).copy_(host, non_blocking=True)
            stash.fetched.record()

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of int64 [T] targets; gradients of all adapters in `master.grad`, overwritten."""
        shape, policy = self.shape, self.policy
        layers, num_resident, width = shape.block_count, len(self.stashes), shape.embedding_length
        num_tokens = tokens.shape[0]
        dequantize(self.token_embd[tokens], "Q4_K", out=self.stashes[0].h1)
        stream = None
        for layer in range(layers):
            stash = self.stashes[layer % num_resident]
            if layer >= num_resident:
                torch.cuda.current_stream().wait_event(stash.sent)
            first_kept = layers - policy.kept_gate_up
            self.kept[layer].gate_up = self.gate_up[max(0, layer - first_kept)]
            self.forward_layer(layer, stash, stream)
            stream = stash.h2
            if layer < layers - num_resident:
                self.send(layer, stash)

        assert stream is not None
        _, total, inverse_rms = rms_norm_forward(
            stream, self.output_norm, eps=shape.eps, residual=self.y, total=self.y, out=self.x[:, :width]
        )
        rows = min(policy.head_rows, shape.vocabulary)
        losses, _ = linear_cross_entropy(
            self.x[:, :width],
            self.output,
            "Q6_K",
            targets,
            token_chunk=policy.token_chunk,
            workspace=self.workspace[: rows * width].view(rows, width)
            if rows * width <= self.workspace.numel()
            else torch.empty(rows, width, dtype=self.dtype, device=self.device),
            logits=self.logits_scratch(),
            out=self.dh[:, :width],
            gradient_scale=1 / num_tokens,
        )
        rms_norm_backward(self.dh[:, :width], total, self.output_norm, inverse_rms, out=self.dh[:, :width])
        for layer in reversed(range(layers)):
            stash = self.stashes[layer % num_resident]
            if layer < layers - num_resident:
                torch.cuda.current_stream().wait_event(stash.fetched)
            self.backward_layer(layer, stash)
            if layer >= num_resident:
                self.fetch(layer - num_resident, stash)
        assert self.master.grad is not None
        self.master.grad[self.num_a :].mul_(self.scale)
        return losses.sum() / num_tokens

    def logits_scratch(self) -> torch.Tensor | None:
        """Logits of a chunk in a buffer that is idle during the loss, if one is large enough."""
        needed = self.policy.token_chunk * self.shape.vocabulary
        idle = self.act if self.policy.kept_gate_up else self.gate_up[0]
        return idle.view(-1)[:needed].view(self.policy.token_chunk, -1) if idle.numel() >= needed else None

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Loss and gradients, clipped to norm 1, one update, and the adapters rounded anew."""
        loss = self.forward_backward(tokens, targets)
        assert self.master.grad is not None
        self.master.grad.mul_((1 / self.master.grad.norm()).clamp(max=1))
        optimizer.step()
        self.adapters.copy_(self.master.detach())
        return loss

    def num_weight_bytes(self) -> int:
        """Bytes of all blocks."""
        linears = (blocks for groups in self.layers for group in groups.values() for blocks in group.blocks)
        return sum(blocks.numel() for blocks in (*linears, self.token_embd, self.output))


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """a b with float32 sums, into a float32 place."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, tuple[object, ...]]:
    """Causal attention of q [B, H, S, K] on k, v [B, N, S, K]; what backward needs besides q, k, v and the output."""
    if not q.is_cuda:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            output = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return output.detach(), (output, leaves)
    output, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return output, tuple(rest[:7])


def attention_backward(
    d_output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    kept: tuple[object, ...],
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v."""
    if not q.is_cuda:
        return torch.autograd.grad(kept[0], kept[1], d_output)
    logsumexp, cum_q, cum_k, max_q, max_k, seed, offset = kept
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d_output, q, k, v, output, logsumexp, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
    )
