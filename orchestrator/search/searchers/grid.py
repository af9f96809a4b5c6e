"""The configured recipes at every budget and learning rate and nothing else: the comparison that papers print."""

from __future__ import annotations

from orchestrator.config.schema import ConfigError
from orchestrator.search.searchers.problem import SEARCHERS, ListedSearcher, ResumableSearcher, SearchProblem


@SEARCHERS.part("grid", source="exhaustive comparison")
def grid(problem: SearchProblem) -> ResumableSearcher:
    """Raises ConfigError if samples are asked for: a grid draws none."""
    if problem.samples:
        raise ConfigError(
            f"search.num_samples: got {problem.samples}, but the grid searcher draws no candidates of its own; set it "
            "to 0, or choose searcher optuna or random"
        )
    return ListedSearcher(problem)
