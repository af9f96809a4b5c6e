"""AsymGQA's walk on the demo checkpoint, untrained, over six seeds: moves that keep sizes or do not, and the scores
that guide them. Every mean is printed; docs/papers.md reports which differences are asserted nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arms import Corpus
from transformers import PreTrainedModel

from attention.calibration.store import Calibration
from orchestrator.conversion.execution import planning_context
from search_spaces.planning.context import convert_with
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import recipe

pytestmark = [pytest.mark.slow, pytest.mark.extended]

SEEDS = range(6)
ARMS: dict[str, dict[str, Any]] = {
    "asymmetric": {},
    "symmetric": {"grouping": "walk_symmetric"},
    "asymmetric, weight similarity": {"similarity": "weight"},
    "asymmetric, any head outside": {"grouping.neighbours": 1024},  # similarity guides nothing
}
Losses = Callable[[str, float], np.ndarray]


@pytest.fixture(scope="module")
def losses(demo_model: PreTrainedModel, calibration: Calibration, corpus: Corpus) -> Losses:
    """`losses(arm, kv_ratio)`: held-out loss of the untrained conversion, one a seed."""
    context = planning_context(demo_model, calibration, corpus.calibration, None)

    def of(arm: str, ratio: float) -> np.ndarray:
        chosen = recipe("asymgqa", **ARMS[arm])
        plans = [make_plan(chosen, ratio, context, np.random.default_rng(seed)) for seed in SEEDS]
        result = np.array([corpus.loss(convert_with(chosen, demo_model, plan, calibration)) for plan in plans])
        print(
            f"{ratio:.0%} {arm}: {result.mean():.3f} ± {result.std(ddof=1):.3f} {result.round(3).tolist()}", flush=True
        )
        return result

    return of


def test_walks_at_a_quarter_of_the_cache(losses: Losses) -> None:
    """Asymmetric below symmetric by more than two standard errors of the difference of the means."""
    result = {arm: losses(arm, 0.25) for arm in ARMS}
    asymmetric, symmetric = result["asymmetric"], result["symmetric"]
    error = np.sqrt((asymmetric.var(ddof=1) + symmetric.var(ddof=1)) / len(SEEDS))
    assert asymmetric.mean() < symmetric.mean() - 2 * error


def test_walks_at_half_of_the_cache_do_not_separate(losses: Losses) -> None:
    """At any sizes and with any score: within a tenth of a nat of each other."""
    means = [losses(arm, 0.5).mean() for arm in ARMS]
    assert max(means) - min(means) < 0.1
