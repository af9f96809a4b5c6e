"""A search of thousands of trials on simulated workers: what the driver does is real, what the trials do is recorded.

Real: Ray Tune's controller, the searcher, the scheduler with its pauses and advances, journal, records, and MLflow
in sqlite.
Simulated: actors, whose tasks take recorded seconds of a virtual clock. The driver's own CPU time goes by on that clock
too, during which no worker is given anything to do. Losses follow learning curves of the candidate's budget, and do
not depend on the rest of the candidate.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulation.curves import Curve, generated
from benchmarks.simulation.virtual_actors import Classes, Unlimited, VirtualActors

WINDOW = 100
FULL = 400
"""Trials by which the searcher has as many results as its proposals rest on, so that these take what they will take."""


@dataclass
class Measured:
    """Measurements of a simulated search; `seconds` are CPU seconds of the driver.

    `windows`: (trials begun, CPU seconds, resident MiB, MLflow calls, events) at every `window` trials that were begun.
    """

    trials: int
    workers: int
    window: int = WINDOW
    windows: list[tuple[int, float, float, int, int]] = field(default_factory=list)
    busy: float = 0.0
    virtual_seconds: float = 0.0
    calls: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    database_mib: float = 0.0

    @property
    def idle(self) -> float:
        """Share of the workers' time in which they had nothing to do."""
        return 1.0 - self.busy / (self.virtual_seconds * self.workers)

    def per_trial(self) -> list[tuple[int, float]]:
        """(trials begun, driver's CPU seconds per trial) of each window."""
        pairs = itertools.pairwise(self.windows)
        return [(b[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairs if b[0] > a[0]]

    def slope(self, after: int = 0) -> tuple[float, float, float]:
        """Straight line through the windows that begin at `after` trials or later, but for the first, in which
        everything starts: mean seconds per trial, the change from the first of them to the last, its standard error."""
        points = [point for point in self.per_trial()[1:] if point[0] - self.window >= after]
        x, y = np.array([p[0] for p in points], float), np.array([p[1] for p in points])
        centred = x - x.mean()
        slope = float((centred * y).sum() / (centred**2).sum())
        error = y - y.mean() - slope * centred
        deviation = float(np.sqrt((error**2).sum() / max(1, len(x) - 2) / (centred**2).sum()))
        span = float(x[-1] - x[0])
        return float(y.mean()), slope * span, deviation * span


class Counted:
    """A tracker whose calls are counted."""

    def __init__(self, tracker: Any, measured: Measured) -> None:
        self._tracker, self._measured = tracker, measured

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._tracker, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            self._measured.calls += 1
            return attribute(*args, **kwargs)

        return call


def simulate(
    folder: Path,
    trials: int = 2000,
    workers: int = 64,
    scheduler: str = "front",
    seed: int = 0,
    mlflow: bool = True,
    window: int = WINDOW,
) -> Measured:
    """Run a search of `trials` candidates on `workers` simulated workers; everything is written into `folder`.

    Tune's trials ask Ray for a folder of its session, so a Ray is started; it is given nothing to do.
    """
    from orchestrator.cluster.session import connected

    with connected():
        return _simulated(folder, trials, workers, scheduler, seed, mlflow, window)


def _simulated(
    folder: Path, trials: int, workers: int, scheduler: str, seed: int, mlflow: bool, window: int
) -> Measured:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Experiment

    from orchestrator.search.callbacks import SearchLog
    from orchestrator.search.resume import JournaledScheduler, JournaledSearch
    from orchestrator.search.schedulers import RungProblem, make_scheduler
    from orchestrator.search.searchers import SearchProblem, make_searcher
    from orchestrator.storage.journal import Journal
    from orchestrator.tracking.runs import Tracker
    from orchestrator.tracking.sync import MlflowSync, parent_run

    os.environ.update(TUNE_MAX_PENDING_TRIALS_PG=str(workers), TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1")
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
    measured, curves = Measured(trials, workers, window), generated(trials, seed)
    space, named = _space(trials)
    problem = SearchProblem(space, named, trials - len(named), seed)
    rungs = len(curves[0].rungs)
    scheduling = make_scheduler(scheduler, RungProblem(rungs, 2.0, ("gqa",), trials=trials))
    scheduling.slots.capacity = workers
    sync = None
    if mlflow:
        counted: Any = Counted(Tracker.open(None, "simulation", folder), measured)
        sync = MlflowSync(lambda: counted, parent_run(folder))
    journal = Journal(folder / "journal.jsonl")
    journal.begin(rungs)
    log = SearchLog(journal, sync, trials, 2.346)
    decided = JournaledScheduler(scheduling, journal)
    search = JournaledSearch(make_searcher("optuna", problem), decided, journal)
    experiment = Experiment(
        "simulation", _nothing, num_samples=trials, storage_path=str(folder / "tune"), resources_per_trial={"cpu": 1},
        trial_name_creator=_name, trial_dirname_creator=_name,
    )  # fmt: skip
    controller = TuneController(
        search_alg=search, scheduler=decided, callbacks=[log], reuse_actors=True, storage=experiment.storage,
        resource_manager_factory=Unlimited,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    own_curve: dict[str, Curve] = {}
    by_budget = {b: [c for c in curves if c.kv_ratio == b] for b in {c.kv_ratio for c in curves}}

    def report(trial_id: str, rung: int) -> tuple[dict[str, Any], float] | None:
        record = log.records[trial_id]
        of_budget = by_budget[record.kv_ratio]
        curve = own_curve.setdefault(trial_id, of_budget[len(own_curve) % len(of_budget)])
        return _report(curve, rung, record.kv_ratio) if rung < rungs else None

    actors = VirtualActors(report)
    controller._actor_manager = actors  # pyright: ignore[reportAttributeAccessIssue]
    controller._class_cache = Classes()  # pyright: ignore[reportAttributeAccessIssue]
    search.add_configurations([experiment])
    controller.setup_experiments([experiment], trials)
    _drive(controller, actors, log, measured)
    controller.cleanup()
    measured.virtual_seconds, measured.busy = actors.now, actors.busy
    for record in log.records.values():
        measured.finished[record.status] = measured.finished.get(record.status, 0) + 1
    database = folder / "mlflow.db"
    measured.database_mib = database.stat().st_size / 2**20 if database.exists() else 0.0
    return measured


def _drive(controller: Any, actors: VirtualActors, log: Any, measured: Measured) -> None:
    """Run until the search has finished, with a point of the measurement at every `window` trials begun."""
    started, reached = time.process_time(), 0
    measured.windows.append((0, 0.0, _resident(), measured.calls, 0))
    while not controller.is_finished():
        controller.step()
        if len(log.records) >= reached + measured.window:
            reached = len(log.records)
            spent = time.process_time() - started
            measured.windows.append((reached, spent, _resident(), measured.calls, actors.events))
    measured.windows.append(
        (len(log.records), time.process_time() - started, _resident(), measured.calls, actors.events)
    )


def _report(curve: Curve, rung: int, kv_ratio: float) -> tuple[dict[str, Any], float]:
    """Return the report of a trial at a rung, all facts included, and the seconds until then."""
    report = curve.rungs[rung]
    assert report is not None
    step, tokens, loss, seconds = report
    before = curve.rungs[rung - 1] if rung else None
    facts = {
        "kv_bytes_per_token": int(8192 * kv_ratio), "cache_bytes_measured": int(2**21 * kv_ratio), "cache_tokens": 256,
        "parameters": 1_000_000, "actual_kv_ratio": kv_ratio, "plan_digest": f"{hash(curve.arm) % 16**12:012x}",
        "similarity": {"means": {"key": 0.5, "value": 0.5, "key_aligned": 0.7, "value_aligned": 0.7}}, "seed": 0,
    }  # fmt: skip
    first = {"phases": {"load": 0.1, "plan": 2.0, "convert": 1.0, "evaluate": 1.0}} if rung == 0 else {}
    later = {"train_loss": loss, "tokens_per_second": 1500.0, "checkpoint_path": "/checkpoint"} if rung else {}
    scores = {
        "loss": loss,
        "loss_increase": loss - 2.346,
        "kl": loss - 2.3,
        "step": step,
        "tokens": tokens,
        "rung": rung,
    }
    duration = seconds if before is None or rung == 1 else seconds - before[3]
    return {**facts, **first, **later, **scores, "seconds": seconds}, max(0.1, duration)


def _space(trials: int) -> tuple[Any, tuple[Any, ...]]:
    """The joint space of the demo checkpoint's shape, with learning rates, and a few configured candidates."""
    from attention.checkpoint import Checkpoint
    from orchestrator.config.schema import parse_config
    from orchestrator.search.candidates import candidate_space, named_candidates

    demo = Path(__file__).resolve().parents[2] / "examples" / "stdlib-llama"
    recipes, rates = ["gqa", "asymgqa", "headfold"], [3e-4, 1e-3]
    search = {"recipes": recipes, "kv_ratios": [0.5, 0.25, 0.125], "learning_rates": rates}
    config = parse_config({"name": "simulation", "model": {"path": str(demo)}, "search": search})
    geometry = Checkpoint.open(demo).geometry
    return candidate_space(config, geometry), named_candidates(config, geometry)[:trials]


def _nothing(config: dict[str, Any]) -> None:
    """Do nothing, instead of running a trial."""


def _name(trial: Any) -> str:
    return str(trial.trial_id)


def _resident() -> float:
    """MiB of this process now; where the system does not say, the most that there were."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(measured: Measured) -> str:
    """Driver's CPU seconds per trial, memory, MLflow calls, events per trial, by trials begun; then the whole."""
    lines = [
        "| trials | driver CPU s per trial | resident MiB | MLflow calls per trial | events per trial |",
        "|---|---|---|---|---|",
    ]
    for before, now in itertools.pairwise(measured.windows):
        if (count := now[0] - before[0]) > 0:
            lines.append(
                f"| {now[0]} | {(now[1] - before[1]) / count:.4f} | {now[2]:.0f} | {(now[3] - before[3]) / count:.1f} "
                f"| {(now[4] - before[4]) / count:.1f} |"
            )
    ended = ", ".join(f"{count} {status}" for status, count in sorted(measured.finished.items()))
    lines += [
        "",
        f"{measured.trials} trials ({ended}) on {measured.workers} workers; idle share of the workers "
        f"{measured.idle:.1%}; {measured.calls} MLflow calls, database {measured.database_mib:.0f} MiB",
    ]
    for after in (0, FULL):
        if measured.trials - after >= 4 * measured.window:
            mean, change, error = measured.slope(after)
            begun = f"from trial {after} on" if after else "in total"
            lines.append(
                f"driver CPU per trial {begun} {mean:.4f} s; change from the first to the last window {change:+.4f} s, "
                f"standard error {error:.4f} s"
            )
    return "\n".join(lines)
