"""torch modules shared by models: they hold a file's tensors and call `pyggtrain.ops`."""

from pyggtrain.nn.batch import Batch
from pyggtrain.nn.checkpointing import GPU_POLICIES, POLICIES, kept_by, run_layer
from pyggtrain.nn.diffusion import Diffusion
from pyggtrain.nn.embedding import Embedding
from pyggtrain.nn.expert_half import ExpertHalf
from pyggtrain.nn.expert_linear import ExpertLinear
from pyggtrain.nn.fused_layer import AttentionHalf, DeltaHalf, FeedForwardHalf, FusedLayer, FusedLayers, can_run_fused
from pyggtrain.nn.host_stash import HostStash, goes_to_host, pinned_bytes
from pyggtrain.nn.lane import Lane
from pyggtrain.nn.model import Model, SplittableModel, activation_dtype, why_untrainable
from pyggtrain.nn.quant_linear import LoraPair, QuantLinear
from pyggtrain.nn.rms_norm import RMSNorm
from pyggtrain.nn.rope import RopeSettings, RopeTableCache, YarnSettings
from pyggtrain.nn.whole_layer import run_whole

__all__ = [
    "GPU_POLICIES",
    "POLICIES",
    "AttentionHalf",
    "Batch",
    "DeltaHalf",
    "Diffusion",
    "Embedding",
    "ExpertHalf",
    "ExpertLinear",
    "FeedForwardHalf",
    "FusedLayer",
    "FusedLayers",
    "HostStash",
    "Lane",
    "LoraPair",
    "Model",
    "QuantLinear",
    "RMSNorm",
    "RopeSettings",
    "RopeTableCache",
    "SplittableModel",
    "YarnSettings",
    "activation_dtype",
    "can_run_fused",
    "goes_to_host",
    "kept_by",
    "pinned_bytes",
    "run_layer",
    "run_whole",
    "why_untrainable",
]
