"""Searchers that use no result: configured candidates alone, or with independent draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ray.tune.search import Searcher

from orchestrator.config.schema import ConfigError
from orchestrator.search.candidates import Candidate
from orchestrator.search.searchers.problem import (
    SEARCHERS,
    ResumableSearcher,
    SearchProblem,
    first_new,
)


class ListedSearcher(ResumableSearcher):
    """The configured candidates, then new ones among those that `draws` gives."""

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem.total)
        self._problem, self._made = problem, 0
        self._tried = {candidate.key for candidate in problem.named}

    def draws(self, number: int) -> Iterator[Candidate]:
        """Yield proposals for candidate `number` of the search, as many as are needed."""
        raise NotImplementedError

    def suggest(self, trial_id: str) -> Any:
        number, named = self._made, self._problem.named
        if number >= self.total:
            return Searcher.FINISHED
        candidate = (
            named[number] if number < len(named) else first_new(self.draws(number), self._tried)
        )
        config = candidate.config()
        self.add_trial(trial_id, config)
        return config

    def upcoming(self, count: int) -> Sequence[Candidate]:
        return self._problem.named[self._made :][:count]

    def add_trial(self, trial_id: str, config: Mapping[str, Any]) -> None:
        self._made += 1
        self._tried.add(Candidate.from_config(config).key)

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Nothing to learn from."""


class RandomSearcher(ListedSearcher):
    """The configured candidates, then random ones."""

    def draws(self, number: int) -> Iterator[Candidate]:
        space, generator = self._problem.space, np.random.default_rng([self._problem.seed, number])
        while True:
            yield space.candidate(space.sample(generator))

    def upcoming(self, count: int) -> Sequence[Candidate]:
        candidates = list(super().upcoming(count))
        tried = set(self._tried)
        for number in range(self._made + len(candidates), min(self.total, self._made + count)):
            candidates.append(first_new(self.draws(number), tried))
            tried.add(candidates[-1].key)
        return candidates


@SEARCHERS.part(
    "random", source="Bergstra and Bengio 2012: the baseline that any other searcher must beat"
)
def random(problem: SearchProblem) -> ResumableSearcher:
    """Return the searcher `random`."""
    return RandomSearcher(problem)


@SEARCHERS.part("grid", source="exhaustive comparison, as in papers")
def grid(problem: SearchProblem) -> ResumableSearcher:
    """Return the searcher of the configured candidates alone. Raises ConfigError for samples."""
    if problem.samples:
        raise ConfigError(
            f"search.num_samples: got {problem.samples}, but the grid searcher draws no "
            "candidates; set it to 0, or choose searcher optuna or random"
        )
    return ListedSearcher(problem)
