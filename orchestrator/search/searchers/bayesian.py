"""Tree-structured Parzen estimators over the joint space, by Optuna; the only file that knows of it.

Two objectives, held-out loss and KV bytes a token, so that the search spreads along the front and does not settle at
one budget. Conditional decisions are asked for only where they come up (define by run).

What the sampler knows lies in a database, if the problem names one: every suggestion, and every result as a finished
Optuna trial. A suggestion is a function of the seed, its number and the results told before it, and is looked up where
it was made before; nothing is ever stored as running, so that no kill leaves a trial that waits for ever.

A trial that is paused or stopped at an early rung is told with the loss that it had there, and again when it gets
further; its highest rung counts. An early loss is above what full training would give, and only trials that were behind
at the same rung stay there, so the estimator errs on the safe side. A trial that diverged or failed is not told of, nor
the loss of a pooled model that a relaxation never trains from.

In which order results came makes no difference to a proposal, only which were there: they are told by trial number.
"""

from __future__ import annotations

import itertools
import logging
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from ray.tune.search import Searcher

from orchestrator.search.candidates import CandidateSpace, Point
from orchestrator.search.searchers.problem import OBJECTIVES, SEARCHERS, TRIES, SearchProblem
from search_spaces import pareto
from search_spaces.space.space import Domain

NEAR = 10
"""Variations of a proposal in one decision that may repeat an earlier candidate too, before two are changed."""
RECENT, BEST = 150, 50
"""Results that a proposal rests on: those of the newest trials, and the best of the others by rank. With all of them
TPE would be slower each time, and it weighs old results down anyway."""
DIRECTIONS = [optuna.study.StudyDirection.MINIMIZE] * len(OBJECTIVES)
STUDY, SUGGESTION, DROPPED = "headfold", "suggestion:", "dropped:"


@dataclass
class Observation:
    """A trial's scores at the highest rung that it has told of."""

    point: Point
    values: tuple[float, ...]
    rung: int
    _finished = None  # no field: it is not saved

    def finished(self, space: CandidateSpace) -> optuna.trial.FrozenTrial:
        """As a trial of Optuna's, made once: it is told with every proposal as long as it is in the window."""
        if self._finished is None:
            spread = distributions(space, self.point)
            self._finished = optuna.trial.create_trial(params=self.point, distributions=spread, values=self.values)
        return self._finished


