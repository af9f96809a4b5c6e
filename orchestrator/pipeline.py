"""`headfold search`: prepare → trials under Ray Tune → front → promotion → report."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

from attention.io.files import write_whole
from orchestrator.checkpoints import base_of
from orchestrator.cluster.capacity import Nodes, search_concurrency, total
from orchestrator.cluster.pool_client import pool_of_search
from orchestrator.cluster.ray_internals import on_head
from orchestrator.cluster.session import connected
from orchestrator.config.parsing import dump_yaml
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.promotion.engine_caches import measure_engine_caches
from orchestrator.promotion.promote import promote_trials
from orchestrator.reporting import console
from orchestrator.reporting.comparison import compare_arms
from orchestrator.reporting.figures.caches import caches_figure
from orchestrator.reporting.figures.drawing import save_png
from orchestrator.reporting.figures.search import front_figure, rungs_figure
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.reporting.status import search_seconds
from orchestrator.search.estimate import announce, check_disk
from orchestrator.search.leftovers import check_promotable_weights, open_trials
from orchestrator.search.outcome import SearchOutcome, print_outcome
from orchestrator.search.prepare import (
    check_texts,
    measure_increases,
    prepare_original,
    run_search_phases,
    trial_context,
)
from orchestrator.search.setup import open_models
from orchestrator.search.trials.context import SearchControl, SearchSession
from orchestrator.search.tune_run import run_trials
from orchestrator.search.validation import Prepared, check_epochs, check_gpus, validate_search
from orchestrator.search.waiting import report_waiting
from orchestrator.storage import records
from orchestrator.storage.journal import Journal, check_format, load_trials
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.lock import SearchLock
from orchestrator.storage.manifest import SyncSide
from orchestrator.storage.mirror import is_remote, mirrored
from orchestrator.storage.paths import SearchFolder, in_ray_job, storage_path
from orchestrator.storage.promotion_record import PromotionRecord
from orchestrator.storage.records import best_per_budget, waits_for
from orchestrator.storage.trust import check_origin
from orchestrator.tracking.errors import redact
from orchestrator.tracking.metrics import best_point, point
from orchestrator.tracking.run_metadata import search_note, shared_metadata
from orchestrator.tracking.runs import NOTE, Tracker, default_uri
from orchestrator.tracking.sync import MlflowSync, TrackedRun, parent_run

_PACKAGES = (
    "torch",
    "transformers",
    "ray",
    "deepspeed",
    "optuna",
    "mlflow",
    "datasets",
    "numpy",
    "headfold",
)
SECTIONS_OF_TRIALS = ("name", "model", "data", "search", "rungs", "train")


def search(
    config: SearchConfig,
    *,
    resume: bool | str = False,
    sync_from: SyncSide | None = None,
    verbose: bool = False,
) -> SearchOutcome:
    """Run a search from its configuration to its report.

    All errors that a user can correct are found before the first process of a trial starts; raises
    ConfigError, DataError or TrackingError. A trial that fails does not end the search. Interrupted
    by Ctrl-C, it keeps its state: run it again with `resume`, which resumes the newest search of
    the name, or the one whose folder it names. `sync_from`: which copy to resume from where the
    address of the storage and its working folder have both changed. `verbose`: whether the estimate
    lists the parts of its memory.
    """
    storage = storage_path(config.storage)
    named = Path(urlparse(config.storage).path).expanduser()
    if in_ray_job() and not is_remote(config.storage) and not named.is_absolute():
        print(
            f"storage {config.storage!r} is relative and this is a Ray job: "
            f"results go to {storage}",
            flush=True,
        )
        config = config.model_copy(update={"storage": str(storage)})
    config = open_models(config)
    with mirrored(config.storage, storage, side=sync_from) as mirror:
        folder = _search_to_resume(config, storage, resume)
        stored = None if folder is None else _stored_config(folder)
        if stored is not None:
            config = config.begun_as(stored)
        if folder is not None and mirror is not None:
            mirror.fetch_search(folder.root.name, open_trials(folder, config))
        prepared = validate_search(config)
        if stored is None or stored.promotion != config.promotion:  # all others stay as they were
            check_epochs(config, (each.recipe for each in prepared.problem.named))
            check_gpus(config)
        if folder is not None:  # an earlier resumption may have had another promotion
            check_promotable_weights(folder, config)
        uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
        opened = Tracker.open(uri, config.tracking.experiment, storage) if folder is None else None
        with connected() as nodes:
            parallel = search_concurrency(config, nodes)
            if folder is None:
                check_disk(prepared.setup, parallel)
            prepared.texts.make_all()
            if folder is not None and folder.original.exists():
                check_texts(prepared, read_json(folder.original))
            earlier = None  # before the lock is taken: its last heartbeat says when a driver died
            if folder is not None:
                earlier = search_seconds(folder, folder.read_state(), datetime.now(UTC))
            folder = folder or _new_folder(config, storage)
            with SearchLock(folder.lock).acquire(f"search {folder.root.name!r}") as lock:
                folder.sweep()
                if stored is not None:
                    _save_changes(folder, config, stored)
                _save_start(config, folder, uri, nodes, parallel, earlier)
                if prepared.reused:
                    splits = ", ".join(prepared.reused)
                    print(
                        f"texts    {splits}: tokenised already, in {prepared.texts.cache}",
                        flush=True,
                    )
                connect = partial(Tracker.open, uri, config.tracking.experiment, storage)
                shared = shared_metadata(
                    config, folder, prepared.texts.folders, base_of(config.model.path)["base"]
                )
                mlflow = MlflowSync(
                    connect, _search_run(config, folder, records.RUNNING), opened, shared
                )
                _save_run_id(folder, mlflow)
                announce(prepared.setup, folder, parallel, verbose=verbose)
                control = SearchControl.of(folder, lock, mirror)
                outcome = _run_to_end(config, prepared, folder, mlflow, parallel, control)
    print_outcome(outcome)
    return outcome


# ---- which search --------------------------------------------------------------------------------


def _search_to_resume(
    config: SearchConfig, storage: Path, resume: bool | str
) -> SearchFolder | None:
    """Return the search to resume; None for a new one.

    A job that is submitted again resumes its own search: same name, same settings of the trials,
    not ended.

    Raises:
        ConfigError: If another driver runs the search of that name, or if there is none to resume,
            or with other settings.
    """
    if not resume:
        return _unended_search(config, storage)
    named = isinstance(resume, str)
    folder = (
        SearchFolder.named(storage, resume) if named else SearchFolder.newest(storage, config.name)
    )
    check_format(folder.journal)
    if others := [f.root.name for f in SearchFolder.unended(storage, config.name) if f != folder]:
        print(
            f"note: continues {folder.root.name}; also unfinished: {', '.join(others)} "
            "(--resume NAME)",
            flush=True,
        )
    if changed := _changed_sections(folder, config):
        raise ConfigError(
            f"--resume: section {changed[0]!r} differs from the search in {folder.root}; resume "
            "with the same settings, or start a new search without --resume"
        )
    check_origin(folder)
    return folder


def _unended_search(config: SearchConfig, storage: Path) -> SearchFolder | None:
    """Return the search that a resubmitted job resumes; else print those that have not ended."""
    unended = SearchFolder.unended(storage, config.name)
    newest = SearchFolder.newest(storage, config.name) if unended else None
    if newest is not None and newest in unended:
        SearchLock(newest.lock).check_free(f"search {newest.root.name!r}")
        if in_ray_job() and newest.readable and not _changed_sections(newest, config):
            print(
                f"continues the unfinished search of this name: {newest.root}",
                flush=True,
            )
            check_origin(newest)
            return newest
    for folder in unended:
        how = f"the same command with --resume {folder.root.name} continues it"
        print(f"note: {folder.root} is unfinished; {how}", flush=True)
    return None


def _new_folder(config: SearchConfig, storage: Path) -> SearchFolder:
    folder = SearchFolder.fresh(storage, config.name)
    Journal(folder.journal).begin(
        len(config.rungs.steps)
    )  # first: a search.yaml without it is of a former version
    write_json(folder.versions, {name: _version(name) for name in _PACKAGES})
    write_whole(folder.snapshot, dump_yaml(_config_record(config)))
    return folder


def _save_changes(folder: SearchFolder, config: SearchConfig, stored: SearchConfig) -> None:
    """Save what a resumption may set otherwise, by which `headfold promote` goes later.

    Args:
        stored: The configuration so far. Weights that its `keep_weights: finalists` has removed
            stay away; what says which they were stays too, unless the resumption has checked that
            those of its promotion are there.
    """
    promotion, before = config.promotion, stored.promotion
    removed = before.keep_weights == "finalists"
    if removed and not (promotion.enabled and promotion.keep_weights == before.keep_weights):
        rules = {name: getattr(before, name) for name in ("keep_weights", "select", "top")}
        promotion = promotion.model_copy(update=rules)
    same = {"promotion": promotion, "storage": stored.storage}
    record = _config_record(config.model_copy(update=same))
    if record != _config_record(stored):
        write_whole(folder.snapshot, dump_yaml(record))


def _config_record(config: SearchConfig) -> dict[str, Any]:
    """Return the configuration as it is saved: without a password."""
    record = config.model_dump(mode="json")
    if config.tracking.uri:
        record["tracking"]["uri"] = redact(config.tracking.uri)
    return record


def _changed_sections(folder: SearchFolder, config: SearchConfig) -> list[str]:
    """Return the sections of the trials in which a search in `folder` differs from `config`."""
    stored = _stored_config(folder)
    before, record = (
        _config_record(each) | {"train": each.train.identity()}
        for each in (stored, config.begun_as(stored))
    )
    return [name for name in SECTIONS_OF_TRIALS if before[name] != record[name]]


def _stored_config(folder: SearchFolder) -> SearchConfig:
    """Return the configuration that a search was begun with.

    It is read as one, so that a key which is newer than the snapshot has its default there.
    """
    return parse_config(folder.stored(), where=str(folder.snapshot))


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


# ---- its run in MLflow, and its state ------------------------------------------------------------


def _save_start(
    config: SearchConfig,
    folder: SearchFolder,
    uri: str | None,
    nodes: Sequence[Nodes],
    parallel: int,
    earlier: float | None,
) -> None:
    """Save when and how the search began, and print its paths.

    A state that cannot be read is written anew.

    Args:
        config: Of the search.
        folder: Of the search.
        uri: Address of the MLflow store; None for that in the storage.
        nodes: The cluster.
        parallel: Trials at a time.
        earlier: Seconds of the drivers before this one; None for the first.
    """
    address = redact(uri or default_uri(folder.storage))
    state = folder.read_state()
    if not {"started", "tracking"} <= set(state):
        command = redact(shlex.join(["headfold", *sys.argv[1:]]))
        state = {"started": _iso(folder.started or time.time()), "command": command}
    for key in ("ended", "resumed"):
        state.pop(key, None)
    before = {} if earlier is None else {"seconds": earlier}
    write_json(folder.state, {**state, **before, "tracking": address})
    print(f"search   {folder.root}")
    print(f"MLflow   {address}")
    print(
        f"cluster  {total(nodes, 'CPU'):g} CPU, {total(nodes, 'GPU'):g} GPU: {parallel} trial(s) "
        f"at a time, {config.train.num_workers} worker(s) each",
        flush=True,
    )
    if not uri and not on_head():
        print(
            "note: this driver is not on the head of the cluster, so that an MLflow there is not "
            "used; for one that every node reaches set tracking.uri, or submit the job without "
            "--entrypoint-num-cpus, --entrypoint-num-gpus and --entrypoint-resources, and its "
            "driver runs on the head",
            flush=True,
        )


def _search_run(config: SearchConfig, folder: SearchFolder, status: str) -> TrackedRun:
    """Return the run of the search itself for MLflow, as far as it has come."""
    state, points = read_json(folder.state), []
    if folder.original.exists():
        original = read_json(folder.original)
        began = datetime.fromisoformat(state["started"]).timestamp()
        measured = {f"original_{name}": original[name] for name in ("loss", "kv_bytes_per_token")}
        points.append(point(measured, 0, began))
        for ratio, trial in best_per_budget(load_trials(folder.root)).items():
            points.append(
                best_point({ratio: trial.loss}, original["loss"], 0, trial.last["timestamp"])
            )
    pictures = [folder.root / name for name in ("front.png", "rungs.png", "caches.png")]
    files = [folder.snapshot, folder.versions, *pictures, folder.report]
    if status != records.RUNNING:
        files.append(folder.journal)
    run = parent_run(
        folder.root,
        waits_for=waits_for(folder.waiting),
        status=status,
        run_id=state.get("parent_run"),
        started=datetime.fromisoformat(state["started"]).timestamp(),
        params=_config_record(config),
        points=points,
        files=files,
    )
    return replace(run, tags=run.tags | {NOTE: search_note(config, folder)})


def _iso(seconds: float) -> str:
    """Return a time in seconds since 1970 as ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _save_run_id(folder: SearchFolder, mlflow: MlflowSync) -> None:
    """Save the id of the search's run, by which the report and a copy of the folder find it."""
    if mlflow.parent_id is not None:
        write_json(folder.state, read_json(folder.state) | {"parent_run": mlflow.parent_id})


