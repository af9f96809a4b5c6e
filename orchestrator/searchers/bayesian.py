"""Tree-structured Parzen estimators over the joint space, by Optuna; the only file that knows of it.

Two objectives, held-out loss and KV bytes a token, so that the search spreads along the front and does not settle at
one budget. Conditional decisions are asked for only where they come up (define by run).

A trial that is stopped at an early rung is told with the loss that it had there. That loss is above what full training
would give, and only trials that were behind at the same rung are stopped, so the estimator errs on the safe side.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import optuna
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from orchestrator.candidates import Candidate, CandidateSpace
from orchestrator.searchers.problem import OBJECTIVES, SEARCHERS, TRIES, SearchProblem

PROPOSALS = 5
"""Proposals of the estimator that may repeat an earlier candidate before one is drawn at random."""


class FrontSearch(OptunaSearch):
    """The configured candidates, then what Optuna proposes.

    Candidates that lie in the space are enqueued in the study, so that the estimator learns from them; those outside of
    it are run without telling. A proposal that was tried before is given back to the study and another is asked for.
    """

    def __init__(self, problem: SearchProblem) -> None:
        located = [problem.space.locate(candidate) for candidate in problem.named]
        super().__init__(
            space=functools.partial(define, problem.space),
            metric=list(OBJECTIVES),
            mode=["min"] * len(OBJECTIVES),
            points_to_evaluate=[point for point in located if point is not None],
            sampler=optuna.samplers.TPESampler(seed=problem.seed, n_startup_trials=max(4, len(problem.named))),
        )
        self._problem, self._made = problem, 0
        self._ot_study: Any  # made by the call above, since a space is given
        self._outside = {index for index, point in enumerate(located) if point is None}
        self._generator = np.random.default_rng(problem.seed)
        self._tried: set[Any] = set()

    def suggest(self, trial_id: str) -> Any:
        number = self._made
        if number >= self._problem.total:
            return Searcher.FINISHED
        self._made += 1
        if number in self._outside:
            candidate = self._problem.named[number]
        else:
            candidate = self._ask(trial_id)
            for attempt in range(TRIES if number >= len(self._problem.named) else 0):
                if candidate.key not in self._tried:
                    break
                self._ot_study.tell(self._ot_trials.pop(trial_id), state=optuna.trial.TrialState.FAIL)
                if attempt >= PROPOSALS:  # the estimator insists; draw at random
                    self._ot_study.enqueue_trial(self._problem.space.sample(self._generator))
                candidate = self._ask(trial_id)
        self._tried.add(candidate.key)
        return candidate.config()

    def _ask(self, trial_id: str) -> Candidate:
        return self._problem.space.candidate(super().suggest(trial_id) or {})

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        if trial_id in self._ot_trials:
            super().on_trial_complete(trial_id, result, error)


def define(space: CandidateSpace, trial: Any) -> None:
    """Ask Optuna for one decision after another until the point is complete."""
    point: dict[str, Any] = {}
    while (domain := space.next(point)) is not None:
        if domain.kind in ("choice", "bool"):
            value = trial.suggest_categorical(domain.name, list(domain.choices or (False, True)))
        elif domain.kind == "int":
            value = trial.suggest_int(domain.name, domain.low, domain.high)
        else:
            value = trial.suggest_float(domain.name, domain.low, domain.high, log=domain.kind == "log_float")
        point[domain.name] = value


@SEARCHERS.part("optuna", source="Bergstra 2011; Ozaki 2022 (several objectives)")
def bayesian(problem: SearchProblem) -> Searcher:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("optuna").setLevel(logging.WARNING)
    return FrontSearch(problem)
