"""LoRA adapters: attaching them to a model, and the GGUF files that llama.cpp loads."""

from pyggtrain.adapters.gguf_adapter import AdapterFile, base_fingerprint, check_against_base, load, restore, save
from pyggtrain.adapters.lora import LoraAdapter, LoraConfig, attach

__all__ = [
    "AdapterFile",
    "LoraAdapter",
    "LoraConfig",
    "attach",
    "base_fingerprint",
    "check_against_base",
    "load",
    "restore",
    "save",
]