def _run_to_end(
    config: SearchConfig,
    prepared: Prepared,
    folder: SearchFolder,
    mlflow: MlflowSync,
    parallel: int,
    control: SearchControl,
) -> SearchOutcome:
    """Run, and save the end in any case; also on SIGTERM, which Ray turns into SystemExit.

    A search that another driver has taken over is that one's to save.
    """
    started = time.time()
    status = records.FAILED
    ended = {}
    state = read_json(folder.state)
    if "seconds" in state:
        write_json(folder.state, state | {"resumed": _iso(started)})
    try:
        with report_waiting(
            config,
            folder,
            mlflow,
            partial(_search_run, config, folder, records.RUNNING),
            control.promoting.is_set,
        ):
            outcome = _run(config, prepared, folder, mlflow, parallel, control)
        status = outcome.status
        ended = {"ended": status} if status != records.KILLED else {}
        return outcome
    except (KeyboardInterrupt, SystemExit):
        status = records.KILLED
        how = f"continue with the same command and --resume {folder.root.name}"
        print(f"\ninterrupted; {how} (state is in {folder.root})", file=sys.stderr)
        raise
    finally:
        try:
            control.check()
            state = read_json(folder.state)
            state.pop("resumed", None)
            state |= {"seconds": state.get("seconds", 0.0) + time.time() - started, **ended}
            write_json(folder.state, state)
            mlflow.put(_search_run(config, folder, status))
            if not mlflow.flush():
                print(
                    f"MLflow at {state['tracking']} is away: {mlflow.waiting} runs are not up to "
                    "date there; the same command with --resume brings them up to date",
                    file=sys.stderr,
                )
            _save_run_id(folder, mlflow)
        except OSError as error:  # a full disk, already reported: do not hide that error
            print(f"the end of the search could not be written down: {error}", file=sys.stderr)


