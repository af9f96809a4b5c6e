"""Independent draws from the joint space: the comparison that any cleverer searcher must beat."""

from __future__ import annotations

from functools import partial

import numpy as np

from orchestrator.search.candidates import Candidate, CandidateSpace
from orchestrator.search.searchers.problem import SEARCHERS, ListedSearcher, ResumableSearcher, SearchProblem


def _draw(space: CandidateSpace, generator: np.random.Generator) -> Candidate:
    return space.candidate(space.sample(generator))


@SEARCHERS.part("random", source="Bergstra and Bengio 2012")
def random(problem: SearchProblem) -> ResumableSearcher:
    return ListedSearcher(problem, partial(_draw, problem.space))
