"""The trials of a search under Ray Tune."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ray import tune
from ray.tune import Callback

from attention.base.progress import stage
from orchestrator.cluster.capacity import ConcurrencyLimit
from orchestrator.cluster.placement import Demand, task_options
from orchestrator.cluster.ray_tasks import on_cluster
from orchestrator.cluster.session import last_error
from orchestrator.config.schema import SearchConfig
from orchestrator.search.ahead import HoldNodes, PlanAhead
from orchestrator.search.callbacks import SearchLog
from orchestrator.search.candidates import Candidate
from orchestrator.search.duplicates import CopyingSearcher
from orchestrator.search.leftovers import Cleaning, remove_leftovers
from orchestrator.search.prepare import head_similarities
from orchestrator.search.resume import (
    JournaledScheduler,
    JournaledSearch,
    disk_failed,
    replay,
    settle,
)
from orchestrator.search.schedulers import RungProblem, make_scheduler
from orchestrator.search.searchers import make_searcher
from orchestrator.search.trials.context import SearchSession
from orchestrator.search.trials.conversions import ConversionLibrary
from orchestrator.search.trials.trial import run_trial, trained
from orchestrator.search.validation import Prepared
from orchestrator.storage.journal import INTERRUPT, Journal, JournalError, unwritable
from orchestrator.storage.json_files import read_json
from orchestrator.tracking.wandb_trials import wandb_callback
from orchestrator.training.run import checkpoint_step


def run_trials(session: SearchSession, prepared: Prepared) -> bool:
    """Run the trials, or continue those of an interrupted search.

    The results are in the folder's journal. Ctrl-C stops Tune in an orderly way: the open trials
    are marked as killed.

    Returns:
        Whether all trials have ended, and the search was not interrupted.

    Raises:
        JournalError: If the journal cannot be written, as on a full disk; everything up to then
            is kept.
    """
    config, folder = session.config, session.folder
    journal = Journal(folder.journal, session.control.check)
    history = journal.history
    # Tune pickles the searcher into the search's folder: nothing in it may contain the
    # configuration, whose tracking address may have a password
    options = task_options(config)
    similar = partial(
        on_cluster, options, "similarities of heads", head_similarities, session.context
    )
    problem = replace(prepared.problem, similarities=similar)
    searcher = make_searcher(config.search.searcher, problem)
    log = SearchLog(journal, session.mlflow, searcher.total, session.context.original_loss)
    rungs = config.rungs
    rung_problem = RungProblem(
        len(rungs.steps),
        rungs.reduction_factor,
        (config.search.baseline,),
        config.objectives,
        searcher.total,
    )
    scheduler = make_scheduler(
        rungs.scheduler if rungs.stop else "none",
        rung_problem,
        rungs.params if rungs.stop else None,
    )
    copying = CopyingSearcher(searcher, scheduler.copies)
    scheduler.slots.capacity = ConcurrencyLimit(
        Demand.of(config), config.resources.max_concurrent
    ).trials
    settle(journal)
    remove_leftovers(config, folder, history)
    log.catch_up()
    if len(history.configs) == searcher.total and not history.open:
        ConversionLibrary.of_search(folder.root).remove()
        return True  # resumed, and only the promotion remains
    replay(history, copying, scheduler)
    decided = JournaledScheduler(scheduler, journal)
    _quiet(session.parallel)
    reached = partial(checkpoint_step, str(folder.train), session.context.checkpoint_address)
    ahead = PlanAhead(session, copying, history, prepared.problem.named)
    nodes = HoldNodes(session, history, log.expected)
    callbacks = [log, Cleaning(config, folder, history), ahead, nodes]
    if config.tracking.wandb is not None:
        identity = read_json(folder.origin)["id"][:8]
        callbacks.append(wandb_callback(config.tracking.wandb, folder.root.name, identity))
    search = JournaledSearch(copying, decided, journal, reached)
    tuner = _tuner(session, search, decided, callbacks, log.expected)
    done, total = log.rungs
    try:
        with stage("trials", total, "rungs", start=done) as log.stage:
            log.stage.detail = log.planning
            run_tuner(tuner)
    except Exception as error:
        if journal.failed is None and not disk_failed(error):
            raise
        with contextlib.suppress(OSError, JournalError):
            log.on_experiment_end([])
        journal.failed = journal.failed or f"{folder.root}: {unwritable(last_error(str(error)))}"
    finally:
        for callback in (ahead, nodes):
            callback.on_experiment_end([])
    # Once more: workers that were stopped may have been writing
    remove_leftovers(config, folder, history)
    if journal.failed is not None:
        raise JournalError(journal.failed)
    if not search.is_finished() and not history.interrupted:
        journal.append(INTERRUPT)  # between two trials: none was open to be marked
    return not history.interrupted


def run_tuner(tuner: tune.Tuner) -> tune.ResultGrid:
    """Run Tune, and restore the signal handlers afterwards.

    Tune leaves its own: the next Ctrl-C, or the interruption of a promotion that waits for nodes in
    vain, would only print Tune's message and not interrupt anything.
    """
    if threading.current_thread() is not threading.main_thread():  # where Tune replaces none
        return tuner.fit()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    try:
        return tuner.fit()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _tuner(
    session: SearchSession,
    search: JournaledSearch,
    scheduler: JournaledScheduler,
    callbacks: list[Callback],
    trials: int,
) -> Any:
    demand = Demand.of(session.config)
    return tune.Tuner(
        tune.with_resources(
            tune.with_parameters(run_trial, context=session.context),
            partial(_trial_resources, demand, session.context.rungs),
        ),
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=scheduler,
            num_samples=trials,
            reuse_actors=not stops_in_training(
                session.config, pooled=session.context.pool is not None
            ),
            trial_name_creator=lambda trial: trial.trial_id,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="search", storage_path=str(session.folder.tune), callbacks=callbacks, verbose=0
        ),
    )


def _trial_resources(
    demand: Demand, rungs: Sequence[int], config: Mapping[str, Any]
) -> tune.PlacementGroupFactory:
    """Return the resources of a trial's own process for its whole duration.

    They are all that planning needs if no training follows; otherwise no GPU, which would be idle
    while the workers train.
    """
    trains = trained(Candidate.from_config(config), rungs)
    return tune.PlacementGroupFactory(
        [{"CPU": demand.process_cpus} if trains else demand.task.bundle]
    )


def stops_in_training(config: SearchConfig, *, pooled: bool) -> bool:
    """Whether a trial may be stopped while its workers train.

    Else its process, with torch and the original model loaded, takes the next trial. A trial that
    still waits for workers must not be stopped: Tune gives it two seconds to end, then silently
    drops the *next* trial [ray 2.60].

    Args:
        config: The configuration.
        pooled: Whether the trial's workers are those of a pool, which a trial leaves at once. Else
            a loss that is not finite, which stops a trial at any rung, may stop it within.
    """
    rungs = config.rungs
    if not pooled and len(rungs.steps) > 1:
        return True
    return rungs.stop and len(rungs.steps) > 2


def _quiet(parallel: int) -> None:
    """Turn off Tune's log, progress and snapshots: ours, and the journal, replace them."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "3600")
    # Nodes that are to be added are requested at once
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(parallel)
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # Errors of trials are reported once, at the end, with the path of their trace.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
