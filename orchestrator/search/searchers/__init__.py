"""Searchers: which candidate comes next.

One file per searcher; each is registered by its module and must pass the same contract tests. A
searcher is a function `f(problem: SearchProblem, **knobs) -> ResumableSearcher` on the axis
SEARCHERS. It first suggests `problem.named` in order, then further candidates up to its `total`,
then `Searcher.FINISHED`; None only while a trial that it waits for is under way. The same seed
gives the same suggestions for the same results. A resumed search calls `add_trial` with each
recorded trial, in their order and between the results that came: after that the searcher is in the
state that it was in.
"""

from orchestrator.search.searchers.problem import (
    SEARCHERS,
    ResumableSearcher,
    SearchProblem,
    make_searcher,
)

__all__ = ["SEARCHERS", "ResumableSearcher", "SearchProblem", "make_searcher"]
