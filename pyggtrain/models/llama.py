"""`llama`: Llama 1-3, Mistral, SmolLM and all else that converts to `general.architecture = llama`, without experts.

Paper: Touvron et al. 2023 (2302.13971). Reference: llama.cpp 0c1e57098, src/models/llama.cpp, restated here.

    x = token_embd[tokens]
    each layer:  x = x + attn_output(attention(rope(q), rope(k), v))    q, k, v = attn_{q,k,v}(attn_norm(x)) or attn_qkv
                 x = x + ffn_down(silu(ffn_gate(y)) ∘ ffn_up(y))        y = ffn_norm(x)
    logits = output(output_norm(x))                                     output is token_embd if the file has none

Rope pairs neighbours ("NORM"), since the converter has permuted the rows of attn_q and attn_k for it; nothing here
permutes them back, so the rows of an adapter lie as the file's own.
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import nn

from pyggtrain import ops
from pyggtrain.errors import UnsupportedError
from pyggtrain.gguf import GGUFFile
from pyggtrain.models.reader import Keys, Tensors
from pyggtrain.nn import (
    AttentionHalf,
    Batch,
    Embedding,
    FeedForwardHalf,
    FusedLayer,
    FusedLayers,
    HostStash,
    QuantLinear,
    RMSNorm,
    RopeSettings,
    RopeTableCache,
    SplittableModel,
    YarnSettings,
    activation_dtype,
    kept_by,
    run_layer,
    why_untrainable,
)
from pyggtrain.ops.fused import Kept

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """The file's metadata: each field is the key `llama.<field>` with dots as underscores."""

    block_count: int
    context_length: int
    embedding_length: int
    feed_forward_length: int
    attention_head_count: int
    attention_head_count_kv: int
    attention_key_length: int
    attention_layer_norm_rms_epsilon: float
    rope_freq_base: float
    rope_scaling_type: str
    rope_scaling_factor: float
    rope_scaling_attn_factor: float
    rope_scaling_original_context_length: int

    @classmethod
    def read(cls, file: GGUFFile) -> "Config":
        """The configuration of a file.

        Raises:
            GGUFError: a key is missing or malformed.
            UnsupportedError: a key asks for something that is not implemented.
        """
        keys = Keys(file)
        context_length = keys.positive("context_length")
        embedding_length = keys.positive("embedding_length")
        head_count = keys.positive("attention.head_count")
        key_length = keys.positive("attention.key_length", embedding_length // head_count)
        # The old name of the factor is read only where the new one is absent, as llama.cpp does.
        old_factor = keys.number("rope.scale_linear", 0.0)
        config = cls(
            block_count=keys.positive("block_count"),
            context_length=context_length,
            embedding_length=embedding_length,
            feed_forward_length=keys.positive("feed_forward_length"),
            attention_head_count=head_count,
            attention_head_count_kv=keys.positive("attention.head_count_kv", head_count),
            attention_key_length=key_length,
            attention_layer_norm_rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            rope_freq_base=keys.number("rope.freq_base", 10000.0, above=1.0),
            rope_scaling_type=keys.text("rope.scaling.type", "linear"),
            rope_scaling_factor=keys.number("rope.scaling.factor", old_factor),
            rope_scaling_attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
            rope_scaling_original_context_length=keys.positive("rope.scaling.original_context_length", context_length),
        )
        keys.expect("attention.value_length", key_length, "a value head of another width than the key head")
        keys.expect("rope.dimension_count", key_length, "rotating only a part of each head")
        keys.expect("expert_count", 0, "a mixture of experts")
        keys.expect("expert_used_count", 0, "a mixture of experts")
        keys.expect("attention.causal", True, "attention to later tokens")
        keys.expect("nextn_predict_layers", 0, "multi-token prediction")
        unread = "llama.cpp does not read it for this architecture, and training computes what llama.cpp will."
        default_scale = 1 / math.sqrt(key_length)
        keys.unused(
            "attention.scale",
            unread,
            is_neutral=lambda value: value == 0 or math.isclose(value, default_scale, rel_tol=1e-6),
        )
        keys.unused("attention.sliding_window", unread, is_neutral=lambda value: value == 0)
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"):
            keys.unused(f"rope.scaling.{name}", unread, is_neutral=lambda value: False)
        for name in ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"):
            keys.unused(name, unread)
        keys.warn_of_rest()
        if key_length % 2:
            raise UnsupportedError(
                f"{file.path} has heads of {key_length} numbers: needed an even number, to rotate them in pairs."
            )
        if config.rope_scaling_factor < 0:
            raise UnsupportedError(
                f"llama.rope.scaling.factor in {file.path} is {config.rope_scaling_factor}: needed 0 or more."
            )
        if head_count % config.attention_head_count_kv:
            raise UnsupportedError(
                f"{file.path} has {head_count} query heads and {config.attention_head_count_kv} kv heads: "
                "needed the one to be a multiple of the other."
            )
        if config.rope_scaling_type not in ("none", "linear", "yarn", "longrope"):
            raise UnsupportedError(
                f"llama.rope.scaling.type in {file.path} is '{config.rope_scaling_type}': "
                "needed none, linear, yarn or longrope."
            )
        return config


def _rope_settings(config: Config, tensors: Tensors, num_ctx: int) -> RopeSettings:
    num_pairs = config.attention_key_length // 2
    original = config.rope_scaling_original_context_length
    name = "rope_freqs.weight"
    if config.rope_scaling_type == "longrope":
        # llama.cpp serves with the long factors whenever its context is larger than the original one, however short the
        # text.
        is_long = num_ctx > original
        name = f"rope_factors_{'long' if is_long else 'short'}.weight"
        tensors.take_optional(f"rope_factors_{'short' if is_long else 'long'}.weight", (num_pairs,))
        logger.info(
            "rope factors: %s, for a context of %d tokens (original: %d)",
            "long" if is_long else "short",
            num_ctx,
            original,
        )
    factors = tensors.take_optional(name, (num_pairs,))
    has_scale = config.rope_scaling_type != "none" and config.rope_scaling_factor != 0.0
    return RopeSettings(
        dimension_count=config.attention_key_length,
        freq_base=config.rope_freq_base,
        pairing="NORM",
        freq_scale=1 / config.rope_scaling_factor if has_scale else 1.0,
        attn_factor=config.rope_scaling_attn_factor,
        yarn=YarnSettings(original) if config.rope_scaling_type == "yarn" else None,
        freq_factors=None if factors is None else ops.dequantize(factors),
    )


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: Config, tensors: Tensors, index: int, compute: str) -> None:
        super().__init__()
        width, num_ff = config.embedding_length, config.feed_forward_length
        head_width = config.attention_key_length
        self.num_heads, self.num_kv_heads, self.head_width = (
            config.attention_head_count,
            config.attention_head_count_kv,
            head_width,
        )
        self.softmax_scale = 1 / math.sqrt(head_width)
        num_q, num_kv = self.num_heads * head_width, self.num_kv_heads * head_width

        def norm(name: str) -> RMSNorm:
            weight = tensors.take(f"blk.{index}.{name}.weight", (width,))
            return RMSNorm(weight, eps=config.attention_layer_norm_rms_epsilon)

        def linear(name: str, num_in: int, num_out: int) -> QuantLinear:
            weight = tensors.take(f"blk.{index}.{name}.weight", (num_out, num_in))
            return QuantLinear(weight, bias(name, num_out), compute=compute)

        def bias(name: str, num_out: int) -> torch.Tensor | None:
            tensor = tensors.take_optional(f"blk.{index}.{name}.bias", (num_out,))
            return None if tensor is None else ops.dequantize(tensor)

        self.attn_norm = norm("attn_norm")
        self.has_fused_qkv = f"blk.{index}.attn_qkv.weight" in tensors
        if self.has_fused_qkv:
            self.attn_qkv = linear("attn_qkv", width, num_q + 2 * num_kv)
            if self.attn_qkv.bias is None:
                # A fused weight may come with separate biases; llama.cpp uses them only if all three are there.
                parts = [bias("attn_q", num_q), bias("attn_k", num_kv), bias("attn_v", num_kv)]
                present = [part for part in parts if part is not None]
                self.attn_qkv.bias = torch.cat(present) if len(present) == 3 else None
        else:
            self.attn_q = linear("attn_q", width, num_q)
            self.attn_k = linear("attn_k", width, num_kv)
            self.attn_v = linear("attn_v", width, num_kv)
        self.attn_output = linear("attn_output", num_q, width)
        self.ffn_norm = norm("ffn_norm")
        self.ffn_gate = linear("ffn_gate", width, num_ff)
        self.ffn_up = linear("ffn_up", width, num_ff)
        self.ffn_down = linear("ffn_down", num_ff, width)

    def fused(self) -> FusedLayer:
        """The same layer as two coarse operations."""
        attention = AttentionHalf(
            self.attn_norm,
            (self.attn_qkv,) if self.has_fused_qkv else (self.attn_q, self.attn_k, self.attn_v),
            self.attn_output,
            self.num_heads,
            self.num_kv_heads,
            self.head_width,
            self.softmax_scale,
        )
        return FusedLayer(attention, FeedForwardHalf(self.ffn_norm, (self.ffn_gate, self.ffn_up), self.ffn_down))

    def forward(
        self,
        x_TD: torch.Tensor,
        tables: ops.RopeTables,
        documents: ops.Documents,
        kept: Kept | None = None,
        stash: HostStash | None = None,
    ) -> torch.Tensor:
        if kept is not None:
            return self.fused()(x_TD, tables, documents, kept, stash)
        x_TD = x_TD + self._attention(self.attn_norm(x_TD), tables, documents)
        y_TD = self.ffn_norm(x_TD)
        output_TD: torch.Tensor = self.ffn_down(ops.swiglu(self.ffn_gate(y_TD), self.ffn_up(y_TD)), residual_TN=x_TD)
        return output_TD

    def _attention(self, y_TD: torch.Tensor, tables: ops.RopeTables, documents: ops.Documents) -> torch.Tensor:
        if self.has_fused_qkv:
            qkv = self.attn_qkv(y_TD).unflatten(1, (self.num_heads + 2 * self.num_kv_heads, self.head_width))
            q_THK, k_TNK, v_TNK = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        else:
            q_THK, k_TNK, v_TNK = (
                linear(y_TD).unflatten(1, (-1, self.head_width)) for linear in (self.attn_q, self.attn_k, self.attn_v)
            )
        o_THK = ops.attention(
            ops.rope(q_THK, tables), ops.rope(k_TNK, tables), v_TNK, documents, softmax_scale=self.softmax_scale
        )
        output_TD: torch.Tensor = self.attn_output(o_THK.flatten(1))
        return output_TD


