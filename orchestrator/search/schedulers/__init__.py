"""Which trials go on at a rung. Each scheduler is found by itself and must pass the same contract tests.

A scheduler is a function `f(problem: RungProblem, **knobs) -> RungScheduler` on the axis SCHEDULERS. It holds nobody at
the last rung, nobody whose recipe is protected, nobody whose plan the searcher has made and nobody whose relaxation
goes on; it stops a trial whose loss is not finite, and one whose work another trial does; it decides once for a trial
and a rung, however often that is reported; every trial that it pauses goes on or is stopped in the end; and told all
events of a killed search again, it goes on as if nothing had happened.
"""

from orchestrator.search.schedulers.problem import SCHEDULERS, RungProblem, RungScheduler, make_scheduler

__all__ = ["SCHEDULERS", "RungProblem", "RungScheduler", "make_scheduler"]
