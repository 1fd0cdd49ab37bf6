"""What a step minimises: a mean over units, learnt tokens or preference pairs, and how a micro-batch adds to it.

    sft    L = mean over learnt tokens of -log p(token)
    dpo    L = mean over pairs of -log sigmoid(β (Δ_chosen - Δ_rejected)),  Δ = log p(answer) - log p_ref(answer)
    orpo   L = mean over pairs of -m_chosen - β log sigmoid(o(m_chosen) - o(m_rejected)),
           m = mean over the answer's tokens of log p,  o(m) = m - log(1 - e^m)

DPO: Rafailov et al. 2023 (2305.18290), eq. 7; p_ref is the base model, computed on the same micro-batch with the
adapter switched off, or once for all rows (`training.reference_log_probs`). ORPO: Hong et al. 2024 (2403.07691), eq. 6
and 7; its first term is taken over the answer, as in the paper, not over the prompt too.

The number of units of a whole step is known from its rows before anything is computed, so the result does not depend on
how the step is cut into micro-batches or spread over processes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import logsigmoid

from pyggtrain.adapters.lora import adapter_off
from pyggtrain.errors import ConfigError
from pyggtrain.nn import Batch, Model
from pyggtrain.training.config import TrainConfig

Document = tuple[Sequence[int], Sequence[int]]


class Row(Protocol):
    """A row of the data: an `Example`, or a preference pair that holds two of them as `chosen` and `rejected`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its documents."""
        ...


class LossModule(Protocol):
    """The face of a model that training needs; `nn.Model` has it."""

    def loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Return the sum of cross-entropies over the supervised tokens (float32 scalar) and their number."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Turn dropout on."""
        ...

    def eval(self) -> Any:
        """Turn dropout off."""
        ...


class Objective(Protocol):
    """What a step minimises.

    Attributes:
        model: what computes.
        metrics: names of further numbers, means over units, that are logged beside the loss.
    """

    model: LossModule
    metrics: tuple[str, ...]

    def check(self, rows: Sequence[Any]) -> None:
        """Refuse rows of another kind.

        Raises:
            ConfigError: names the first one.
        """
        ...

    def documents(self, row: Any) -> list[Document]:
        """Return (token ids, labels) of each document of a row."""
        ...

    def num_units(self, rows: Sequence[Any]) -> int:
        """Return what the loss of these rows is a sum over."""
        ...

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the loss over a micro-batch's units, with gradient, and those of `metrics`, [M] without."""
        ...


class Supervised:
    """Cross entropy of learnt tokens."""

    metrics: tuple[str, ...] = ()

    def __init__(self, model: LossModule) -> None:
        self.model = model

    def check(self, rows: Sequence[Any]) -> None:
        """Refuse preference pairs."""
        for row in rows:
            if _is_pair(row):
                raise ConfigError(
                    f"method: sft learns one answer, and {row.chosen.source} holds a chosen and a rejected one. "
                    "Set method to dpo or orpo."
                )

    def documents(self, row: Any) -> list[Document]:
        """Return the row itself."""
        return [(row.input_ids, row.labels)]

    def num_units(self, rows: Sequence[Any]) -> int:
        """Return the number of learnt tokens."""
        return sum(row.num_learnt for row in rows)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross entropy in nats."""
        loss_sum, _ = self.model.loss(batch)
        return loss_sum, loss_sum.new_zeros(0)


class _Preference:
    """What the two losses on pairs share: documents alternate, chosen and rejected."""

    def __init__(self, model: Model, beta: float) -> None:
        self.model: LossModule = model
        self.beta = beta
        self._model = model

    def check(self, rows: Sequence[Any]) -> None:
        """Refuse rows without a rejected answer."""
        for row in rows:
            if not _is_pair(row):
                raise ConfigError(
                    f"method: dpo and orpo need rows with a chosen and a rejected answer; {row.source} has none. "
                    "Set method to sft, or use preference data."
                )

    def documents(self, row: Any) -> list[Document]:
        """Return the chosen answer's document, then the rejected one's."""
        return [(answer.input_ids, answer.labels) for answer in (row.chosen, row.rejected)]

    def num_units(self, rows: Sequence[Any]) -> int:
        """Return the number of pairs."""
        return len(rows)


class DPO(_Preference):
    """Direct preference optimisation; the reference is the model without its adapter."""

    metrics: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of the pairs, and the rewards β Δ."""
        reference_B = self._reference(batch) if batch.reference_B is None else batch.reference_B
        rewards_B = self.beta * (document_sums(self._model.log_probs(batch), batch) - reference_B)
        chosen_P, rejected_P = rewards_B[0::2], rewards_B[1::2]
        margins_P = chosen_P - rejected_P
        values = torch.stack([chosen_P, rejected_P, margins_P, (margins_P > 0).double()]).detach().sum(dim=1)
        return -logsigmoid(margins_P).sum(), values

    def _reference(self, batch: Batch) -> torch.Tensor:
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), adapter_off(self._model):
                return document_sums(self._model.log_probs(batch), batch)
        finally:
            self._model.train(was_training)


class DocumentLogProbs(_Preference):
    """No loss: collects log p(answer) of each document of a micro-batch, for a reference that is computed once.

    Args:
        model: what computes.
        found: float64 [B] of each micro-batch is appended here.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, model: Any, found: list[torch.Tensor]) -> None:
        super().__init__(model, 0.0)
        self._found = found

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return nothing: zero, and no metrics."""
        log_probs_T = self._model.log_probs(batch)
        self._found.append(document_sums(log_probs_T, batch).detach().cpu())
        return log_probs_T.new_zeros(()), log_probs_T.new_zeros(0)


class ORPO(_Preference):
    """Odds ratio preference optimisation: the answer is learnt and preferred at once, without a reference."""

    metrics: tuple[str, ...] = ("nll_loss", "log_odds_ratio", "rewards/accuracies")

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of the pairs, the negative log-probability of the chosen answers, and the odds."""
        counts_B = document_sums((batch.targets_T >= 0).double(), batch)
        means_B = document_sums(self._model.log_probs(batch), batch) / counts_B.clamp(min=1)
        # e^m = 1 has infinite odds: a model that is this sure is kept a hair below.
        odds_B = means_B - torch.log(-torch.expm1(means_B.clamp(max=-1e-12)))
        log_odds_ratio_P = odds_B[0::2] - odds_B[1::2]
        nll_P = -means_B[0::2]
        values = torch.stack([nll_P, log_odds_ratio_P, (log_odds_ratio_P > 0).double()]).detach().sum(dim=1)
        return (nll_P - self.beta * logsigmoid(log_odds_ratio_P)).sum(), values


OBJECTIVES: dict[str, Callable[[Model, TrainConfig], Objective]] = {
    "sft": lambda model, config: Supervised(model),
    "dpo": lambda model, config: DPO(model, config.beta),
    "orpo": lambda model, config: ORPO(model, config.beta),
}
"""Name in `TrainConfig.method` -> what is minimised."""


def _is_pair(row: Any) -> bool:
    return hasattr(row, "rejected")


def document_sums(values_T: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sums over each document, float64 [B]: the difference of two sums of hundreds of nats is what counts.

    Not index_add, which adds in another order each time on a GPU.
    """
    documents = torch.split(values_T.double(), batch.cu_seqlens.diff().tolist())
    return torch.stack([document.sum() for document in documents])
