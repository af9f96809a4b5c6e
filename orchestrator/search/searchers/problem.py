"""The input of a searcher, and what all searchers share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.tune.search import Searcher

from attention.axes import Axis
from orchestrator.config.schema import OBJECTIVES
from orchestrator.search.candidates import Candidate, CandidateSpace
from search_spaces.recipes.recipe import Recipe

SEARCHERS = Axis("searcher", "orchestrator.search.searchers")
TRIES = 50
"""Draws for an untried candidate before a repeated one is accepted."""


@dataclass(frozen=True)
class SearchProblem:
    """The input of a searcher.

    Attributes:
        space: What `samples` candidates are drawn from.
        named: The configured candidates, tried first.
        samples: Number of candidates that are drawn after them.
        seed: Seed of the searcher.
        settings: Its own knobs.
        seeds: Seeds for training a plan that it has found.
        similarities: `similarities(recipe)` returns the recipe's similarity of the stored KV heads
            `[U, U]` by (layer, side); it may load the model, and is available when trials run.
        objectives: Keys of a report that are minimised, the loss first.
    """

    space: CandidateSpace
    named: tuple[Candidate, ...]
    samples: int
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    similarities: Callable[[Recipe], Mapping[tuple[int, str], np.ndarray]] | None = None
    objectives: tuple[str, ...] = OBJECTIVES

    @property
    def total(self) -> int:
        return len(self.named) + self.samples


class ResumableSearcher(Searcher):
    """A searcher that can continue trials that it suggested in an earlier process.

    `total`: largest number of trials.
    """

    def __init__(self, total: int) -> None:
        super().__init__(metric=OBJECTIVES[0], mode="min")
        self.total = total

    def add_trial(self, trial_id: str, config: Mapping[str, Any]) -> None:
        """Replay a recorded suggestion, as if `suggest` had made it now."""
        raise NotImplementedError

    def reopen(self, trial_id: str) -> None:
        """Expect further reports of a trial that had ended because its machines were lost."""

    def upcoming(self, count: int) -> Sequence[Candidate]:
        """Return the next candidates that do not depend on further reports.

        Args:
            count: Largest number.
        """
        return ()


def make_searcher(name: str, problem: SearchProblem) -> ResumableSearcher:
    """Return the searcher of a name with the problem's settings. Raises ValueError for others."""
    part = SEARCHERS.get(name)
    return part(problem, **part.settings(problem.settings))


def first_new(candidates: Iterator[Candidate], tried: Collection[Any]) -> Candidate:
    """Return the first candidate with a new key; after TRIES draws, accept any."""
    for candidate in itertools.islice(candidates, TRIES):
        if candidate.key not in tried:
            return candidate
    return next(candidates)
