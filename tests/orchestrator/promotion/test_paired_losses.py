"""The error of a difference of two losses: a bootstrap over documents, which both models share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.promotion.paired_losses import DocumentLosses, document_losses, paired_bootstrap
from trainers.evaluation import evaluate
from trainers.text.data import write_sequences


def of(losses: np.ndarray, predictions: int = 10) -> DocumentLosses:
    """Documents of equally many predictions with these mean losses."""
    return DocumentLosses(losses * predictions, np.full(len(losses), predictions))


def test_its_standard_error_is_that_of_the_paired_differences() -> None:
    random = np.random.default_rng(0)
    hard = random.normal(3.0, 1.0, size=400)  # how hard a document is, for both
    above = random.normal(0.1, 0.05, size=400)
    result = paired_bootstrap(of(hard + above), of(hard), np.random.default_rng(1))
    expected = above.std() / math.sqrt(400)
    assert result.mean == pytest.approx(above.mean())
    assert result.standard_error == pytest.approx(expected, rel=0.1)
    low, high = result.interval
    assert low == pytest.approx(result.mean - 1.96 * expected, abs=expected / 3)
    assert high == pytest.approx(result.mean + 1.96 * expected, abs=expected / 3)
    again = paired_bootstrap(of(hard + above), of(hard), np.random.default_rng(1))
    assert again == result, "the generator alone decides"


def test_documents_count_by_their_predictions_and_one_has_no_error() -> None:
    higher = DocumentLosses(np.array([30.0, 2.0]), np.array([10, 1]))
    lower = DocumentLosses(np.array([20.0, 2.0]), np.array([10, 1]))
    assert paired_bootstrap(higher, lower, np.random.default_rng(0)).mean == pytest.approx(10 / 11)
    single = paired_bootstrap(of(np.ones(1)), of(np.zeros(1)), np.random.default_rng(0))
    assert single.mean == 1 and math.isnan(single.standard_error)


def test_losses_by_document_have_the_mean_of_the_evaluation(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    sequences = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    write_sequences(sequences, tmp_path / "text")
    write_sequences(torch.arange(64).reshape(4, 16) // 24, tmp_path / "text" / "documents")
    losses = document_losses(model, str(tmp_path / "text"))
    measured = evaluate(model, sequences)
    assert losses.loss == pytest.approx(measured.loss)
    assert measured.token_losses is not None
    assert losses.predictions.tolist() == [22, 23, 15]
    first = torch.cat([measured.token_losses[0], measured.token_losses[1, :7]]).sum()
    assert losses.sums[0] == pytest.approx(first.item())