# ---- its steps -----------------------------------------------------------------------------------


def _run(
    config: SearchConfig,
    prepared: Prepared,
    folder: SearchFolder,
    mlflow: MlflowSync,
    parallel: int,
    control: SearchControl,
) -> SearchOutcome:
    original = prepare_original(config, prepared, folder)
    context = trial_context(config, prepared, folder, original)
    run_search_phases(config, prepared, context)
    measure_increases(config, prepared, context)
    outcome = SearchOutcome(
        folder.root, read_json(folder.state)["tracking"], original, [], config.search.baseline
    )
    with pool_of_search(config, folder, original.get("parameters", 0)) as pool:
        context = replace(context, pool=pool)
        session = SearchSession(config, folder, context, mlflow, parallel, control)
        finished = run_trials(session, prepared)
        folder.sweep()  # what a trial had begun to write when its node went
        outcome.trials = load_trials(folder.root)
        outcome.interrupted = not finished
        if outcome.front:
            save_png(front_figure(outcome.trials, original), folder.root / "front.png")
            save_png(rungs_figure(outcome.trials, original), folder.root / "rungs.png")
        mlflow.put(_search_run(config, folder, records.RUNNING))
        console.print_trials(outcome.trials, original)
        console.print_comparison(compare_arms(outcome.trials, original))
        if not outcome.interrupted and outcome.front and config.promotion.enabled:
            outcome.promotion = promote_trials(session)
        if not outcome.interrupted and outcome.front:
            promotion = cast(PromotionRecord, outcome.promotion) if outcome.promotion else None
            outcome.caches = measure_engine_caches(session, outcome.trials, promotion)
            if (figure := caches_figure(outcome.caches)) is not None:
                save_png(figure, folder.root / "caches.png")
    outcome.report = write_report(folder.root)["report"]
    return outcome