class Llama(SplittableModel):
    """A `llama` file.

    Args:
        file: opened GGUF file.
        device: where to compute.
        dtype: of activations; None: `nn.activation_dtype(device)`.
        compute: how products with quantised weights are computed, see `ops.quant_linear`.
        num_ctx: context that llama.cpp will serve with; only longrope files depend on it. None: the file's
            `context_length`, which is llama-server's default.
        layers: those that are computed here, see `nn.Model`; None: all of them. The weights of the others stay in the
            mapped file.

    Raises:
        GGUFError: the file is incomplete or inconsistent.
        UnsupportedError: it asks for something that is not implemented.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        compute: str = "auto",
        num_ctx: int | None = None,
        layers: range | None = None,
    ) -> None:
        super().__init__(file.architecture)
        config = Config.read(file)
        own = range(config.block_count) if layers is None else layers
        head_is_tied = "output.weight" not in file.tensors

        def device_of(name: str) -> torch.device | str:
            if name.startswith("blk."):
                is_here = int(name.split(".")[1]) in own
            elif name.startswith("output"):
                is_here = own.stop == config.block_count
            elif name == "token_embd.weight":
                is_here = own.start == 0 or (head_is_tied and own.stop == config.block_count)
            else:
                is_here = True
            return device if is_here else "cpu"

        tensors = Tensors(file, device_of)
        self.own_layers = own
        self._device, self._dtype = torch.device(device), dtype or activation_dtype(device)
        self.config = config
        self.compute = compute
        # llama.cpp rounds its context up to a multiple of 256.
        self.rope = RopeTableCache(_rope_settings(config, tensors, -(-(num_ctx or config.context_length) // 256) * 256))
        self.token_embd = Embedding(tensors.take("token_embd.weight", (None, config.embedding_length)), self._dtype)
        self.blk = nn.ModuleList(Block(config, tensors, index, compute) for index in range(config.block_count))
        self.output_norm = RMSNorm(
            tensors.take("output_norm.weight", (config.embedding_length,)), eps=config.attention_layer_norm_rms_epsilon
        )
        head = tensors.take_optional("output.weight", self.token_embd.shape)
        self.output = None if head is None else QuantLinear(head, compute=compute)
        self.head_is_tied = head is None
        tensors.check_rest()
        self._fused = FusedLayers([layer for layer in self._own_blocks if isinstance(layer, Block)])
        self.linears = {module.gguf_name: module for module in self.modules() if isinstance(module, QuantLinear)}
        self.untrainable = {
            name: why_untrainable(name, head_is_tied=self.head_is_tied)
            for name in file.tensors
            if name not in self.linears
        }

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.blk)

    @property
    def fused_layers(self) -> list[FusedLayer]:
        return [layer.fused() for layer in self._fused.layers]

    @property
    def is_fused(self) -> bool:
        return self._device.type == "cuda" and self._can_fuse

    @property
    def _can_fuse(self) -> bool:
        return self._fused.can_fuse(self._dtype, self._device)

    def join_copies(self) -> None:
        """See `nn.Model`."""
        self._fused.join_copies()

    @property
    def _own_blocks(self) -> list[nn.Module]:
        return [self.blk[index] for index in self.own_layers]

    def embed(self, batch: Batch) -> torch.Tensor:
        return self.with_noise(self.token_embd(batch.tokens_T), batch)

    def run_own_layers(self, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        tables = self.rope.tables(batch)
        documents = batch.documents
        if self._can_fuse:
            kept = self.kept or kept_by(self.checkpoint_policy, len(self.own_layers))
            x_TD = self._fused(x_TD, tables, documents, kept, self.announce)
        else:
            for number, layer in zip(self.own_layers, self._own_blocks, strict=True):
                self.announce(number)
                x_TD = run_layer(layer, x_TD, tables, documents, policy=self.checkpoint_policy)
        self.announce(len(self.layers))
        return x_TD

    def hidden(self, batch: Batch) -> torch.Tensor:
        """The last layer's output, [T, D]."""
        return self.run_own_layers(self.embed(batch), batch)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        return self.loss_of(self.hidden(batch), batch)

    def loss_of(self, x_TD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
        x_TD, targets_T = self.output_norm(x_TD), batch.targets_T
        if batch.supervised.shape[0] != batch.num_tokens or batch.num_targets != batch.num_tokens:
            x_TD, targets_T = x_TD.index_select(0, batch.supervised), targets_T.index_select(0, batch.supervised)
        if self.output is not None:
            loss_sum, _ = self.output.cross_entropy(x_TD, targets_T, chunk=self.loss_chunk)
        else:
            loss_sum, _ = ops.linear_cross_entropy(
                x_TD, self.token_embd.quant, targets_T, chunk=self.loss_chunk, compute=self.compute
            )
        return loss_sum, batch.num_targets

    def log_probs(self, batch: Batch) -> torch.Tensor:
        return self.log_probs_of(self.hidden(batch), batch)

    def log_probs_of(self, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        return ops.log_probs(
            lambda rows, x_CD: self._head(x_CD),
            self.output_norm(x_TD),
            batch.targets_T,
            self.token_embd.shape[0],
            chunk=self.loss_chunk,
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        return self._head(self.output_norm(self.hidden(batch)))

    def _head(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.output is not None:
            logits_TV: torch.Tensor = self.output(x_TD)
            return logits_TV
        return ops.quant_linear(x_TD, self.token_embd.quant, compute=self.compute)
