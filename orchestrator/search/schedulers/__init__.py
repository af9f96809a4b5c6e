"""Schedulers: which trials continue at a rung.

Each is registered by its module and must pass the same contract tests. A scheduler is a function
`f(problem: RungProblem, **knobs) -> RungScheduler` on the axis SCHEDULERS. `RungScheduler` has what
they share. Every trial that a scheduler pauses is continued or stopped in the end; after a replay
of all events of a killed search, it continues as if nothing had happened.
"""

from orchestrator.search.schedulers.problem import (
    SCHEDULERS,
    RungProblem,
    RungScheduler,
    make_scheduler,
)

__all__ = ["SCHEDULERS", "RungProblem", "RungScheduler", "make_scheduler"]
