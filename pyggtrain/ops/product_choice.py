"""Which way a GPU computes a product with a quantised weight: measured once per card, kept in the user's cache folder.

    "bf16"     rows decoded into the workspace, then a product of the library. Any number of rows, any type
    "fused"    `kernels/dequant_matmul`: decoded on the way into the matrix units. Few rows
    "mmq"      llama.cpp's kernels, x rounded to 8 bits (`ops/mmq.py`). Forward, in builds with CUDA

The first product of a (direction, type, N, K, dtype, class of rows) times those that can serve, on the operands at
hand, and the fastest serves from then on; a class of rows ends at a power of two. Above `MAX_FUSED_ROWS` rows, and
without MMQ in the build, there is one way and nothing to measure. Nothing is measured while a CUDA graph is captured: a
shape that nobody has run before takes "bf16" there, and the next call outside decides.

The file is <cache folder>/products/<card>-<build>.json, one line a product with all times in it. It may be deleted or
edited at any time.
"""

import hashlib
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pyggtrain import _bridge
from pyggtrain.cache_folder import cache_folder
from pyggtrain.errors import ConfigError

# On an H200 it wins up to 64 rows, where the library is fast; a card with less of both may do so a little longer.
MAX_FUSED_ROWS = 128
# Products larger than this are never measured: what wins at this many rows wins above.
MAX_CLASS = 4096

logger = logging.getLogger(__name__)

_WARM_UPS = 2
_RUNS = 7
# Some 3 ms.
_SLEEP_CYCLES = 5_000_000

Ways = dict[str, Callable[[], torch.Tensor]]
"""Name of a way -> the product, computed that way into memory of its own."""


@dataclass(frozen=True, order=True)
class Product:
    """What a choice depends on.

    Attributes:
        direction: "forward" or "backward".
        type: of the weight.
        num_rows, num_columns: N and K of the weight.
        dtype: of x or dy, such as "bfloat16".
        max_tokens: end of the class of rows.
    """

    direction: str
    type: str
    num_rows: int
    num_columns: int
    dtype: str
    max_tokens: int

    @property
    def key(self) -> str:
        shape = f"{self.num_rows}x{self.num_columns}"
        return f"{self.direction} {self.type} {shape} {self.dtype} {self.max_tokens}"


def class_of(num_tokens: int) -> int:
    """The power of two that ends the class of so many rows."""
    return min(1 << max(0, num_tokens - 1).bit_length(), MAX_CLASS)


@dataclass
class _Choices:
    """Times of every product measured on one card, microseconds: key -> way -> time."""

    path: Path
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    has_told: bool = False

    def load(self) -> None:
        try:
            stored = json.loads(self.path.read_text())
        except FileNotFoundError:
            return
        except ValueError as error:
            raise ConfigError(f"{self.path} is not JSON ({error}). Delete it; it will be measured again.") from error
        self.times = stored | self.times

    def save(self) -> None:
        """Write what is known, together with what another process has written since."""
        self.load()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(self.times[key])}" for key in sorted(self.times))
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
            file.write(f"{{\n{lines}\n}}\n")
        os.replace(file.name, self.path)


_choices: dict[int, _Choices] = {}


def file_of(device: torch.device) -> Path:
    """Where the choices of a card are kept: its name, and a hash of what else decides."""
    card = torch.cuda.get_device_properties(device)
    build = (torch.__version__, torch.version.cuda, _bridge.LLAMA_CPP_COMMIT, _bridge.CUDA_ARCHITECTURES)
    digest = hashlib.sha256(repr((card.name, card.multi_processor_count, *build)).encode()).hexdigest()[:8]
    name = "-".join(card.name.lower().split()).replace("/", "-")
    return cache_folder() / "products" / f"{name}-{digest}.json"


def choose(product: Product, ways: Ways, device: torch.device) -> str:
    """The fastest of `ways`, by measuring where nobody has yet."""
    if len(ways) == 1:
        return next(iter(ways))
    times = _known(device).times.get(product.key)
    if times is None or not ways.keys() <= times.keys():
        if torch.cuda.is_current_stream_capturing():
            return "bf16"
        known = _known(device)
        if not known.has_told:
            logger.info("Which way to multiply is fastest is measured for each new shape, once: see %s", known.path)
            known.has_told = True
        times = {name: _measured(way, device) for name, way in ways.items()}
        known.times[product.key] = times
        known.save()
    return min(ways, key=lambda name: times[name])


def measured(device: torch.device) -> dict[str, dict[str, float]]:
    """Every product measured on this card so far: key -> way -> microseconds."""
    return dict(sorted(_known(device).times.items()))


def forget() -> None:
    """Read the files again at the next choice."""
    _choices.clear()


def _known(device: torch.device) -> _Choices:
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _choices:
        _choices[index] = _Choices(file_of(device))
        _choices[index].load()
    return _choices[index]


def _measured(way: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Median of a few runs on the card, microseconds. The first ones compile kernels and are not counted."""
    with torch.cuda.device(device), torch.no_grad():
        for _ in range(_WARM_UPS):
            way()
        marks = [(_mark(), _mark()) for _ in range(_RUNS)]
        # The card waits while the runs are queued, so that none of them waits for Python.
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        for start, end in marks:
            start.record()
            way()
            end.record()
        torch.cuda.synchronize(device)
        milliseconds = statistics.median(start.elapsed_time(end) for start, end in marks)
        return round(float(milliseconds) * 1000, 1)


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
