"""Which candidate comes next. One file a searcher; each is found by itself and must pass the same contract tests.

A searcher is a function `f(problem: SearchProblem) -> ray.tune.search.Searcher` on the axis SEARCHERS. It first
suggests `problem.named` in order, then `problem.samples` further candidates, then `Searcher.FINISHED`; the same seed
gives the same suggestions for the same results; `save` and `restore` carry its whole state.
"""

from orchestrator.searchers.problem import SEARCHERS, SearchProblem

__all__ = ["SEARCHERS", "SearchProblem"]
