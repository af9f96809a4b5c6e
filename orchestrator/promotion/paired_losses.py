"""Significance of the difference of two models: losses on one text, paired by document.

Tokens of a document are alike, so what is drawn again for the error of a mean are documents, and
both models keep the same ones: how hard a document is for either does not count.

Legend: D documents, N sequences, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainers.evaluation import evaluate
from trainers.text.data import read_sequences
from trainers.text.unseen import documents_of

_DRAWS = 2000
_DRAWS_AT_ONCE = 100
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of a model on a text, in nats, summed by document.

    Attributes:
        sums: `[D]` float64.
        predictions: Of each document, `[D]`.
    """

    sums: np.ndarray
    predictions: np.ndarray

    @property
    def loss(self) -> float:
        """Mean nats per predicted token."""
        return float(self.sums.sum() / self.predictions.sum())


@dataclass(frozen=True)
class LossDifference:
    """The difference of two losses, in nats per token.

    Attributes:
        standard_error: By a paired bootstrap; NaN of a single document.
        interval: Of 95 %.
        documents: That it rests on.
    """

    mean: float
    standard_error: float
    interval: tuple[float, float]
    documents: int


def document_losses(model: Any, folder: str) -> DocumentLosses:
    """Measure a model on the token set in `folder`."""
    losses = evaluate(model, read_sequences(folder)[:]).token_losses
    assert losses is not None
    # A prediction belongs to the document of the token that is predicted
    _, index = documents_of(folder)[:, 1:].reshape(-1).unique(return_inverse=True)
    predictions = torch.bincount(index)
    sums = torch.zeros(len(predictions), dtype=torch.float64)
    sums.index_add_(0, index, losses.reshape(-1))
    return DocumentLosses(sums.numpy(), predictions.numpy())


def paired_bootstrap(
    higher: DocumentLosses, lower: DocumentLosses, generator: np.random.Generator
) -> LossDifference:
    """Return how far the first loss is above the second, both on the same documents."""
    differences = higher.sums - lower.sums
    predictions = higher.predictions
    documents = len(predictions)
    mean = float(differences.sum() / predictions.sum())
    if documents < 2:
        return LossDifference(mean, math.nan, (math.nan, math.nan), documents)
    share = np.full(documents, 1 / documents)
    drawn: list[np.ndarray] = []
    for _ in range(_DRAWS // _DRAWS_AT_ONCE):
        weights = generator.multinomial(documents, share, size=_DRAWS_AT_ONCE)
        drawn.append((weights @ differences) / (weights @ predictions))
    means = np.concatenate(drawn)
    low, high = np.percentile(means, _INTERVAL)
    return LossDifference(mean, float(means.std(ddof=1)), (float(low), float(high)), documents)
