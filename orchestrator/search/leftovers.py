"""Removal of files of finished trials that are no longer needed.

Each trial keeps its recipe and plan, its converted weights, and the weights of its last and its
best step, so that any trial can be promoted. With `promotion.keep_weights: finalists`, only
finalists keep weights, and those of the last step only if it is the best. The optimiser's state is
kept only for the trials that a promotion would choose now and continue from it. Which those are is
known early: a trial that ends later only takes ranks away. The weights of a copy are removed too,
since the first trial has the same. Trials that are paused, or that `--resume` retries, keep
everything.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.search.callbacks import DriverCallback
from orchestrator.storage.journal import History, read_history
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import COPY, TrialRecord, front, ranked, worthwhile
from trainers.jobs.best import remove_other_bests
from trainers.jobs.checkpoints import CheckpointStore


def select(trials: Sequence[TrialRecord], how: str, top: int) -> list[TrialRecord]:
    """Return the trials to promote: the `top` best at each budget, or the front."""
    if how == "front":
        return front(trials)
    return [trial for best in worthwhile(trials).values() for trial in best[:top]]


def best_of_recipe(trials: Sequence[TrialRecord], recipe: str) -> dict[float, TrialRecord]:
    """Return the usable trial of a recipe with the lowest held-out loss at each KV ratio."""
    return {
        ratio: best[0] for ratio, best in ranked([t for t in trials if t.recipe == recipe]).items()
    }


def finalists(trials: Sequence[TrialRecord], config: SearchConfig) -> set[str]:
    """Return the trials that the configured promotion would train if no other trial finished.

    Candidates and baselines.
    """
    chosen = select(trials, config.promotion.select, config.promotion.top)
    if config.search.tensor_parallel > 1:  # a KV ratio that saves nothing may later save something
        chosen += [t for best in ranked(trials).values() for t in best[: config.promotion.top]]
    return {t.trial_id for t in (*chosen, *best_of_recipe(trials, config.search.baseline).values())}


def open_trials(folder: SearchFolder, config: SearchConfig) -> set[str]:
    """Return the trials whose weights a search, or its promotion, continues from.

    These are unfinished trials, trials that lost their machines, and finalists.
    """
    history = read_history(folder.journal)
    retryable = {trial for trial, end in history.ends.items() if end["lost"]}
    return {*history.open, *retryable, *finalists(list(history.records.values()), config)}


def check_promotable_weights(folder: SearchFolder, config: SearchConfig) -> None:
    """Raise ConfigError if the promotion would select trials whose weights have been removed.

    That is where a search had another promotion before, with `keep_weights: finalists`.
    """
    history = read_history(folder.journal)
    weights = ("converted", "trained", "trained.best")
    missing = [
        trial_id
        for trial_id in sorted(finalists(list(history.records.values()), config))
        if trial_id in history.ends
        and not any((folder.trial(trial_id) / name).exists() for name in weights)
    ]
    if config.promotion.enabled and missing:
        raise ConfigError(
            f"promotion: as it is now, it selects {', '.join(missing)}, whose weights were removed "
            "(promotion.keep_weights: finalists keeps those that the promotion of that time would "
            "select); resume the search with that promotion, or with promotion.enabled=false"
        )


def remove_leftovers(
    config: SearchConfig,
    folder: SearchFolder,
    history: History,
    done: dict[str, bool] | None = None,
) -> None:
    """Remove the files of finished trials that the search no longer needs.

    Doing it again, or after a kill, does no harm.

    Args:
        done: Processed trials, each with whether it was a finalist then; these are skipped.
    """
    records = history.records
    done = {} if done is None else done
    address = folder.train_address
    staying = finalists(list(records.values()), config)
    for trial_id, end in history.ends.items():
        finalist = trial_id in staying
        if not end["lost"] and done.get(trial_id) != finalist:
            # If the address cannot be reached: the next time, or at the end of the search
            with contextlib.suppress(OSError):
                _remove(folder, records[trial_id], finalist, address)
                if config.promotion.keep_weights == "finalists":
                    _remove_weights(folder, records[trial_id], finalist)
                done[trial_id] = finalist


def _remove(folder: SearchFolder, record: TrialRecord, finalist: bool, address: str | None) -> None:
    root, saved = folder.trial(record.trial_id), record.last.get("checkpoint_path")
    store = CheckpointStore(str(folder.train), record.trial_id, address=address)
    store.keep_only(Path(saved).name if finalist and saved else None)
    remove_other_bests(str(root / "trained"), [dict(record.last)])
    removable = [root / "start"]
    if record.status == COPY:
        removable.append(root / "converted")
    # Training continued from the result of a relaxation's last stage
    relaxed = record.last.get("relaxed_dir")
    removable += [
        stage
        for stage in root.glob("trained.relaxed/stage-*")
        if not relaxed or stage.name != Path(relaxed).parent.name
    ]
    for path in removable:
        shutil.rmtree(path, ignore_errors=True)


def _remove_weights(folder: SearchFolder, record: TrialRecord, finalist: bool) -> None:
    """Remove the weights that no configured promotion starts from."""
    root = folder.trial(record.trial_id)
    last = record.last
    best = record.last.get("best_dir")
    gone = (
        []
        if finalist
        else [root / "converted", root / "trained", root / "trained.best", root / "trained.relaxed"]
    )
    if finalist and last.get("checkpoint_path") and best and Path(best).name != "trained":
        gone.append(root / "trained")  # the training resumes from its checkpoint
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)


class Cleaning(DriverCallback):
    """Removes leftovers while Tune runs, whenever a trial finishes."""

    def __init__(self, config: SearchConfig, folder: SearchFolder, history: History) -> None:
        self.config = config
        self.folder = folder
        self.history = history
        self._ends = 0
        self._done: dict[str, bool] = {}

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        if len(self.history.ends) != self._ends:
            self._ends = len(self.history.ends)
            remove_leftovers(self.config, self.folder, self.history, self._done)
