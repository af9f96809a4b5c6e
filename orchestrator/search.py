"""`headfold search`: prepare → trials under Ray Tune → front → promotion → report."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from orchestrator import results, tables
from orchestrator.base import prepare_base
from orchestrator.cluster import Demand, concurrency, connected
from orchestrator.config import ConfigError, SearchConfig
from orchestrator.folders import SearchFolder, in_ray_job, storage_path
from orchestrator.results import TrialRecord, best_per_budget, front, load_trials, read_json, write_json
from orchestrator.tracking import Tracker, redact
from orchestrator.trial import TrialContext
from orchestrator.validate import Prepared, validate_search

PACKAGES = ("torch", "transformers", "ray", "deepspeed", "optuna", "mlflow", "datasets", "numpy", "headfold")
SECTIONS_OF_TRIALS = ("name", "model", "data", "search", "rungs", "train")
INTERRUPTED = 130


@dataclass
class SearchOutcome:
    """What came out of a search.

    `exit_code`: 130 if interrupted; 1 if no trial gave a result, the baseline failed at a budget (nothing can be
    compared there), or a step of the promotion failed; else 0. Other failed trials are told, and the search stands.
    """

    folder: Path
    tracking: str
    base: dict[str, Any]
    trials: list[TrialRecord]
    baseline: str
    promotion: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    report: str | None = None

    @property
    def front(self) -> list[TrialRecord]:
        return front(self.trials)

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return INTERRUPTED
        compared = {t.kv_ratio for t in self.trials if t.usable and t.recipe == self.baseline}
        complete = compared == {t.kv_ratio for t in self.trials}
        return 0 if self.front and complete and not self.promotion.get("failed") else 1

    @property
    def status(self) -> str:
        """As which state the parent run ends."""
        return {0: results.DONE, INTERRUPTED: results.KILLED}.get(self.exit_code, results.FAILED)

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "tracking": self.tracking,
            "base": self.base,
            "loss_base": self.base.get("loss"),
            "trials": [asdict(t) for t in self.trials],
            "front": [t.trial_id for t in self.front],
            "best_per_budget": {f"{b:g}": t.trial_id for b, t in best_per_budget(self.trials).items()},
            "promotion": self.promotion,
            "interrupted": self.interrupted,
            "report": self.report,
        }


def search(config: SearchConfig, *, resume: bool = False) -> SearchOutcome:
    """Run a search from its configuration to its report.

    Everything that a user can get wrong is checked before the first process of a trial starts; raises ConfigError,
    DataError or TrackingError. A trial that fails does not end the search. Interrupted by Ctrl-C, it keeps its state:
    run it again with `resume`.
    """
    if in_ray_job():
        config = _at_home(config)
    prepared = validate_search(config)
    storage = storage_path(config.storage)
    with connected() as resources:
        parallel = concurrency(resources, Demand.of(config), config.resources.max_concurrent)
        uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
        tracker = Tracker.open(uri, config.tracking.experiment, storage)
        folder = _folder(config, storage, resume)
        run = _start(config, folder, tracker, resources, parallel)
        with _closing_run(tracker, run, folder) as outcome_status:
            outcome = _run(config, prepared, folder, tracker, run, parallel)
            outcome_status.append(outcome.status)
    tables.print_outcome(outcome)
    return outcome


def _at_home(config: SearchConfig) -> SearchConfig:
    """In a Ray job the working folder is Ray's and vanishes: relative storage goes to the home folder."""
    path = storage_path(config.storage)
    if str(path) != config.storage:
        print(f"storage {config.storage!r} is relative and this is a Ray job: results go to {path}", flush=True)
    return config.model_copy(update={"storage": str(path)})


def _folder(config: SearchConfig, storage: Path, resume: bool) -> SearchFolder:
    """The folder of a new search, or of the one to resume. Raises ConfigError if the trials' settings have changed."""
    record = config.model_dump(mode="json")
    if config.tracking.uri:
        record["tracking"]["uri"] = redact(config.tracking.uri)
    if not resume:
        folder = SearchFolder.fresh(storage, config.name)
        folder.snapshot.write_text(yaml.safe_dump(record, sort_keys=False), encoding="utf-8")
        write_json(folder.versions, {name: _version(name) for name in PACKAGES})
        return folder
    folder = SearchFolder.newest(storage, config.name)
    before = yaml.safe_load(folder.snapshot.read_text(encoding="utf-8"))
    changed = [name for name in SECTIONS_OF_TRIALS if before.get(name) != record[name]]
    if changed:
        raise ConfigError(
            f"--resume: section {changed[0]!r} differs from the search in {folder.root}; resume with the same "
            "settings, or start a new search without --resume"
        )
    return folder


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _start(
    config: SearchConfig, folder: SearchFolder, tracker: Tracker, resources: dict[str, float], parallel: int
) -> str:
    """The MLflow parent run of the search, new or taken up again; says where things lie."""
    state = read_json(folder.state) if folder.state.exists() else {}
    if state.get("parent_run"):
        tracker.resume(state["parent_run"])
    else:
        tags = {"headfold.kind": "search", "headfold.folder": folder.root}
        state["parent_run"] = tracker.start(folder.root.name, tags=tags)
        state["started"] = datetime.now(UTC).isoformat(timespec="seconds")
        state["command"] = redact(shlex.join(["headfold", *sys.argv[1:]]))
        state["tracking"] = tracker.address
        tracker.params(state["parent_run"], config.model_dump(mode="json"))
        tracker.file(state["parent_run"], folder.snapshot)
        write_json(folder.state, state)
    print(f"search   {folder.root}")
    print(f"MLflow   {tracker.address}")
    print(
        f"cluster  {resources['CPU']:g} CPU, {resources['GPU']:g} GPU: {parallel} trial(s) at a time, "
        f"{config.train.num_workers} worker(s) each",
        flush=True,
    )
    return state["parent_run"]


