"""The objective of models that fill in masked tokens (LLaDA, Dream, RND1): masked diffusion.

    L = mean over learnt tokens of  1[i is masked] / t · -log p(token i | the row with its masks),   t ~ U(0, 1]

A row's prompt is never masked; of its learnt tokens each is masked with the row's own probability t. Nie et al. 2025
(LLaDA, 2502.09992), section 2.3 and the algorithms of appendix A, with their smallest t. L is an upper bound of the
negative log-likelihood per learnt token, in expectation over t and the masks. One thing differs: LLaDA divides by each
answer's length and takes the mean over answers; here, as in every other method, each learnt token counts the same.

Such a model is sampled by masking a stretch that is longer than the answer, so it has to learn what follows an answer:
end-of-text tokens. LLaDA fills a batch up to its longest row with them. Here the number is drawn for each row from its
own tokens, so that a row means the same in every batch.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from pyggtrain.errors import ConfigError, UnsupportedError
from pyggtrain.nn import Batch, Model
from pyggtrain.ops.linear_cross_entropy import IGNORED
from pyggtrain.training.config import TrainConfig
from pyggtrain.training.objectives import OBJECTIVES, Document, LossModule, Objective, Supervised

# Smallest share of masked tokens (LLaDA, appendix A): the weight 1 / t stays below 1000.
MIN_RATIO = 1e-3
# At most so many end-of-text tokens follow an answer: two blocks of llama.cpp's example (--diffusion-block-length 32).
MAX_FILL = 64
# Held-out rows are masked so many times, t being drawn from as many equal parts of (0, 1], the same at each evaluation.
NUM_HELD_OUT_DRAWS = 4


class MaskedDiffusion(Supervised):
    """Cross entropy of masked tokens, each weighed by one over the share that is masked.

    Args:
        model: with `diffusion`.
        config: settings of the run.
        masks_all: mask every learnt token instead of drawing: the largest step there can be.

    Raises:
        ConfigError: a method that compares the likelihoods of answers, or a setting that wants answers token by token.
        UnsupportedError: the file names no mask token.
    """

    def __init__(self, model: Model, config: TrainConfig, *, masks_all: bool = False) -> None:
        self.model: LossModule = model
        self._model = model
        self._masks_all = masks_all
        if config.method != "sft":
            raise ConfigError(
                f"method: {config.method} compares the likelihoods of whole answers, and {model.architecture} fills in "
                "masked tokens, which gives none. Set method to sft."
            )
        if config.sample_prompts or config.runtime != "bridge":
            name = "sample_prompts" if config.sample_prompts else "runtime"
            raise ConfigError(
                f"{name}: asks for answers token by token, and {model.architecture} fills in masked tokens of a whole "
                f"text. Leave {name} as it is by default."
            )
        assert model.diffusion is not None, "a model that continues texts"
        if model.diffusion.mask_token_id is None:
            raise UnsupportedError(
                f"{model.architecture} learns to fill in masked tokens, and the file names no mask token "
                "(tokenizer.ggml.mask_token_id): neither training nor llama-diffusion-cli can do without."
            )
        self._mask_token_id = model.diffusion.mask_token_id
        self._shifts_logits = model.diffusion.shifts_logits
        self._eos_token_id = model.diffusion.eos_token_id

    def documents(self, row: Any) -> list[Document]:
        """Return the row, its answer followed by end-of-text tokens if it ends in one."""
        fill = [] if self._eos_token_id is None else [self._eos_token_id] * self._num_fill(row)
        return [([*row.input_ids, *fill], [*row.labels, *fill])]

    def num_units(self, rows: Sequence[Any]) -> int:
        """Return the number of learnt tokens."""
        return sum(row.num_learnt + self._num_fill(row) for row in rows)

    def _num_fill(self, row: Any) -> int:
        if self._eos_token_id is None or row.labels[-1] == IGNORED:
            return 0
        return zlib.crc32(array("i", row.input_ids).tobytes()) % (MAX_FILL + 1)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed weighed cross entropy in nats."""
        if self._masks_all:
            loss_sum = -self._model.log_probs(self._masked(batch, batch.targets_T != IGNORED)).sum()
            return loss_sum, loss_sum.new_zeros(0)
        if self._model.training:
            # torch's generators were set for this micro-batch (`optim.Optimizer.step`).
            return self._loss_of(batch, torch.rand(batch.num_documents), torch.rand(batch.num_tokens))
        losses = [self._loss_of(batch, *draws)[0] for draws in _held_out_draws(batch)]
        loss_sum = torch.stack(losses).mean()
        return loss_sum, loss_sum.new_zeros(0)

    def _loss_of(self, batch: Batch, drawn_B: torch.Tensor, drawn_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the masks that numbers from [0, 1) stand for: one of each document, one of each token."""
        ratio_B = MIN_RATIO + (1 - MIN_RATIO) * drawn_B
        # Bounds of documents are on the host, see `Batch`.
        ratio_T = ratio_B.repeat_interleave(batch.cu_seqlens.diff().long())
        device = batch.tokens_T.device
        # Position t of targets stands for token t + 1.
        is_masked_T = (drawn_T < ratio_T).to(device) & (batch.targets_T != IGNORED)
        masked = self._masked(batch, is_masked_T)
        loss_sum = -(self._model.log_probs(masked) / ratio_T.to(device)).sum()
        return loss_sum, loss_sum.new_zeros(0)

    def _masked(self, batch: Batch, is_masked_T: torch.Tensor) -> Batch:
        """The batch with those tokens masked that are the targets of the given positions, and only these to predict."""
        is_mask_T = _one_later(is_masked_T, False)
        tokens_T = batch.tokens_T.masked_fill(is_mask_T, self._mask_token_id)
        targets_T = batch.targets_T.masked_fill(~is_masked_T, IGNORED)
        if not self._shifts_logits:
            targets_T = _one_later(targets_T, IGNORED)
        return replace(batch, tokens_T=tokens_T, targets_T=targets_T)


def objective_of(model: Model, config: TrainConfig, *, is_largest: bool = False) -> Objective:
    """What a run minimises, chosen by its method and by what the model is.

    Args:
        is_largest: for a rehearsal: every step takes as much as any of the run may.

    Raises:
        ConfigError, UnsupportedError: the method does not fit the model.
    """
    if model.diffusion is not None:
        return MaskedDiffusion(model, config, masks_all=is_largest)
    return OBJECTIVES[config.method](model, config)


def masked_excerpts(model: Model, documents: Sequence[Document]) -> list[Document]:
    """Documents to compare two computations on, as such a model sees them: every second learnt token is masked.

    Labels are aligned so that the token after each position is what it should predict, as everywhere else; where logits
    are not shifted, that of the last token is lost.
    """
    assert model.diffusion is not None, "a model that continues texts"
    mask_token_id, shifts_logits = model.diffusion.mask_token_id, model.diffusion.shifts_logits
    excerpts: list[Document] = []
    for ids, labels in documents:
        tokens, kept = list(ids), [IGNORED] * len(ids)
        for place in range(1, len(ids), 2):
            if mask_token_id is not None and labels[place] != IGNORED:
                tokens[place], kept[place] = mask_token_id, labels[place]
        excerpts.append((tokens, kept if shifts_logits else [IGNORED, *kept[:-1]]))
    return excerpts


def _one_later(values_T: torch.Tensor, first: float) -> torch.Tensor:
    """Values moved by one position; no document's last one has a target, so none crosses into the next."""
    return functional.pad(values_T[:-1], (1, 0), value=first)


def _held_out_draws(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Numbers from [0, 1) that depend on the tokens of each document alone, whatever else is in the batch."""
    draws: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in range(NUM_HELD_OUT_DRAWS)]
    for tokens in torch.split(batch.tokens_T.cpu(), batch.cu_seqlens.diff().tolist()):
        generator = torch.Generator().manual_seed(zlib.crc32(tokens.numpy().tobytes()))
        for part, (ratios, numbers) in enumerate(draws):
            ratios.append((part + torch.rand(1, generator=generator)) / NUM_HELD_OUT_DRAWS)
            numbers.append(torch.rand(tokens.shape[0], generator=generator))
    return [(torch.cat(ratios), torch.cat(numbers)) for ratios, numbers in draws]
