"""GGUF adapter files: what llama.cpp loads with --lora.

A pair for the base tensor `blk.0.attn_q.weight` [N, K] is stored as `blk.0.attn_q.weight.lora_a` [r, K] and
`....lora_b` [N, r], float32. There is one `adapter.lora.alpha` for the whole file, and llama.cpp scales each pair by
alpha / r in float32. Where a pair was trained with another factor (rslora, alpha_pattern), the quotient of the two is
folded into its lora_b.

llama.cpp trusts these files: some mistakes abort the process, others are ignored without a word (facts read in
src/llama-adapter.cpp and measured at 0c1e57098). All of them are refused here, when writing and when reading.
"""

import hashlib
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pyggtrain.adapters.lora import LoraAdapter, scale_of
from pyggtrain.errors import AdapterError
from pyggtrain.gguf import GGUFFile, QuantTensor, TypedValue, typed_metadata, write_gguf
from pyggtrain.ops import dequantize

if TYPE_CHECKING:
    from pyggtrain.gguf import MetadataValue

logger = logging.getLogger(__name__)

_PREFIX = "pyggtrain."
# Types of few bits would also let a small file take much memory.
_TYPES = ("F32", "F16", "BF16", "Q8_0")
_OWN_KEYS = ("general.type", "general.architecture", "adapter.type", "adapter.lora.alpha")
# They describe how this one file is stored, and would be wrong in another.
_KEYS_OF_THE_FILE = ("general.alignment", "general.file_type", "general.quantization_version")
# May be stored as a vector, and are multiplied as a matrix of one row.
_ONE_ROW = ("ffn_gate_inp_shexp.weight", "attn_gate.weight")
# Experts but the shared one take another road in llama.cpp.
_IN_FEED_FORWARD = re.compile(r"\.ffn_(?!\w*_exps\.)")
_BASE_KEYS = {
    "base.header_sha256": "metadata and tensor table",
    "base.tokenizer_sha256": "tokenizer",
    "base.chat_template_sha256": "chat template",
}


@dataclass(frozen=True, eq=False)
class AdapterFile:
    """An adapter read from disk.

    Attributes:
        path: where it was read from.
        architecture: `general.architecture`.
        alpha: `adapter.lora.alpha`, 0 if the file has none.
        pairs: by base tensor name: (lora_a, lora_b) as float32, [r, K] and [N, r] ([E, r, K] and [E, N, r] for
            experts).
        provenance: the values of the file's `pyggtrain.` keys, without that prefix.
        other_metadata: its other keys with their types, but those that say how the file is stored.
    """

    path: Path
    architecture: str
    alpha: float
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    provenance: dict[str, str]
    other_metadata: Mapping[str, TypedValue] = field(default_factory=dict)

    def scale(self, name: str) -> float:
        """The factor that llama.cpp gives this pair: alpha / r in float32, or 1 without an alpha."""
        return scale_of(self.alpha, self.pairs[name][1].shape[-1]) if self.alpha else 1.0


def base_fingerprint(base: GGUFFile) -> dict[str, str]:
    """What identifies a base file: SHA-256 (hex) of its header, its tokenizer and its chat template ("" if none)."""
    template = base.chat_template
    return {
        "base.header_sha256": base.header_sha256,
        "base.tokenizer_sha256": base.tokenizer_sha256,
        "base.chat_template_sha256": "" if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }


