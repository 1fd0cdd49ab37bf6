"""Ways to run llama.cpp behind one small face, `Runtime`, and the default one: the llama.cpp inside the bridge.

A runtime holds one base model and at most one adapter. `scale` is llama.cpp's user scale of that adapter;
`scale=None` means that no adapter is active at all, which must give the same bits as `scale=0.0`. The second runtime is
`llama_server.ServerRuntime`; one that loads the user's own libllama would be a third.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from pyggtrain import _bridge
from pyggtrain.errors import AdapterError
from pyggtrain.gguf import GGUFFile


@dataclass(frozen=True)
class RuntimeSettings:
    """How llama.cpp computes; the defaults round least.

    Attributes:
        num_ctx: Tokens that fit in the context.
        num_ubatch: Tokens computed together. Another number means other kernels and another order of summation.
        kv_type: Type of the stored keys and values. llama-server's default is F16.
        flash_attention: Off by default: on the CPU it rounds keys, values and their sum to F16.
        exact_products: Products by weights that are not F32 are computed from the decoded weights in float32 instead of
            by ggml's kernels, which round the other side to 8 bits (by F16 and BF16 weights: to their precision).
        num_threads: CPU threads. Does not change results.
    """

    num_ctx: int
    num_ubatch: int
    kv_type: Literal["F32", "F16"] = "F32"
    flash_attention: bool = False
    exact_products: bool = False
    num_threads: int = 1


class Runtime(Protocol):
    """llama.cpp with one base model and at most one adapter."""

    @property
    def name(self) -> str:
        """Which llama.cpp this is and how it computes, for the report."""

    @property
    def limits(self) -> tuple[str, ...]:
        """What this runtime cannot prove, one sentence each; empty if nothing."""

    @property
    def gives_log_probs(self) -> bool:
        """True if `logits` returns log-probabilities: every row shifted so that its exponentials sum to 1."""

    def load_adapter(self, path: Path) -> int:
        """Make the adapter at `path` available.

        Returns:
            The number of LoRA pairs that llama.cpp reports for it; 0 if this runtime cannot tell.

        Raises:
            AdapterError: llama.cpp refuses the adapter, or does not hold it.
        """

    def logits(
        self, tokens: Sequence[int], *, scale: float | None = None, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Logits [P, V] float32 after each of `positions` (default: all T) of a sequence, from an empty context."""

    def tensors(
        self, tokens: Sequence[int], names: Collection[str], *, scale: float | None = None
    ) -> dict[str, torch.Tensor]:
        """Tensors [T, ...] of the compute graph by llama.cpp's name (`l_out-0`), float32; absent names are left out.

        Raises:
            UnsupportedError: This runtime does not show them.
        """

    def generate(self, tokens: Sequence[int], max_new_tokens: int, *, scale: float | None = None) -> list[int]:
        """Greedy continuation of `tokens`, without the token that ends the generation."""

    def close(self) -> None:
        """Free the model, or drop the connection. The runtime cannot be used afterwards."""


OpenRuntime = Callable[[Path, RuntimeSettings], Runtime]


class BridgeRuntime:
    """The llama.cpp that pyggtrain is linked with, on the CPU.

    Args:
        path: GGUF file of the base model.
        settings: How it computes.

    Raises:
        BridgeError: llama.cpp cannot load the file.
    """

    gives_log_probs = False
    limits = ()

    def __init__(self, path: Path, settings: RuntimeSettings) -> None:
        self._settings = settings
        self._adapter: int | None = None
        self._session = _bridge.Session(
            str(path),
            num_ctx=settings.num_ctx,
            num_ubatch=settings.num_ubatch,
            num_threads=settings.num_threads,
            kv_type=settings.kv_type,
            flash_attention=settings.flash_attention,
            exact_products=settings.exact_products,
            use_mmap=GGUFFile.open(path).is_mapped,
        )

    @property
    def name(self) -> str:
        s = self._settings
        attention = ", flash attention" if s.flash_attention else ""
        products = ", float32 products" if s.exact_products else ""
        how = f"{s.kv_type} KV, ubatch {s.num_ubatch}{attention}{products}"
        return f"llama.cpp {_bridge.LLAMA_CPP_COMMIT} in the bridge, {how}"

    def load_adapter(self, path: Path) -> int:
        if self._adapter is not None:
            raise AdapterError(f"{path}: this runtime already holds an adapter. Open a second runtime for another.")
        self._adapter = self._session.load_adapter(str(path))
        return self._session.adapter_num_pairs(self._adapter)

    def logits(
        self, tokens: Sequence[int], *, scale: float | None = None, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        self._set_scale(scale)
        logits_TV = from_dlpack(self._session.logits(tokens))
        return logits_TV if positions is None else logits_TV[list(positions)]

    def tensors(
        self, tokens: Sequence[int], names: Collection[str], *, scale: float | None = None
    ) -> dict[str, torch.Tensor]:
        self._set_scale(scale)
        pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name, _, tensor in self._session.eval_tensors(tokens, list(names)):
            pieces[name].append(from_dlpack(tensor))
        num_ubatch = self._settings.num_ubatch
        num_ubatches = -(-len(tokens) // num_ubatch)
        joined = {}
        for name, found in pieces.items():
            # One name can stand for several stages of a value (`Qcur-0` before and after rope): the last one counts.
            num_stages = len(found) // num_ubatches
            rows = found[num_stages - 1 :: num_stages]
            # ggml does not count an outermost dimension of 1, so an ubatch of a single token arrives without its T.
            counts = [min(num_ubatch, len(tokens) - start) for start in range(0, len(tokens), num_ubatch)]
            joined[name] = torch.cat(
                [row.unsqueeze(0) if count == 1 else row for row, count in zip(rows, counts, strict=True)]
            )
        return joined

    def generate(self, tokens: Sequence[int], max_new_tokens: int, *, scale: float | None = None) -> list[int]:
        self._set_scale(scale)
        return self._session.generate(tokens, max_new_tokens)

    def close(self) -> None:
        self._session.close()

    def _set_scale(self, scale: float | None) -> None:
        if scale is None:
            self._session.set_adapters([])
        elif self._adapter is None:
            raise AdapterError(f"A scale of {scale} was asked for, but no adapter is loaded. Call load_adapter first.")
        else:
            self._session.set_adapters([(self._adapter, scale)])
