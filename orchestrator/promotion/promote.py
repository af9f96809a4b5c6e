"""Promotion: chosen trials go on to the full training, must pass a gate, and become registered model versions.

The state of every step lies in `promotion.json`, so a promotion that was killed goes on where it stood: a finished
training is not repeated, a half-done one resumes from its own checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from attention.base.messages import near
from attention.ratios import percent
from orchestrator.checkpoints import base_of
from orchestrator.cluster.pool_client import pool_of_search
from orchestrator.cluster.room import room_for
from orchestrator.cluster.session import connected
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.promotion.state import BASELINE, PROMOTED, Entry, PromoteOutcome, PromotionState
from orchestrator.promotion.steps import PromotionSteps
from orchestrator.reporting import console
from orchestrator.search.leftovers import best_of_recipe, finalists, select
from orchestrator.search.prepare import trial_context
from orchestrator.search.trials.context import SearchSession
from orchestrator.search.validation import open_models, validate_search
from orchestrator.search.waiting import waiting_told
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json
from orchestrator.storage.lock import SearchLock
from orchestrator.storage.mirror import mirrored
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord, waits_for
from orchestrator.storage.trust import warn_of_pickles
from orchestrator.tracking.run_metadata import shared_metadata
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, TrackedRun, parent_run


def promote_search(search: str | Path, *, trials: Iterable[str] = (), top: int | None = None) -> PromoteOutcome:
    """`headfold promote`: promote from the folder of a search that has run.

    Raises ConfigError if the folder is none, a trial id is unknown or of a baseline, or the cluster is too small.
    """
    folder, config, chosen = asked(search, trials, top)
    config = open_models(config)
    prepared = validate_search(config)
    with (
        mirrored(folder.address or str(folder.storage), folder.storage),
        SearchLock(folder.lock).acquire(f"search {folder.root.name!r}"),
        connected() as nodes,
    ):
        parallel = room_for(config, nodes)
        prepared.texts.make_all()
        original = read_json(folder.original)
        context = trial_context(config, prepared, folder, original)
        connect = partial(Tracker.open, config.tracking.uri, config.tracking.experiment, folder.storage)
        shared = shared_metadata(config, folder, prepared.texts.folders, base_of(original["model"])["base"])
        mlflow = MlflowSync(connect, _parent(folder), shared=shared)
        reused = pool_of_search(config, folder, original.get("parameters", 0))
        with waiting_told(config, folder, mlflow, partial(_parent, folder)), reused as pool:
            session = SearchSession(config, folder, replace(context, pool=pool), mlflow, parallel)
            promotion = promote(session, chosen)
        mlflow.flush()
    console.print_promotion(promotion)
    console.print_promoted(promotion)
    return PromoteOutcome(folder.root, promotion, tuple(trial.trial_id for trial in chosen))


def asked(
    search: str | Path, trials: Iterable[str], top: int | None
) -> tuple[SearchFolder, SearchConfig, list[TrialRecord]]:
    """The search, its configuration, and the trials of it that are asked for. Raises ConfigError."""
    folder = SearchFolder.existing(search)
    warn_of_pickles(folder)
    config = _stored_config(folder)
    records = load_trials(folder.root)
    _check_ended(folder, records)
    return folder, config, _chosen(records, list(trials), top, config)


def _parent(folder: SearchFolder) -> TrackedRun:
    """The run of the search, whose status stays as it is."""
    run_id, waits = read_json(folder.state).get("parent_run"), waits_for(folder.waiting)
    return parent_run(folder.root, waits, status=None, run_id=run_id)


def _stored_config(folder: SearchFolder) -> SearchConfig:
    """The snapshot of a search. Its tracking address has lost its password; the environment may give it."""
    record = folder.stored()
    record["storage"] = str(folder.storage)
    model, tracking = (part if isinstance(part := record.get(key), dict) else {} for key in ("model", "tracking"))
    original = read_json(folder.original) if folder.original.exists() else {}
    if "model" in original:
        record["model"] = model | {"path": original["model"]}
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        record["tracking"] = tracking | {"uri": uri}
    elif "***@" in str(tracking.get("uri")):
        raise ConfigError("tracking.uri is stored without its password; set MLFLOW_TRACKING_URI to the whole address")
    return parse_config(record, where=str(folder.snapshot))


def _check_ended(folder: SearchFolder, records: Sequence[TrialRecord]) -> None:
    """Raises ConfigError for a search that has not come as far as a trial that can be promoted."""
    missing = [file.name for file in (folder.original, folder.state) if not file.is_file()]
    if missing or not any(trial.usable for trial in records):
        why = f"it has no {missing[0]}" if missing else "no trial of it has a result"
        raise ConfigError(
            f"nothing can be promoted from {str(folder.root)!r}: {why}; continue the search with "
            "`headfold search CONFIG --resume`"
        )


def _chosen(records: Sequence[TrialRecord], ids: list[str], top: int | None, config: SearchConfig) -> list[TrialRecord]:
    usable, baseline = {t.trial_id: t for t in records if t.usable}, config.search.baseline
    copies = {t.trial_id: t.copy_of for t in records if t.copy_of is not None}
    for name in ids:
        if name in copies:
            first = copies[name]
            raise ConfigError(f"--trial: {name!r} led to the same model as {first}; promote that one: --trial {first}")
        if name not in usable:
            wrong = f"{name!r} is no finished trial of this search{near(name, usable)}"
            raise ConfigError(f"--trial: {wrong}; there are {sorted(usable) or 'none'}")
        if usable[name].recipe == baseline:
            others = ", ".join(sorted(i for i, t in usable.items() if t.recipe != baseline))
            raise ConfigError(
                f"--trial: {name!r} is a trial of the baseline {baseline}, which others must beat and which is never "
                f"promoted itself; choose among {others or 'none: there is no other'}"
            )
    section = config.promotion
    how = "best_per_budget" if top else section.select
    chosen = [usable[name] for name in ids] or select(records, how, top or section.top)
    if top is not None and not ids:
        _tell_of_fewer(usable.values(), top)
    if section.keep_weights == "finalists":
        kept = finalists(records, config)
        if gone := [trial.trial_id for trial in chosen if trial.trial_id not in kept]:
            raise ConfigError(
                f"{'--trial' if ids else '--top'}: the weights of {', '.join(gone)} were not kept, as "
                f"promotion.keep_weights is finalists; there are those of {', '.join(sorted(kept)) or 'none'}. A "
                "search with keep_weights: all, or a larger promotion.top, keeps more"
            )
    return chosen


def _tell_of_fewer(usable: Iterable[TrialRecord], top: int) -> None:
    """Say at which KV ratios there are fewer trials than are asked for."""
    counts = Counter(trial.kv_ratio for trial in usable)
    fewer = [f"{count} at {percent(ratio)}" for ratio, count in sorted(counts.items())[::-1] if count < top]
    if fewer:
        print(f"note: --top {top} takes every trial that has a result: there are {', '.join(fewer)}", file=sys.stderr)


def promote(session: SearchSession, chosen: Sequence[TrialRecord] | None = None) -> dict[str, Any]:
    """Train, check and register; returns the content of `promotion.json`. Nothing finished is done again."""
    config, folder = session.config, session.folder
    trials = load_trials(folder.root)
    if chosen is None:
        chosen = select(trials, config.promotion.select, config.promotion.top)
    state = PromotionState.load(folder.promotion)
    step = PromotionSteps(session, state, {t.trial_id: t for t in trials})
    total = session.context.rungs[-1] + config.promotion.steps
    for trial in chosen:
        state.add(state.candidates, trial.trial_id, Entry.of(trial, total))
    _add_baselines(state, trials, config, total)
    step.save()
    step.catch_up()
    step.train()
    for entry in state.candidates.values():
        step.check(entry)
    step.register()
    _link_export(folder, state)
    step.save()
    return state.to_dict()


def _add_baselines(state: PromotionState, trials: Sequence[TrialRecord], config: SearchConfig, total: int) -> None:
    """The best baseline trial of each budget that has a candidate: at its best learning rate of the same grid."""
    baselines = best_of_recipe(trials, config.search.baseline)
    for budget in {entry.kv_ratio for entry in state.candidates.values()}:
        if (best := baselines.get(budget)) is not None:
            fresh = Entry.of(best, total, BASELINE)
            state.add(state.baselines, f"{budget:g}", fresh)


def _link_export(folder: SearchFolder, state: PromotionState) -> None:
    """`exported` in the search folder and in the storage: the promoted checkpoint of smallest cache that stock
    transformers loads."""
    plain = [e for e in state.candidates.values() if e.status == PROMOTED and e.plain and e.exported]
    if not plain:
        return
    best = min(plain, key=lambda e: (e.kv_ratio, e.loss))
    state.exported = best.exported
    for link in (folder.root / "exported", folder.storage / "exported"):
        with contextlib.suppress(OSError):  # a file system without links: the path is in promotion.json all the same
            fresh = link.with_name(f".exported.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(os.path.relpath(str(best.exported), link.parent))
            fresh.replace(link)
