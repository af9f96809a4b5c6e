"""Tree-structured Parzen estimators over the joint space, by Optuna, which only this file uses.

Two objectives, held-out loss and KV bytes per token (three where decode time is measured), so that
the search spreads along the front and does not concentrate on one budget. Conditional decisions are
made only when they arise (define by run). A suggestion is a function of the seed, its number and
the set of results reported before it.

A trial that is paused or stopped at an early rung is reported with its lowest loss until then, and
again when it progresses: the result of a trial is its best step, as in every table
(`TrialRecord.best`). An early loss is above what full training would give, and only trials that
were behind at the same rung stay there, so the estimator errs on the safe side. A trial that
diverged or failed is not reported, nor is the loss of a pooled model that a relaxation never trains
from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import optuna

from orchestrator.search.candidates import Candidate, Point
from orchestrator.search.searchers.listed import ListedSearcher
from orchestrator.search.searchers.problem import SEARCHERS, ResumableSearcher, SearchProblem
from search_spaces import pareto
from search_spaces.space.joint_space import Domain

_TRIES_PER_CHANGE = 10
"""Variations of a proposal in one decision that may repeat an earlier candidate too, before two are
changed.
"""
RECENT, BEST = 150, 50
"""Results that a proposal rests on: those of the newest trials, and the best of the others by rank.

With all of them TPE would be slower each time, and it weighs old results down anyway.
"""


class FrontSearch(ListedSearcher):
    """The configured candidates, then proposals of Optuna.

    It learns from the configured ones too, if they are in the space.
    """

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        self._points: dict[str, Point] = {}
        # With the best scores reported, by trial
        self._seen: dict[str, optuna.trial.FrozenTrial] = {}
        self._dropped: set[str] = set()

    def add_trial(self, trial_id: str, config: Mapping[str, Any]) -> None:
        super().add_trial(trial_id, config)
        if (point := self._problem.space.locate(Candidate.from_config(config))) is not None:
            self._points[trial_id] = point

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """End a trial.

        A paused trial that is stopped for good has no final result: its earlier report counts.
        """
        if result is not None and not error:
            self.on_trial_result(trial_id, result)
        diverged = result is not None and not math.isfinite(
            result.get(self._problem.objectives[0], 0.0)
        )
        if error or diverged:
            self._dropped.add(trial_id)

    def reopen(self, trial_id: str) -> None:
        self._dropped.discard(trial_id)

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        values = tuple(float(result.get(name, math.nan)) for name in self._problem.objectives)
        point, rung = self._points.get(trial_id), int(result.get("rung", 0))
        if (
            point is None
            or trial_id in self._dropped
            or result.get("pooled")
            or not all(map(math.isfinite, values))
        ):
            return
        relaxed = result.get("collapsed_loss")
        if relaxed is not None and relaxed < values[0]:  # false for one that is not a number
            values = (relaxed, *values[1:])
        if (seen := self._seen.get(trial_id)) is not None:
            if seen.user_attrs["rung"] >= rung:
                return
            values = (min(values[0], seen.values[0]), *values[1:])  # a trial is worth its best step
        trial = optuna.trial.FixedTrial(point)
        self._problem.space.decide(partial(ask, trial))
        self._seen[trial_id] = optuna.trial.create_trial(
            params=point,
            distributions=trial.distributions,
            values=values,
            user_attrs={"rung": rung},
        )

    def _window(self) -> list[Any]:
        """Return what a proposal rests on, at most RECENT + BEST results, by trial number."""
        learned = self._seen.keys() - self._dropped
        seen = [self._seen[trial] for trial in sorted(learned, key=lambda name: (len(name), name))]
        if len(seen) <= RECENT + BEST:
            return seen
        older = seen[:-RECENT]
        best = sorted(pareto.select_best([trial.values for trial in older], BEST))
        return [*(older[index] for index in best), *seen[-RECENT:]]

    def draws(self, number: int) -> Iterator[Candidate]:
        """Yield the estimator's proposal, then its neighbours: one decision drawn anew, later more.

        Another proposal of the estimator helps little: when most decisions are categorical, its
        likeliest draw is the current best for any seed.
        """
        space = self._problem.space
        directions = [optuna.study.StudyDirection.MINIMIZE] * len(self._problem.objectives)
        study = optuna.create_study(directions=directions)
        study.add_trials(self._window())
        seed = int(np.random.SeedSequence([self._problem.seed, number, 0]).generate_state(1)[0])
        startup = max(4, len(self._problem.named))
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
        point = space.decide(partial(ask, study.ask()))
        yield space.candidate(point)
        generator = np.random.default_rng([self._problem.seed, number])
        for attempt in itertools.count():
            yield space.candidate(space.vary(point, 1 + attempt // _TRIES_PER_CHANGE, generator))


def ask(trial: Any, domain: Domain) -> Any:
    """Have a trial of Optuna's take one decision."""
    if domain.kind in ("choice", "bool"):
        return trial.suggest_categorical(domain.name, list(domain.choices or (False, True)))
    if domain.kind == "int":
        return trial.suggest_int(domain.name, domain.low, domain.high)
    return trial.suggest_float(domain.name, domain.low, domain.high, log=domain.kind == "log_float")


@SEARCHERS.part("optuna", source="Bergstra 2011; Ozaki 2022 (several objectives)")
def bayesian(problem: SearchProblem) -> ResumableSearcher:
    """Return the searcher `optuna`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return FrontSearch(problem)
