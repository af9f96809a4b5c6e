"""What a searcher is handed, and the one loop that searchers without a model of the results share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.tune.search import Searcher

from attention.axes import Axis
from orchestrator.search.candidates import Candidate, CandidateSpace
from search_spaces.recipes.recipe import Recipe

SEARCHERS = Axis("searcher", "orchestrator.search.searchers")

OBJECTIVES = ("loss", "kv_bytes_per_token")
TRIES = 50
"""Draws in search of a candidate that has not been tried, before a repeated one is accepted."""


@dataclass(frozen=True)
class SearchProblem:
    """`named` are the configured candidates, tried first; then `samples` more are drawn from `space`.

    `seed`: of the searcher; `seeds`: with which a plan that it has searched is trained. `settings`: its own knobs.
    `similarities(recipe)`: the recipe's similarity of the stored KV heads `[U, U]` by (layer, side); it may load the
    model, and is there when trials are to be run.
    """

    space: CandidateSpace
    named: tuple[Candidate, ...]
    samples: int
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    similarities: Callable[[Recipe], Mapping[tuple[int, str], np.ndarray]] | None = None

    @property
    def total(self) -> int:
        return len(self.named) + self.samples


class ResumableSearcher(Searcher):
    """A searcher that can be told of trials which it suggested in an earlier process."""

    def add_trial(self, trial_id: str, config: dict[str, Any]) -> None:
        """Take up a recorded suggestion, as if `suggest` had made it now."""
        raise NotImplementedError


def make_searcher(name: str, problem: SearchProblem) -> ResumableSearcher:
    """The searcher of a name with the problem's settings. Raises ValueError for settings that it does not have."""
    part = SEARCHERS.get(name)
    return part(problem, **part.settings(problem.settings))


def trials_of(searcher: Searcher, problem: SearchProblem) -> int:
    """How many trials a searcher suggests, at most: `total` of the problem, or of the searcher where it has its own."""
    return getattr(searcher, "total", problem.total)


class ListedSearcher(ResumableSearcher):
    """The configured candidates, then new ones that `draw` makes without looking at results."""

    def __init__(self, problem: SearchProblem, draw: Callable[[np.random.Generator], Candidate] | None = None) -> None:
        super().__init__(metric="loss", mode="min")
        self._problem, self._draw, self._made = problem, draw, 0
        self._tried = {candidate.key for candidate in problem.named}

    def suggest(self, trial_id: str) -> Any:
        number, named = self._made, self._problem.named
        if number < len(named):
            candidate = named[number]
        elif self._draw is not None and number < self._problem.total:
            candidate = self._new(self._draw, np.random.default_rng([self._problem.seed, number]))
        else:
            return Searcher.FINISHED
        config = candidate.config()
        self.add_trial(trial_id, config)
        return config

    def add_trial(self, trial_id: str, config: dict[str, Any]) -> None:
        self._made += 1
        self._tried.add(Candidate.from_config(config).key)

    def _new(self, draw: Callable[[np.random.Generator], Candidate], generator: np.random.Generator) -> Candidate:
        candidate = draw(generator)
        for _ in range(TRIES):
            if candidate.key not in self._tried:
                break
            candidate = draw(generator)
        return candidate

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        """Nothing to learn from."""
