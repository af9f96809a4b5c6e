"""Promotion: chosen trials are trained in full, must pass a gate, and become registered versions.

The state of every step is in `promotion.json`, so a promotion that was killed resumes there: a
finished training is not repeated, an unfinished one resumes from its own checkpoint.
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

from attention.base.messages import did_you_mean
from attention.base.text import compact
from attention.base.timing import duration
from attention.ratios import percent
from orchestrator.checkpoints import base_of
from orchestrator.cluster.capacity import search_concurrency
from orchestrator.cluster.pool_client import pool_of_search
from orchestrator.cluster.session import connected
from orchestrator.config.parsing import apply_override
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.promotion.engine_caches import measure_engine_caches
from orchestrator.promotion.state import (
    BASELINE,
    PENDING,
    PROMOTED,
    TRAINED,
    PromoteOutcome,
    PromotionEntry,
    PromotionState,
)
from orchestrator.promotion.steps import PromotionSteps
from orchestrator.reporting import console
from orchestrator.resources.time import training_rate
from orchestrator.search.leftovers import best_of_recipe, finalists, select
from orchestrator.search.prepare import check_texts, trial_context
from orchestrator.search.setup import open_models
from orchestrator.search.trials.context import SearchControl, SearchSession
from orchestrator.search.validation import (
    check_epochs,
    check_gpus,
    rehearse_search,
    validate_search,
)
from orchestrator.search.waiting import report_waiting
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_if_there, read_json
from orchestrator.storage.lock import SearchLock
from orchestrator.storage.manifest import SyncSide
from orchestrator.storage.mirror import mirrored
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.promotion_record import PromotionRecord
from orchestrator.storage.records import OriginalRecord, TrialRecord, waits_for
from orchestrator.storage.trust import check_origin
from orchestrator.tracking.run_metadata import shared_metadata
from orchestrator.tracking.runs import Tracker
from orchestrator.tracking.sync import MlflowSync, TrackedRun, parent_run
from search_spaces.recipes.recipe import Recipe


def promote_search(
    search: str | Path,
    *,
    trials: Iterable[str] = (),
    top: int | None = None,
    sync_from: SyncSide | None = None,
    overrides: Iterable[str] = (),
) -> PromoteOutcome:
    """Promote from the folder of a search that has run: `headfold promote`.

    Args:
        trials: Ids of the trials to promote; none for those that the configuration selects.
        top: How many trials of each KV ratio, instead of the configured number.
        sync_from: The copy to resume from where the address of the storage and its working folder
            have both changed.
        overrides: Settings of this promotion, `promotion.KEY=VALUE`, instead of the search's.

    Raises:
        ConfigError: If the folder is none, a trial id is unknown or of a baseline, or the cluster
            is too small.
    """
    ids = list(trials)
    settings = list(overrides)
    folder, config, chosen = _request(search, ids, top, settings)
    config = _with_promotion(open_models(config))
    _check_training(config, chosen)
    prepared = validate_search(config)
    with (
        mirrored(folder.address or str(folder.storage), folder.storage, side=sync_from) as mirror,
        SearchLock(folder.lock).acquire(f"search {folder.root.name!r}") as lock,
        connected() as nodes,
    ):
        control = SearchControl.of(folder, lock, mirror)
        if mirror is not None:  # it may have been resumed elsewhere
            _, _, chosen = _request(search, ids, top, settings)
            control.fetch({trial.trial_id for trial in chosen})
        parallel = search_concurrency(config, nodes)
        prepared.texts.make_all()
        original: OriginalRecord = read_json(folder.original)
        check_texts(prepared, original)
        context = trial_context(config, prepared, folder, original)
        tracking = config.tracking
        connect = partial(Tracker.open, tracking.uri, tracking.experiment, folder.storage)
        base = base_of(original["model"])["base"]
        shared = shared_metadata(config, folder, prepared.texts.folders, base)
        mlflow = MlflowSync(connect, _search_run(folder), shared=shared)
        parameters = original.get("parameters", 0)
        with (
            report_waiting(
                config, folder, mlflow, partial(_search_run, folder), control.promoting.is_set
            ),
            pool_of_search(config, folder, parameters) as pool,
        ):
            context = replace(context, pool=pool)
            session = SearchSession(config, folder, context, mlflow, parallel, control)
            promotion = promote_trials(session, chosen)
            caches = measure_engine_caches(session, load_trials(folder.root), promotion)
        mlflow.flush()
    console.print_promotion(promotion)
    console.print_caches(caches)
    console.print_ending(promotion, caches, folder.root)
    return PromoteOutcome(folder.root, promotion, tuple(trial.trial_id for trial in chosen))


def rehearse_promotion(
    search: str | Path,
    *,
    trials: Iterable[str] = (),
    top: int | None = None,
    overrides: Iterable[str] = (),
) -> dict[str, str]:
    """Return what `promote_search` would do, in words by topic; nothing is written.

    Raises:
        ConfigError: As `promote_search` does, for what can be checked without a cluster.
    """
    folder, config, chosen = _request(search, trials, top, overrides)
    config = _with_promotion(open_models(config, weights=False))
    _check_training(config, chosen)
    prepared = rehearse_search(config)
    state = PromotionState.load(folder.promotion)
    total = config.rungs.steps[-1] + config.promotion.steps
    _add_entries(state, load_trials(folder.root), chosen, config, total)
    entries = (*state.candidates.values(), *state.baselines.values())
    pending = {entry.trial_id: entry.steps for entry in entries if entry.status == PENDING}
    settings = config.promotion_train
    length = config.data.sequence_length
    steps = sum(pending.values()) - len(pending) * config.rungs.steps[-1]
    tokens = steps * settings.batch_size * length
    inputs = prepared.setup.inputs
    known_rate = config.resources.tokens_per_second
    rate, source = training_rate(inputs.model, settings, length, inputs.size, known_rate)
    if rate:
        seconds = tokens / rate / settings.num_workers
        source = (
            f"{rate:.0f} tokens/s per worker, {source}, about {duration(seconds)} one after the "
            "other"
        )
    return {
        "promote": ", ".join(f"{trial.trial_id} ({trial.name})" for trial in chosen),
        "trainings": (
            f"{len(pending)} not finished yet, the baseline's included: {steps:,} steps, "
            f"{compact(tokens)} tokens"
        ),
        "rate": source,
    }


def _request(
    search: str | Path, trials: Iterable[str], top: int | None, overrides: Iterable[str]
) -> tuple[SearchFolder, SearchConfig, list[TrialRecord]]:
    """Return a search, its configuration, and the trials of it to promote."""
    folder = SearchFolder.existing(search)
    check_origin(folder)
    config = _stored_config(folder, overrides)
    records = load_trials(folder.root)
    _check_ended(folder, records)
    stored = _stored_config(folder, ())
    return folder, config, _chosen(records, list(trials), top, config, stored)


def _search_run(folder: SearchFolder) -> TrackedRun:
    """Return the MLflow run of the search, whose status stays as it is."""
    run_id = read_json(folder.state).get("parent_run")
    return parent_run(folder.root, waits_for(folder.waiting), status=None, run_id=run_id)


def _stored_config(folder: SearchFolder, overrides: Iterable[str]) -> SearchConfig:
    """Return the configuration of a search, from its snapshot, with other settings of `promotion`.

    Its tracking address has lost its password; the environment may give it.
    """
    record = folder.stored()
    record["storage"] = str(folder.storage)
    for override in overrides:
        if not override.startswith("promotion."):
            raise ConfigError(
                f"expected settings of the promotion, e.g. promotion.margin=0.01, got "
                f"{override!r}; "
                "all others are those that the search has run with"
            )
        apply_override(record, override)
    model, tracking = (
        section if isinstance(section := record.get(key), dict) else {}
        for key in ("model", "tracking")
    )
    original = read_if_there(folder.original)
    if "model" in original:
        record["model"] = model | {"path": original["model"]}
    uri = tracking.get("uri") or read_if_there(folder.state).get("tracking")
    if "***@" in str(uri):  # stored without its password
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            raise ConfigError(
                "tracking.uri is stored without its password; set MLFLOW_TRACKING_URI to the whole "
                "address"
            )
    if uri is not None:
        record["tracking"] = tracking | {"uri": uri}
    return parse_config(record, where=str(folder.snapshot))


def _with_promotion(config: SearchConfig) -> SearchConfig:
    """Return the configuration with a promotion, which the search itself may not have had."""
    promotion = config.promotion.model_copy(update={"enabled": True})
    return config.model_copy(update={"promotion": promotion})


def _check_training(config: SearchConfig, chosen: Sequence[TrialRecord]) -> None:
    """Raise ConfigError where the text does not suffice for the promotion, or GPUs would idle."""
    check_gpus(config)
    try:
        check_epochs(config, (Recipe.from_dict(t.choices) for t in chosen if t.choices))
    except ConfigError as error:
        raise ConfigError(
            f"{error}; for a search that has run, fewer promotion.steps, or another text "
            "(promotion.data) with enough of promotion.data.tokens"
        ) from None


def _check_ended(folder: SearchFolder, records: Sequence[TrialRecord]) -> None:
    """Raise ConfigError unless a trial of the search can be promoted."""
    missing = [file.name for file in (folder.original, folder.state) if not file.is_file()]
    if missing or not any(trial.usable for trial in records):
        why = f"it has no {missing[0]}" if missing else "no trial of it has a result"
        raise ConfigError(
            f"nothing can be promoted from {str(folder.root)!r}: {why}; continue the search with "
            "`headfold search CONFIG --resume`"
        )


def _chosen(
    records: Sequence[TrialRecord],
    ids: list[str],
    top: int | None,
    config: SearchConfig,
    stored: SearchConfig,
) -> list[TrialRecord]:
    """Return the trials of these ids, or those that the configuration selects.

    Args:
        stored: The configuration of the search, by which weights were kept.
    """
    usable = {trial.trial_id: trial for trial in records if trial.usable}
    copies = {t.trial_id: t.copy_of for t in records if t.copy_of is not None}
    for trial_id in ids:
        _check_id(trial_id, usable, copies, config.search.baseline)
    if ids and top is not None:
        raise ConfigError(
            f"--top: got {top} with --trial, which names the trials to promote; give one of the two"
        )
    section = config.promotion
    how = "best_per_budget" if top else section.select
    chosen = [usable[trial_id] for trial_id in ids] or select(records, how, top or section.top)
    if top is not None:
        _note_fewer(usable.values(), top)
    if stored.promotion.keep_weights == "finalists":
        available = finalists(records, stored)
        if missing := [trial.trial_id for trial in chosen if trial.trial_id not in available]:
            raise ConfigError(
                f"{'--trial' if ids else '--top'}: the weights of {', '.join(missing)} were not "
                "kept, as promotion.keep_weights is finalists; there are those of "
                f"{', '.join(sorted(available)) or 'none'}. A search with keep_weights: all, or a "
                "larger promotion.top, keeps more"
            )
    return chosen


def _check_id(
    trial_id: str, usable: dict[str, TrialRecord], copies: dict[str, str], baseline: str
) -> None:
    """Raise ConfigError unless a trial can be promoted.

    Args:
        copies: For each trial that led to the same model as another one, that other one.
    """
    if trial_id in copies:
        first = copies[trial_id]
        raise ConfigError(
            f"--trial: {trial_id!r} led to the same model as {first}; promote that one: "
            f"--trial {first}"
        )
    if trial_id not in usable:
        raise ConfigError(
            f"--trial: {trial_id!r} is no finished trial of this search"
            f"{did_you_mean(trial_id, usable)}; "
            f"there are {sorted(usable) or 'none'}"
        )
    if usable[trial_id].recipe == baseline:
        others = ", ".join(sorted(i for i, t in usable.items() if t.recipe != baseline))
        raise ConfigError(
            f"--trial: {trial_id!r} is a trial of the baseline {baseline}, which others must beat "
            "and which is never promoted itself; choose among "
            f"{others or 'none: there is no other'}"
        )


def _note_fewer(usable: Iterable[TrialRecord], top: int) -> None:
    """Print at which KV ratios there are fewer trials than requested."""
    counts = Counter(trial.kv_ratio for trial in usable)
    fewer = [
        f"{count} at {percent(ratio)}"
        for ratio, count in sorted(counts.items(), reverse=True)
        if count < top
    ]
    if fewer:
        note = f"--top {top} takes every trial that has a result: there are {', '.join(fewer)}"
        print(f"note: {note}", file=sys.stderr)


def promote_trials(
    session: SearchSession, chosen: Sequence[TrialRecord] | None = None
) -> PromotionRecord:
    """Train, check and register trials; nothing that is finished is done again.

    Args:
        chosen: The trials; None for those that the configuration selects.

    Returns:
        The content of `promotion.json`.
    """
    config, folder = session.config, session.folder
    trials = load_trials(folder.root)
    state = PromotionState.load(folder.promotion)
    steps = PromotionSteps(session, state, {trial.trial_id: trial for trial in trials})
    total = session.context.rungs[-1] + config.promotion.steps
    _add_entries(state, trials, chosen, config, total)
    steps.save()
    session.control.fetch({*state.candidates, *(e.trial_id for e in state.baselines.values())})
    steps.catch_up()
    session.control.promoting.set()
    try:
        steps.train()
    finally:
        session.control.promoting.clear()
    steps.check()
    steps.register()
    _link_export(folder, state)
    steps.save()
    return state.to_record()


def _add_entries(
    state: PromotionState,
    trials: Sequence[TrialRecord],
    chosen: Sequence[TrialRecord] | None,
    config: SearchConfig,
    total: int,
) -> None:
    """Add candidates, and the best baseline trial of each KV ratio that has one of as many steps.

    That baseline is the one at its best learning rate of the same grid.

    Args:
        state: Of the promotion.
        trials: Of the search.
        chosen: The trials to promote; None for those that the configuration selects, of which
            longer promotions stay.
        config: Of the search, with the settings of the promotion.
        total: Steps of each, the trial's included.
    """
    selected = chosen is None
    if chosen is None:
        chosen = select(trials, config.promotion.select, config.promotion.top)
    for trial in chosen:
        entry = PromotionEntry.of(trial, total)
        state.add(state.candidates, trial.trial_id, entry, keep_longer=selected, reinstate=selected)
    baselines = best_of_recipe(trials, config.search.baseline)
    alike = [entry for entry in state.candidates.values() if entry.steps == total]
    # Those have yet to pass the gate, by a baseline of as many steps
    due = {entry.kv_ratio for entry in alike if entry.status in (PENDING, TRAINED)}
    for kv_ratio in {entry.kv_ratio for entry in alike}:
        if (best := baselines.get(kv_ratio)) is not None:
            entry = PromotionEntry.of(best, total, BASELINE)
            keep_longer = selected and kv_ratio not in due
            state.add(
                state.baselines,
                f"{kv_ratio:g}",
                entry,
                keep_longer=keep_longer,
                reinstate=selected,
            )
    if selected:
        for entry in state.withdraw({trial.trial_id for trial in chosen}):
            command = f"headfold promote FOLDER --trial {entry.trial_id}"
            if entry.steps != total:
                command += f" promotion.steps={entry.steps - total + config.promotion.steps}"
            print(
                f"promotion: {entry.name} is no longer selected; `{command}` continues it",
                flush=True,
            )


def _link_export(folder: SearchFolder, state: PromotionState) -> None:
    """Link `exported`, in the search folder and in the storage, to a promoted checkpoint.

    It is the one of the smallest cache that stock transformers loads.
    """
    plain = [e for e in state.candidates.values() if e.status == PROMOTED and e.exported]
    if not plain:
        return
    best = min(plain, key=lambda entry: (entry.kv_bytes_per_token or 0, entry.kv_ratio, entry.loss))
    state.exported = best.exported
    for link in (folder.root / "exported", folder.storage / "exported"):
        if os.path.lexists(link) and not _is_ours(link, folder.storage):
            continue
        # A file system without links: the path is in promotion.json all the same
        with contextlib.suppress(OSError):
            fresh = link.with_name(f".exported.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(os.path.relpath(str(best.exported), link.parent))
            fresh.replace(link)


def _is_ours(link: Path, storage: Path) -> bool:
    """Whether a promotion of this storage has made a link: no file or folder of the user's."""
    target = Path(os.path.normpath(link.parent / link.readlink())) if link.is_symlink() else None
    return target is not None and storage in target.parents
