"""Which trials go on at a rung.

Each scheduler is found by itself and must pass the same contract tests.

A scheduler is a function `f(problem: RungProblem, **knobs) -> RungScheduler` on the axis
SCHEDULERS. What all of them do is said in `RungScheduler`. Every trial that it pauses goes on or is
stopped in the end; and told all events of a killed search again, it goes on as if nothing had
happened.
"""

from orchestrator.search.schedulers.problem import (
    SCHEDULERS,
    RungProblem,
    RungScheduler,
    make_scheduler,
)

__all__ = ["SCHEDULERS", "RungProblem", "RungScheduler", "make_scheduler"]