@contextlib.contextmanager
def _closing_run(tracker: Tracker, run: str, folder: SearchFolder) -> Iterator[list[str]]:
    """End the parent run whatever happens; also on SIGTERM, which Ray turns into SystemExit."""
    status: list[str] = []
    started = time.time()
    try:
        yield status
    except (KeyboardInterrupt, SystemExit):
        status[:] = [results.KILLED]
        print(
            f"\ninterrupted; continue with the same command and --resume (state is in {folder.root})", file=sys.stderr
        )
        raise
    except BaseException:
        status[:] = [results.FAILED]
        raise
    finally:
        state = read_json(folder.state)
        write_json(folder.state, state | {"seconds": state.get("seconds", 0.0) + time.time() - started})
        tracker.end(run, status[-1] if status else results.FAILED)


def _run(
    config: SearchConfig, prepared: Prepared, folder: SearchFolder, tracker: Tracker, run: str, parallel: int
) -> SearchOutcome:
    base = prepare_base(config, prepared, folder)
    tracker.metrics(run, {"loss_base": base["loss"], "kv_bytes_per_token_base": base["kv_bytes_per_token"]})
    context = trial_context(config, prepared, folder, base)
    outcome = SearchOutcome(folder.root, tracker.address, base, [], config.search.baseline)
    from orchestrator.tuning import run_trials

    run_trials(config, prepared, context, folder, tracker, run, parallel)
    outcome.trials = load_trials(folder.trials_file)
    outcome.interrupted = any(t.status == results.KILLED for t in outcome.trials) or not outcome.trials
    _log_front(outcome, folder, tracker, run)
    tables.print_trials(outcome.trials, base)
    if not outcome.interrupted and outcome.front and config.promotion.enabled:
        from orchestrator.promotion import promote

        outcome.promotion = promote(config, context, folder, tracker, run, parallel)
    outcome.report = _write_report(folder, tracker, run)
    return outcome


def trial_context(config: SearchConfig, prepared: Prepared, folder: SearchFolder, base: dict[str, Any]) -> TrialContext:
    """What all trials share."""
    return TrialContext(
        folder=str(folder.root),
        model=base["model"],
        dtype=config.model.dtype,
        train_file=str(prepared.train_file),
        eval_file=str(prepared.eval_file),
        calibration_file=str(prepared.calibration_file),
        calibration_cache=str(prepared.cache / "calibration"),
        rungs=tuple(config.rungs.steps),
        reduction_factor=config.rungs.reduction_factor,
        train=config.train.model_dump(mode="json"),
        base_loss=base["loss"],
        seed=config.search.seed,
        device="cuda" if config.resources.driver_gpus else "cpu",
    )


def _log_front(outcome: SearchOutcome, folder: SearchFolder, tracker: Tracker, run: str) -> None:
    """The front in the parent run: numbers, table, picture."""
    from orchestrator import figures

    for budget, trial in best_per_budget(outcome.trials).items():
        rise = trial.loss - outcome.base["loss"]
        tracker.metrics(run, {f"best_loss_kv{budget:.3g}": trial.loss, f"best_rise_kv{budget:.3g}": rise})
    if folder.trials_file.exists():
        tracker.file(run, folder.trials_file)
    if outcome.front:
        for name, figure in (
            ("front.png", figures.front_figure(outcome.trials, outcome.base)),
            ("rungs.png", figures.rungs_figure(outcome.trials, outcome.base)),
        ):
            tracker.file(run, figures.save_png(figure, folder.root / name))


def _write_report(folder: SearchFolder, tracker: Tracker, run: str) -> str:
    from orchestrator.report import write_report

    path = write_report(folder.root)["report"]
    tracker.file(run, path)
    return path