def save(
    path: str | os.PathLike[str],
    adapter: LoraAdapter,
    base: GGUFFile,
    *,
    provenance: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write an adapter for llama.cpp. The file appears complete or not at all.

    Args:
        path: the file to write.
        adapter: the trained pairs.
        base: the file they were trained on.
        provenance: stored as `pyggtrain.<key>`, beside the base's fingerprint: version, configuration, hash of the
            whole base, ...
        overwrite: replace an existing file.

    Raises:
        AdapterError: the file exists; a pair does not fit the base or would be dropped or refused by llama.cpp; a
            number is not finite.
    """
    check_free(path, overwrite=overwrite)
    alpha = adapter.config.lora_alpha
    pairs, num_folded = {}, 0
    for name, pair in adapter.pairs.items():
        lora_a, lora_b = pair.lora_a.detach().cpu(), pair.lora_b.detach().cpu()
        served_scale = scale_of(alpha, pair.rank)
        if pair.scale != served_scale:
            lora_b = lora_b * (pair.scale / served_scale)
            num_folded += 1
        pairs[name] = (lora_a, lora_b)
    if num_folded:
        logger.info(
            "%d pairs were trained with another factor than lora_alpha / r; the quotient is folded into their lora_b",
            num_folded,
        )
    _check_pairs(pairs, base, str(path))
    origin = {**(provenance or {}), **base_fingerprint(base)}
    write(path, AdapterFile(Path(path), adapter.architecture, float(alpha), pairs, origin), overwrite=overwrite)


def check_free(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raise AdapterError if there is something at `path` that may not be replaced."""
    if Path(path).exists() and not overwrite:
        raise AdapterError(f"{path} exists already. Choose another name, or overwrite it explicitly.")


def write(path: str | os.PathLike[str], adapter: AdapterFile, *, overwrite: bool = False) -> None:
    """Write pairs, alpha and metadata as they are, float32. The file appears complete or not at all.

    Raises:
        AdapterError: the file exists, or a number is not finite.
    """
    check_free(path, overwrite=overwrite)
    metadata: dict[str, MetadataValue | TypedValue] = {
        "general.type": "adapter",
        "general.architecture": adapter.architecture,
        "adapter.type": "lora",
        **({"adapter.lora.alpha": TypedValue("f32", adapter.alpha)} if adapter.alpha else {}),
        **adapter.other_metadata,
        **{_PREFIX + key: value for key, value in adapter.provenance.items()},
    }
    tensors = [
        _float32_tensor(f"{name}.{half}", values)
        for name, pair_values in adapter.pairs.items()
        for half, values in zip(("lora_a", "lora_b"), pair_values, strict=True)
    ]
    write_gguf(path, metadata, tensors)


def _float32_tensor(name: str, values: torch.Tensor) -> QuantTensor:
    if not bool(torch.isfinite(values).all()):
        raise AdapterError(
            f"{name} holds numbers that are not finite: the training has diverged, and nothing was written. "
            "Lower the learning rate."
        )
    return QuantTensor(name, "F32", tuple(values.shape), values.to(torch.float32).contiguous().view(torch.uint8))


def load(path: str | os.PathLike[str]) -> AdapterFile:
    """Read an adapter file, whoever wrote it.

    Raises:
        GGUFError: not a readable GGUF file.
        AdapterError: a GGUF file that is no LoRA adapter, or one that llama.cpp would refuse, abort on, or apply in
            part.
    """
    file = GGUFFile.open(path)
    for key, needed in (("general.type", "adapter"), ("adapter.type", "lora")):
        found = file.metadata.get(key)
        if found != needed:
            raise AdapterError(f"{file.path} has {key} = {found!r}: needed '{needed}'. It is no LoRA adapter.")
    alpha = 0.0
    if "adapter.lora.alpha" in file.metadata:
        value_type = file.metadata.value_type("adapter.lora.alpha")
        if value_type != "f32":
            raise AdapterError(
                f"adapter.lora.alpha in {file.path} is of type {value_type}: needed f32, as llama.cpp aborts otherwise."
            )
        stored = file.metadata["adapter.lora.alpha"]
        assert isinstance(stored, float), "an f32 is read as a float"
        alpha = stored
        if not math.isfinite(alpha):
            raise AdapterError(f"adapter.lora.alpha in {file.path} is {alpha}: needed a finite number.")
    metadata = typed_metadata(file)
    provenance = {
        key.removeprefix(_PREFIX): str(typed.value) for key, typed in metadata.items() if key.startswith(_PREFIX)
    }
    other = {
        key: typed
        for key, typed in metadata.items()
        if key not in (*_OWN_KEYS, *_KEYS_OF_THE_FILE) and not key.startswith(_PREFIX)
    }
    return AdapterFile(file.path, file.architecture, alpha, _read_pairs(file), provenance, other)


def _read_pairs(file: GGUFFile) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    halves: dict[str, dict[str, QuantTensor]] = {}
    for name, tensor in file.tensors.items():
        base_name, _, half = name.rpartition(".")
        if half not in ("lora_a", "lora_b"):
            fate = "silently ignores it" if name.endswith("_norm.weight") else "refuses the whole file"
            raise AdapterError(
                f"{name} in {file.path} is no half of a LoRA pair (lora_a, lora_b): llama.cpp {fate}. "
                "Export the adapter again."
            )
        halves.setdefault(base_name, {})[half] = tensor
    if not halves:
        raise AdapterError(f"{file.path} holds no pair: it would change nothing.")
    pairs = {}
    for name, pair in halves.items():
        if len(pair) < 2:
            present = next(iter(pair))
            raise AdapterError(f"{name}.{present} in {file.path} stands alone: needed both lora_a and lora_b.")
        pairs[name] = (_read_half(file, pair["lora_a"]), _read_half(file, pair["lora_b"]))
    return pairs


def _read_half(file: GGUFFile, tensor: QuantTensor) -> torch.Tensor:
    if tensor.type not in _TYPES:
        raise AdapterError(
            f"{tensor.name} in {file.path} is {tensor.type}: needed {', '.join(_TYPES)}, as llama.cpp's converter "
            "writes. Convert the adapter again."
        )
    values = dequantize(tensor)
    if not bool(torch.isfinite(values).all()):
        raise AdapterError(
            f"{tensor.name} in {file.path} holds NaN or infinity: every result would be NaN. Export the adapter again."
        )
    return values


def check_against_base(
    adapter: AdapterFile, base: GGUFFile, *, ignore_hash: bool = False, hash_base: bool = False
) -> None:
    """Make sure that an adapter belongs to a base, before llama.cpp gets to see both.

    Args:
        adapter: as loaded.
        base: the file to serve it with.
        ignore_hash: accept a base other than the one the adapter was trained on, e.g. another quantisation of the same
            model. Shapes and names are still checked.
        hash_base: compare the hash of the whole file too, which reads all of it.

    Raises:
        AdapterError: another architecture, a pair that does not fit, or (unless `ignore_hash`) another file.
    """
    if adapter.architecture != base.architecture:
        raise AdapterError(
            f"{adapter.path} is for architecture '{adapter.architecture}', {base.path} is '{base.architecture}': "
            "needed the same. Use the base that the adapter was trained on."
        )
    _check_pairs(adapter.pairs, base, str(adapter.path))
    if ignore_hash:
        return
    fingerprint = base_fingerprint(base)
    different = [
        f"{meaning} (trained on {adapter.provenance[key][:12] or 'none'}, found {fingerprint[key][:12] or 'none'})"
        for key, meaning in _BASE_KEYS.items()
        if key in adapter.provenance and adapter.provenance[key] != fingerprint[key]
    ]
    if hash_base:
        if (trained_on := adapter.provenance.get("base.sha256")) is None:
            raise AdapterError(
                f"{adapter.path} holds no hash of its whole base file. It is stored by training with --hash-base; "
                "without it only the header, tokenizer and template can be compared."
            )
        if (found := base.sha256()) != trained_on:
            different.append(f"file contents (trained on {trained_on[:12]}, found {found[:12]})")
    if different:
        raise AdapterError(
            f"{adapter.path} was trained on another file than {base.path}. Different are: {', '.join(different)}. "
            "Use the original base, or skip this check if you know that both fit."
        )


def _check_pairs(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], base: GGUFFile, subject: str) -> None:
    """Raise AdapterError for anything that llama.cpp would refuse, abort on or ignore."""
    if not pairs:
        raise AdapterError(f"{subject} holds no pair: it would change nothing.")
    is_tied = "output.weight" not in base.tensors
    needed: tuple[tuple[int, ...], tuple[int, ...]]
    for name, (lora_a, lora_b) in pairs.items():
        weight = base.tensors.get(name)
        found = f"{name} in {subject} (lora_a {list(lora_a.shape)}, lora_b {list(lora_b.shape)})"
        if weight is None:
            reason = (
                "its output head is the token embedding (tied)"
                if name == "output.weight"
                else "there is no such tensor"
            )
            raise AdapterError(f"{found} does not exist in {base.path}: {reason}. llama.cpp refuses the whole adapter.")
        if name.endswith("token_embd.weight"):
            if is_tied:
                raise AdapterError(
                    f"{found}: {base.path} uses its embedding as output head too, and llama.cpp aborts on this pair. "
                    "Take it out."
                )
            # llama.cpp looks up rows of lora_a here, so both halves lie the other way round.
            num_tokens, width = weight.shape
            needed = ((num_tokens, lora_a.shape[-1]), (width, lora_a.shape[-1]))
        elif (
            weight.type == "NVFP4"
            and _IN_FEED_FORWARD.search(name)
            and f"{name.removesuffix('.weight')}.scale" in base.tensors
        ):
            raise AdapterError(
                f"{found}: {name} is NVFP4 with a scale of its own, and llama.cpp aborts on a pair on such a weight. "
                "Take it out."
            )
        elif len(weight.shape) < 2 and not name.endswith(_ONE_ROW):
            raise AdapterError(
                f"{found}: {name} is a vector {list(weight.shape)}, and llama.cpp silently ignores pairs on vectors. "
                "Take it out."
            )
        else:
            *experts, num_out, num_in = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
            rank = lora_b.shape[-1] if lora_b.dim() else 0
            needed = ((*experts, rank, num_in), (*experts, num_out, rank))
        if (tuple(lora_a.shape), tuple(lora_b.shape)) != needed or 0 in lora_a.shape:
            raise AdapterError(
                f"{found} does not fit {base.path}, where {name} is {list(weight.shape)}: "
                f"needed lora_a {list(needed[0])} and lora_b {list(needed[1])}. "
                "Use the base that the adapter was trained on."
            )


def restore(adapter: LoraAdapter, file: AdapterFile) -> None:
    """Put the numbers of a file into an attached adapter, to go on training them.

    Pairs keep the factors they were attached with; where the file's differ, lora_b is multiplied so that the update
    stays the same.

    Raises:
        AdapterError: the two do not hold the same pairs.
    """
    missing, extra = sorted(adapter.pairs.keys() - file.pairs.keys()), sorted(file.pairs.keys() - adapter.pairs.keys())
    if missing or extra:
        raise AdapterError(
            f"{file.path} does not hold the pairs that are to be trained: "
            f"{len(missing)} missing ({', '.join(missing[:3])}), {len(extra)} too many ({', '.join(extra[:3])}). "
            "Choose the same target_modules."
        )
    for name, pair in adapter.pairs.items():
        lora_a, lora_b = file.pairs[name]
        if lora_a.shape != pair.lora_a.shape or lora_b.shape != pair.lora_b.shape:
            raise AdapterError(
                f"{name} in {file.path} has rank {lora_b.shape[-1]}: needed {pair.rank}, the rank of the settings."
            )
        with torch.no_grad():
            pair.lora_a.copy_(lora_a)
            pair.lora_b.copy_(lora_b * (file.scale(name) / pair.scale))
