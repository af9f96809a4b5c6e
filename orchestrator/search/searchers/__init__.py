"""Which candidate comes next. One file a searcher; each is found by itself and must pass the same contract tests.

A searcher is a function `f(problem: SearchProblem, **knobs) -> ray.tune.search.Searcher` on the axis SEARCHERS. It
first suggests `problem.named` in order, then `problem.samples` further candidates, then `Searcher.FINISHED`; one that
suggests another number says so in an attribute `total`. It answers None only while a trial that it waits for is under
way. The same seed gives the same suggestions for the same results; `save` and `restore` carry its whole state.
"""

from orchestrator.search.searchers.problem import SEARCHERS, SearchProblem, make_searcher, trials_of

__all__ = ["SEARCHERS", "SearchProblem", "make_searcher", "trials_of"]
