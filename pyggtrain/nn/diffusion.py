"""What a file says about a model that fills in masked tokens instead of continuing a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Diffusion:
    """How masked tokens are written and where their logits stand; as llama.cpp reads it (examples/diffusion).

    Attributes:
        mask_token_id: the token that stands for an unknown one (`tokenizer.ggml.mask_token_id`); None: the file names
            none, and the model can be neither sampled nor trained.
        eos_token_id: what follows the end of an answer up to the end of what is sampled; None: the file names none.
        shifts_logits: the logits of position i - 1 are those of token i, as in the causal model that it was made from
            (`diffusion.shift_logits`, true where the key is missing); otherwise those of position i are.
    """

    mask_token_id: int | None
    eos_token_id: int | None
    shifts_logits: bool

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Diffusion":
        """What a file's metadata says."""
        return cls(
            mask_token_id=metadata.get("tokenizer.ggml.mask_token_id"),
            eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
            shifts_logits=bool(metadata.get("diffusion.shift_logits", True)),
        )
