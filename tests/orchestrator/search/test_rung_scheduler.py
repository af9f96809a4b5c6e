"""Successive halving: worked examples, and agreement with slow references."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers import AsyncHyperBandScheduler

from benchmarks.simulation.virtual_tune import CONTINUE, PAUSE, STOP, FakeTrial, VirtualTune, trial
from orchestrator.search.schedulers import RungProblem, RungScheduler, make_scheduler
from search_spaces import pareto


def scheduler(name: str, rungs: int = 3, factor: float = 2.0, **problem: Any) -> RungScheduler:
    return make_scheduler(name, RungProblem(rungs, factor, ("gqa",), **problem))


def report(scheduler: RungScheduler, one: FakeTrial, rung: int, loss: float) -> str:
    result = {"loss": loss, "kv_bytes_per_token": one.kv_bytes, "rung": rung}
    return scheduler.on_trial_result(None, one, result)


# ---- one bracket a KV ratio ------------------------------------------------------------------------------------------


def test_the_weaker_of_one_ratio_is_stopped_at_the_untrained_rung() -> None:
    rule = scheduler("asha")
    assert report(rule, trial(1, []), 0, 2.5) == CONTINUE
    assert report(rule, trial(2, []), 0, 3.5) == STOP


def test_ratios_do_not_compete() -> None:
    rule = scheduler("asha")
    assert report(rule, trial(1, [], 0.5), 0, 2.3) == CONTINUE
    assert report(rule, trial(2, [], 0.25), 0, 5.0) == CONTINUE


@pytest.mark.parametrize(("rungs", "factor"), [(2, 2.0), (3, 2.0), (4, 3.0), (5, 1.5), (6, 4.0)])
def test_every_rung_but_the_last_can_stop(rungs: int, factor: float) -> None:
    for stopping in range(rungs):
        rule = scheduler("asha", rungs, factor)
        good, bad = trial(1, []), trial(2, [])
        for rung in range(rungs):
            assert report(rule, good, rung, 2.0) == CONTINUE
        answers = [report(rule, bad, rung, 1.0 if rung < stopping else 3.0) for rung in range(stopping + 1)]
        assert answers == [CONTINUE] * stopping + [CONTINUE if stopping == rungs - 1 else STOP]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("ratios", [(0.5,), (0.5, 0.25)])
def test_for_each_ratio_it_decides_as_asha_of_ray(seed: int, factor: float, ratios: tuple[float, ...]) -> None:
    generator = np.random.default_rng(seed)
    rule = scheduler("asha", 4, factor)
    brackets = {
        ratio: AsyncHyperBandScheduler(
            "resource",
            "loss",
            "min",
            max_t=factor**2.5,
            reduction_factor=factor,
            stop_last_trials=False,  # pyright: ignore[reportArgumentType]
        )
        for ratio in ratios
    }
    stopped = 0
    for number in range(40):
        ratio = ratios[number % len(ratios)]
        one, asha = trial(number, [], ratio), brackets[ratio]
        asha.on_trial_add(None, one)  # pyright: ignore[reportArgumentType]
        # Two decimals: equal losses, and losses that are the percentile itself, must come up
        for rung, loss in enumerate(np.sort(generator.uniform(size=4).round(2))[::-1]):
            if rung == 1 and number % 5 == 0:
                continue  # as a relaxation leaves rungs out
            result = {"resource": factor**rung, "loss": loss}
            theirs = asha.on_trial_result(None, one, result)  # pyright: ignore[reportArgumentType]
            assert report(rule, one, rung, loss) == theirs
            if theirs == STOP:
                stopped += 1
                break
    assert 10 < stopped < 40


# ---- the front ------------------------------------------------------------------------------------------------------


def slow_asha(curves: list[list[float]], workers: int, factor: float, seconds: Any) -> list[tuple[str, int]]:
    """Li 2020, Algorithm 2, from the paper and from scratch: the jobs in the order in which workers take them."""
    rungs = len(curves[0])
    results: list[dict[int, float]] = [{} for _ in range(rungs)]
    gone_on: list[set[int]] = [set() for _ in range(rungs)]
    jobs: list[tuple[str, int]] = []
    running: list[tuple[float, int, int, int]] = []
    now, begun = 0.0, 0

    def get_job() -> tuple[int, int] | None:
        nonlocal begun
        for k in reversed(range(rungs - 1)):
            ranked = sorted(results[k], key=lambda t: results[k][t])  # sorted is stable: the earlier of equals
            for t in ranked[: int(len(ranked) / factor)]:
                if t not in gone_on[k]:
                    gone_on[k].add(t)
                    return t, k + 1
        if begun < len(curves):
            begun += 1
            return begun - 1, 0
        return None

    while True:
        while len(running) < workers and (job := get_job()) is not None:
            jobs.append((f"t{job[0]}", job[1]))
            heapq.heappush(running, (now + seconds(*job), len(jobs), *job))
        if not running:
            return jobs
        now, _, t, rung = heapq.heappop(running)
        results[rung][t] = curves[t][rung]


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_with_one_objective_it_is_asha(workers: int, factor: float) -> None:
    """The same jobs in the same order, until no trial is to advance and the last ones are released."""
    for seed in range(4):
        generator = np.random.default_rng(seed)
        curves = np.round(np.sort(generator.uniform(size=(40, 4)), axis=1)[:, ::-1], 2).tolist()
        cost = generator.uniform(1, 3, size=(40, 4))
        reference = slow_asha(curves, workers, factor, lambda t, rung, cost=cost: cost[t, rung])
        rule = scheduler("front", 4, factor, objectives=("loss",))
        trials = [trial(n, curve, (0.5, 0.25)[n % 2]) for n, curve in enumerate(curves)]
        tune = VirtualTune(rule, trials, workers, lambda t, rung, cost=cost: cost[int(t.trial_id[1:]), rung]).run()
        assert tune.jobs[: len(reference)] == reference


def test_advancing_by_rank_worked() -> None:
    """Four trials at the first rung, two of which continue: the front, though its losses are not the lowest two.

    (2.0, half) and (3.0, quarter) beat all others at their budgets; (2.1, half) has a lower loss than the second, but
    it is dominated by the first in the loss and equal in bytes.
    """
    rule = scheduler("front")
    a, b, c, d = trial(1, [], 0.5), trial(2, [], 0.5), trial(3, [], 0.25), trial(4, [], 0.25)
    assert report(rule, b, 0, 2.1) == PAUSE  # the first of one: int(1 / 2) = 0 continue
    assert report(rule, a, 0, 2.0) == CONTINUE  # the best of two continues at once
    assert report(rule, d, 0, 3.5) == PAUSE  # int(3 / 2) = 1, and that has gone on
    assert report(rule, c, 0, 3.0) == CONTINUE  # int(4 / 2) = 2: the front of two ranks
    assert rule.slots.promised == 0


def test_a_trial_overtaken_on_paper_does_not_come_back() -> None:
    """A trial that has advanced takes no slot of the next ones (Li 2020: promotions are never taken back)."""
    rule = scheduler("front", objectives=("loss",))
    losses = [5.0, 4.0, 3.0, 2.0]
    assert [report(rule, trial(n, []), 0, loss) for n, loss in enumerate(losses)] == [
        PAUSE,
        CONTINUE,
        CONTINUE,
        CONTINUE,
    ]


def test_with_synchronous_rungs_the_order_of_reports_does_not_matter() -> None:
    generator = np.random.default_rng(0)
    curves = np.sort(generator.uniform(2, 5, size=(21, 3)), axis=1)[:, ::-1].tolist()
    done = []
    for seed in range(6):
        cost = np.random.default_rng(seed).uniform(1, 9, size=(21, 3))
        trials = [trial(n, curve, (0.5, 0.25, 0.125)[n % 3]) for n, curve in enumerate(curves)]
        rule = make_scheduler("front", RungProblem(3, 2.0, trials=21), {"synchronous": True})
        tune = VirtualTune(rule, trials, 1 + seed, lambda t, rung, cost=cost: cost[int(t.trial_id[1:]), rung]).run()
        done.append({t.trial_id: t.done for t in tune.trials})
    assert all(other == done[0] for other in done)
    first = [(curve[0], t.kv_bytes) for curve, t in zip(curves, trials, strict=True)]
    chosen = {f"t{n}" for n in pareto.select_best(first, 10, "epsilon_net")}
    assert {name for name, rungs in done[0].items() if rungs > 1} == chosen
    assert sum(rungs == 3 for rungs in done[0].values()) == 5


def test_new_trials_wait_for_those_that_advance() -> None:
    """A free worker first looks for a trial to advance (Li 2020, Algorithm 2, get_job)."""
    rule = scheduler("front", objectives=("loss",))
    late, early = trial(1, []), trial(2, [])
    tune = VirtualTune(rule, [], 4)
    for one in (early, late):
        rule.on_trial_add(tune, one)
    assert report(rule, early, 0, 2.0) == PAUSE
    assert rule.slots.promised == 0
    assert report(rule, late, 0, 3.0) == PAUSE  # the other one is the best of the two
    assert rule.slots.promised == 1
    early.status = "PAUSED"
    assert rule.choose_trial_to_run(tune) is early
    assert rule.slots.promised == 0 and rule.choose_trial_to_run(tune) is None


def test_a_synchronous_search_must_know_its_size() -> None:
    with pytest.raises(ValueError, match="how many trials"):
        make_scheduler("front", RungProblem(3, 2.0), {"synchronous": True})
