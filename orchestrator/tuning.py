"""The trials of a search under Ray Tune."""

from __future__ import annotations

import logging
import os
from typing import Any

from orchestrator import results
from orchestrator.callbacks import SearchLog
from orchestrator.config import SearchConfig
from orchestrator.folders import SearchFolder
from orchestrator.results import load_trials
from orchestrator.schedulers import BudgetHalving
from orchestrator.searchers import SEARCHERS
from orchestrator.tracking import Tracker
from orchestrator.trial import TrialContext, run_trial
from orchestrator.validate import Prepared

NAME = "search"


def run_trials(
    config: SearchConfig,
    prepared: Prepared,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    parent_run: str,
    parallel: int,
) -> None:
    """Run the trials, or go on with those of an interrupted search. The results lie in the folder's `trials.json`.

    Ctrl-C stops Tune in an orderly way: its state is saved and the open trials are marked as killed.
    """
    records = load_trials(folder.trials_file)
    if len(records) == prepared.problem.total and all(r.status in (results.DONE, results.STOPPED) for r in records):
        return  # resumed, and only the promotion is left to do
    _quiet()
    from ray import tune

    needed = {"CPU": config.resources.driver_cpus}
    if config.resources.driver_gpus:
        needed["GPU"] = config.resources.driver_gpus
    trainable = tune.with_resources(tune.with_parameters(run_trial, context=context), needed)
    state = folder.tune / NAME
    if tune.Tuner.can_restore(str(state)):
        # Trials that were running or had failed start afresh; their Ray Train runs resume from their own checkpoints.
        tuner = tune.Tuner.restore(
            str(state), trainable=trainable, resume_unfinished=True, restart_errored=True, resume_errored=False
        )
        tuner.fit()
        return
    log = SearchLog(
        folder.trials_file, tracker, parent_run, prepared.problem.total, len(context.rungs), context.base_loss
    )
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=SEARCHERS.get(config.search.searcher)(prepared.problem),
            scheduler=BudgetHalving(len(context.rungs), context.reduction_factor, (config.search.baseline,)),
            num_samples=prepared.problem.total,
            max_concurrent_trials=parallel,
            # A process that has loaded torch and the untouched model takes the next trial: seconds saved each time.
            reuse_actors=True,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=NAME,
            storage_path=str(folder.tune),
            callbacks=[log],
            failure_config=tune.FailureConfig(max_failures=0),
            verbose=0,
        ),
    )
    tuner.fit()


def _name(trial: Any) -> str:
    return str(trial.trial_id)


def _quiet() -> None:
    """Our own log and progress line replace Tune's; its state is saved often enough to be resumed."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "5")
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # Errors of trials are told once, at the end, with the place of their trace.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
