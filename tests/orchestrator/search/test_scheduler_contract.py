"""The contract that every scheduler must pass; a new file in orchestrator/search/schedulers is collected by itself."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from ray.tune.experiment import Trial

from benchmarks.simulation.virtual_tune import CONTINUE, STOP, FakeTrial, VirtualTune, told_again, trial
from orchestrator.search.schedulers import SCHEDULERS, RungProblem, RungScheduler, make_scheduler

RUNGS = 3
LAST = RUNGS - 1


@pytest.fixture(params=[(name, s) for name in SCHEDULERS.names() for s in (False, True) if not s or name == "front"])
def make(request: pytest.FixtureRequest) -> Any:
    name, synchronous = request.param

    def make(rungs: int = RUNGS, **problem: Any) -> RungScheduler:
        given = RungProblem(rungs, 2.0, ("gqa",), **problem)
        return make_scheduler(name, given, {"synchronous": True} if synchronous else None)

    return lambda rungs=RUNGS, trials=24, **problem: make(rungs, trials=trials, **problem)


def curves(count: int, seed: int = 0, rungs: int = RUNGS) -> list[FakeTrial]:
    """Trials at three budgets whose losses fall from rung to rung."""
    generator = np.random.default_rng(seed)
    falling = np.sort(generator.uniform(2, 5, size=(count, rungs)), axis=1)[:, ::-1]
    return [trial(n, list(map(float, falling[n])), (0.5, 0.25, 0.125)[n % 3]) for n in range(count)]


def ended(tune: VirtualTune) -> bool:
    return all(t.status in (Trial.TERMINATED, Trial.ERROR) for t in tune.trials)


@pytest.mark.parametrize("workers", [1, 4])
def test_every_trial_ends_and_some_reach_the_last_rung(make: Any, workers: int) -> None:
    tune = VirtualTune(make(), curves(24), workers).run()
    assert ended(tune)
    assert len({t for t, rung in tune.jobs if rung == 0}) == 24
    assert sum(t.done == RUNGS for t in tune.trials) >= 1
    assert len(set(tune.jobs)) == len(tune.jobs)  # nothing is trained twice


def test_the_last_rung_holds_nobody(make: Any) -> None:
    tune = VirtualTune(make(), curves(24)).run()
    assert {d for (_, rung), d in tune.decisions.items() if rung == LAST} == {CONTINUE}


def test_with_one_rung_no_trial_waits(make: Any) -> None:
    tune = VirtualTune(make(rungs=1), curves(8, rungs=1)).run()
    assert set(tune.decisions.values()) == {CONTINUE} and ended(tune)


def test_protected_trials_continue_and_do_not_count(make: Any) -> None:
    baselines = [trial(100 + n, [9.0, 9.0, 9.0], recipe="gqa") for n in range(3)]
    with_them = VirtualTune(make(trials=27), baselines + curves(24), workers=1).run()
    without = VirtualTune(make(), curves(24), workers=1).run()
    assert all(t.done == RUNGS for t in baselines)
    own = {key: d for key, d in with_them.decisions.items() if key[0] not in {b.trial_id for b in baselines}}
    assert own == without.decisions


def test_plans_of_the_searcher_do_not_wait_and_do_not_count(make: Any) -> None:
    probes = [trial(100 + n, [1.0], plan="{}", probe=True) for n in range(3)]
    result = trial(200, [9.0, 9.0, 9.0], plan="{}", probe=False)
    tune = VirtualTune(make(trials=28), [*probes, result, *curves(24)], workers=1).run()
    own = {key: d for key, d in tune.decisions.items() if int(key[0][1:]) < 100}
    assert result.done == RUNGS
    assert own == VirtualTune(make(), curves(24), workers=1).run().decisions


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_diverged_trial_is_stopped_even_if_protected(make: Any, loss: float) -> None:
    bad = [trial(100, [4.0, loss, 3.0], recipe="gqa"), trial(101, [loss, 1.0, 1.0])]
    tune = VirtualTune(make(trials=26), bad + curves(24), workers=1).run()
    assert tune.decisions["t100", 1] == STOP and tune.decisions["t101", 0] == STOP and ended(tune)


def test_failed_trials_do_not_hold_up_the_search(make: Any) -> None:
    fails = frozenset({("t3", 0), ("t7", 1), ("t8", 1), ("t11", 2), ("t23", 0)})
    assert ended(VirtualTune(make(), curves(24), 3, fails=fails).run())


def test_trials_that_skip_rungs_end(make: Any) -> None:
    """A relaxation leaves out the rungs within it."""
    trials = curves(24)
    for t in trials[::3]:
        t.curve[1] = None
    assert ended(VirtualTune(make(), trials, 2).run())


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("skips", [False, True])
def test_a_relaxation_is_not_judged_by_a_model_that_it_never_trains_from(make: Any, workers: int, skips: bool) -> None:
    """Any score of the pooled model, even nan: no trial is stopped for it, nor for comparison with it."""

    def run(pooled: float) -> VirtualTune:
        trials = curves(24)
        for t in trials[::3]:
            t.first, t.curve[0] = {"pooled": True}, pooled
            t.curve[1] = None if skips else t.curve[1]
        return VirtualTune(make(), trials, workers).run()

    bad, good, broken = run(99.0), run(0.0), run(float("nan"))
    assert ended(bad)
    relaxed = {t.trial_id for t in bad.trials if t.first}
    assert {bad.decisions[name, 0] for name in relaxed} == {CONTINUE}
    assert {(name, 2 if skips else 1) for name in relaxed} <= set(bad.decisions)
    assert bad.decisions == good.decisions == broken.decisions


def test_after_a_kill_a_relaxation_resumes(make: Any) -> None:
    trials = curves(24)
    for t in trials[::3]:
        t.first, t.curve[0] = {"pooled": True}, 99.0
    first = VirtualTune(make(), trials, 4).run(20)
    tune = told_again(first, make()).run()
    assert ended(tune) and {tune.decisions[t.trial_id, 0] for t in trials[::3]} == {CONTINUE}


@pytest.mark.parametrize("workers", [1, 4])
def test_the_same_work_is_done_once_and_copies_do_not_count(make: Any, workers: int) -> None:
    twins = [trial(100 + n, [0.5, 0.4, 0.3]) for n in range(3)]
    for twin in twins:
        twin.first = {"work_digest": "same"}
    protected = trial(200, [3.0, 2.0, 1.0], recipe="gqa")
    protected.first = {"work_digest": "same"}
    scheduler = make(trials=28)
    tune = VirtualTune(scheduler, [*twins, protected, *curves(24)], workers).run()
    assert scheduler.copies == {"t101": "t100", "t102": "t100"}
    assert [t.done for t in twins] == [RUNGS, 1, 1] and protected.done == RUNGS, "a baseline does its own work"
    assert ended(tune)
    if workers == 1:
        alone = VirtualTune(make(trials=25), [twins[0], *curves(24)], 1)
        twins[0].done, twins[0].status = 0, Trial.PENDING
        own = {key: d for key, d in tune.decisions.items() if key[0] not in ("t101", "t102", "t200")}
        assert own == alone.run().decisions
    again = told_again(
        VirtualTune(make(trials=28), [*fresh(twins), *curves(24)], workers).run(9), make(trials=28)
    ).run()
    assert again.scheduler.copies == {"t101": "t100", "t102": "t100"} and ended(again)


def fresh(trials: list[FakeTrial]) -> list[FakeTrial]:
    return [FakeTrial(t.trial_id, t.curve, t.config, t.kv_bytes, first=t.first) for t in trials]


def test_fewer_trials_than_foretold_end(make: Any) -> None:
    assert ended(VirtualTune(make(trials=40), curves(9), 2).run())


def test_a_rung_that_is_reported_again_is_decided_as_before(make: Any) -> None:
    """A trial that continues, or is restarted, reports from the beginning; it must not count twice."""
    repeated, continued = 0, False
    for events in range(28, 36):
        scheduler = make()
        tune = VirtualTune(scheduler, curves(24), 2).run(events=events)
        before = pickle.dumps(vars(scheduler))
        for (name, rung), decision in list(tune.decisions.items()):
            one = next(t for t in tune.trials if t.trial_id == name)
            result = {"loss": one.curve[rung], "kv_bytes_per_token": one.kv_bytes, "rung": rung}
            if rung < LAST and one.status == Trial.RUNNING and decision == CONTINUE:
                assert scheduler.on_trial_result(tune, one, result) == CONTINUE
                repeated += 1
        continued |= CONTINUE in {decision for (_, rung), decision in tune.decisions.items() if rung < LAST}
        assert pickle.dumps(vars(scheduler)) == before
    assert repeated or not continued, "one that has all trials wait for their next rung"


@pytest.mark.parametrize("events", [1, 7, 20, 33])
def test_after_a_kill_it_resumes_as_if_nothing_had_happened(make: Any, events: int) -> None:
    def seconds(one: FakeTrial, rung: int) -> float:
        return 1.0 + rung

    whole = VirtualTune(make(), curves(24), 1, seconds).run()
    first = VirtualTune(make(), curves(24), 1, seconds).run(events)
    tune = told_again(first, make()).run()
    assert ended(tune)
    assert tune.decisions == whole.decisions


@pytest.mark.parametrize("events", [9, 30])
def test_with_several_at_a_time_a_kill_changes_no_decision_made(make: Any, events: int) -> None:
    first = VirtualTune(make(), curves(24), 4, fails=frozenset({("t5", 1)})).run(events)
    before = dict(first.decisions)
    tune = told_again(first, make()).run()
    assert ended(tune) and {key: tune.decisions[key] for key in before} == before


def test_no_rung_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rung"):
        RungProblem(0, 2.0)
    with pytest.raises(ValueError, match="above 1"):
        RungProblem(3, 1.0)
