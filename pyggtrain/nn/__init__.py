"""torch modules shared by models: they hold a file's tensors and call `pyggtrain.ops`."""

from pyggtrain.nn.batch import Batch
from pyggtrain.nn.checkpointing import POLICIES, run_layer
from pyggtrain.nn.embedding import Embedding
from pyggtrain.nn.model import Model, why_untrainable
from pyggtrain.nn.quant_linear import LoraPair, QuantLinear
from pyggtrain.nn.rms_norm import RMSNorm
from pyggtrain.nn.rope import RopeSettings, YarnSettings

__all__ = [
    "POLICIES",
    "Batch",
    "Embedding",
    "LoraPair",
    "Model",
    "QuantLinear",
    "RMSNorm",
    "RopeSettings",
    "YarnSettings",
    "run_layer",
    "why_untrainable",
]