class FrontSearch(Searcher):
    """The configured candidates, then what Optuna proposes.

    Configured candidates that lie in the space are told too, so that the estimator learns from them; those outside of
    it are run without telling.
    """

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(metric=OBJECTIVES[0], mode="min")
        self._problem, self._made = problem, 0
        self._points: dict[str, Point] = {}
        self._tried: set[Any] = set()
        self._seen: dict[str, Observation] = {}  # by trial
        self._dropped: set[str] = set()
        self._memory = Memory(problem.database) if problem.database else None
        if self._memory is not None:
            self._seen, self._dropped = self._memory.results()

    # ---- Tune's hooks -----------------------------------------------------------------------------------------

    def suggest(self, trial_id: str) -> Any:
        number, named = self._made, self._problem.named
        if number >= self._problem.total:
            return Searcher.FINISHED
        self._made += 1
        if number < len(named):
            candidate, point = named[number], self._problem.space.locate(named[number])
        else:
            point = self._known(number) or self._propose(number)
            candidate = self._problem.space.candidate(point)
        if point is not None:
            self._points[trial_id] = point
        self._tried.add(candidate.key)
        return candidate.config()

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        self._tell(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        """A paused trial that is stopped for good comes without a result: what it told before counts."""
        if result is not None and not error:
            self._tell(trial_id, result)
        diverged = result is not None and not math.isfinite(result.get(OBJECTIVES[0], 0.0))
        if (error or diverged) and trial_id in self._points:
            self._seen.pop(trial_id, None)
            self._dropped.add(trial_id)
            if self._memory is not None:
                self._memory.drop(trial_id)
        self._points.pop(trial_id, None)

    def save(self, checkpoint_path: str) -> None:
        own = ("_made", "_points", "_tried", "_dropped")
        state = {name: getattr(self, name) for name in own}
        seen = {trial: asdict(observation) for trial, observation in self._seen.items()}
        Path(checkpoint_path).write_bytes(pickle.dumps(state | {"_seen": seen}))

    def restore(self, checkpoint_path: str) -> None:
        """Written by `save`, and trusted like the program itself: it is unpickled."""
        state = pickle.loads(Path(checkpoint_path).read_bytes())
        seen = {trial: Observation(**record) for trial, record in state.pop("_seen").items()}
        self.__dict__.update(state | {"_seen": seen | self._seen})

    # ---- results ----------------------------------------------------------------------------------------------

    def _tell(self, trial_id: str, result: Mapping[str, Any]) -> None:
        values = tuple(float(result.get(name, math.nan)) for name in OBJECTIVES)
        point, rung = self._points.get(trial_id), int(result.get("rung", 0))
        if point is None or trial_id in self._dropped or result.get("pooled"):
            return
        if not all(map(math.isfinite, values)):
            return
        known = self._seen.get(trial_id)
        if known is not None and known.rung >= rung:
            return
        self._seen[trial_id] = Observation(point, values, rung)
        if self._memory is not None:
            self._memory.tell(trial_id, self._seen[trial_id], distributions(self._problem.space, point))

    def _window(self) -> list[Observation]:
        """What a proposal rests on, at most RECENT + BEST results, by trial number: a function of what is known."""
        seen = [self._seen[trial] for trial in sorted(self._seen, key=lambda trial: (len(trial), trial))]
        if len(seen) <= RECENT + BEST:
            return seen
        older = seen[:-RECENT]
        kept = sorted(pareto.select([observation.values for observation in older], BEST))
        return [*(older[place] for place in kept), *seen[-RECENT:]]

    # ---- proposals --------------------------------------------------------------------------------------------

    def _known(self, number: int) -> Point | None:
        return self._memory.suggestion(number) if self._memory is not None else None

    def _propose(self, number: int) -> Point:
        """A point whose candidate was not tried before, if some can be found."""
        proposals = self._proposals(number)
        point = next(proposals)
        for _ in range(TRIES):
            if self._problem.space.candidate(point).key not in self._tried:
                break
            point = next(proposals)
        if self._memory is not None:
            self._memory.suggest(number, point)
        return point

    def _proposals(self, number: int) -> Iterator[Point]:
        """The estimator's, and, where that was tried, what lies beside it: one decision drawn anew, later more.

        The estimator takes the likeliest of its draws. Among decisions that are mostly choices that is what was best so
        far, again and again, whatever the seed; asking it again takes long and helps little.
        """
        space = self._problem.space
        study = optuna.create_study(directions=DIRECTIONS)
        study.add_trials([observation.finished(space) for observation in self._window()])
        seed = int(np.random.SeedSequence([self._problem.seed, number, 0]).generate_state(1)[0])
        startup = max(4, len(self._problem.named))
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
        point = define(space, study.ask())
        yield point
        generator = np.random.default_rng([self._problem.seed, number])
        for attempt in itertools.count():
            yield space.vary(point, 1 + attempt // NEAR, generator)


# ---- Optuna's side ---------------------------------------------------------------------------------------------------


class Memory:
    """The database: an Optuna journal, one file that only grows, readable with Optuna's own tools.

    A file of one's own and not a server: it is written by the driver alone. Unlike SQLite it is safe on NFS.
    """

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # A lock of a killed driver is taken over; the search's own lock keeps two drivers apart
        lock = JournalFileOpenLock(path, grace_period=5)
        storage = JournalStorage(JournalFileBackend(path, lock_obj=lock))
        self._study = optuna.create_study(storage=storage, study_name=STUDY, directions=DIRECTIONS, load_if_exists=True)
        self._suggestions = {
            int(key.removeprefix(SUGGESTION)): point
            for key, point in self._study.user_attrs.items()
            if key.startswith(SUGGESTION)
        }

    def results(self) -> tuple[dict[str, Observation], set[str]]:
        """Every trial's highest rung, oldest first, and the trials that were dropped."""
        dropped = {key.removeprefix(DROPPED) for key in self._study.user_attrs if key.startswith(DROPPED)}
        seen: dict[str, Observation] = {}
        for trial in self._study.get_trials(deepcopy=False):
            own = trial.user_attrs
            if own["trial"] not in dropped:
                seen.pop(own["trial"], None)
                seen[own["trial"]] = Observation(dict(trial.params), tuple(trial.values), own["rung"])
        return seen, dropped

    def suggestion(self, number: int) -> Point | None:
        return self._suggestions.get(number)

    def suggest(self, number: int, point: Point) -> None:
        self._suggestions[number] = point
        self._study.set_user_attr(f"{SUGGESTION}{number}", point)

    def tell(self, trial: str, seen: Observation, spread: dict[str, Any]) -> None:
        self._study.add_trial(
            optuna.trial.create_trial(
                params=seen.point,
                distributions=spread,
                values=seen.values,
                user_attrs={"trial": trial, "rung": seen.rung},
            )
        )

    def drop(self, trial: str) -> None:
        self._study.set_user_attr(f"{DROPPED}{trial}", True)


def distributions(space: CandidateSpace, point: Point) -> dict[str, Any]:
    """Optuna's distribution of every decision of a point."""
    found: dict[str, Any] = {}
    decided: Point = {}
    while (domain := space.next(decided)) is not None:
        found[domain.name] = distribution(domain)
        decided[domain.name] = point[domain.name]
    return found


def distribution(domain: Domain) -> Any:
    if domain.kind in ("choice", "bool"):
        return optuna.distributions.CategoricalDistribution(domain.choices or (False, True))
    if domain.kind == "int":
        return optuna.distributions.IntDistribution(int(domain.low or 0), int(domain.high or 0))
    return optuna.distributions.FloatDistribution(
        float(domain.low or 0), float(domain.high or 0), log=domain.kind == "log_float"
    )


def define(space: CandidateSpace, trial: Any) -> Point:
    """Ask Optuna for one decision after another until the point is complete."""
    point: Point = {}
    while (domain := space.next(point)) is not None:
        if domain.kind in ("choice", "bool"):
            value = trial.suggest_categorical(domain.name, list(domain.choices or (False, True)))
        elif domain.kind == "int":
            value = trial.suggest_int(domain.name, domain.low, domain.high)
        else:
            value = trial.suggest_float(domain.name, domain.low, domain.high, log=domain.kind == "log_float")
        point[domain.name] = value
    return point


@SEARCHERS.part("optuna", source="Bergstra 2011; Ozaki 2022 (several objectives)")
def bayesian(problem: SearchProblem) -> Searcher:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("optuna").setLevel(logging.WARNING)
    return FrontSearch(problem)
