"""Promotion: chosen trials go on to the full training, must pass a gate, and become registered model versions.

The state of every step lies in `promotion.json`, so a promotion that was killed goes on where it stood: a finished
training is not repeated, a half-done one resumes from its own checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator import results, tables
from orchestrator.cluster import Demand, concurrency, connected
from orchestrator.config import ConfigError, SearchConfig, parse_config
from orchestrator.folders import SearchFolder
from orchestrator.gate import Checks, check_candidate
from orchestrator.results import TrialRecord, front, load_trials, ranked, read_json, write_json
from orchestrator.tracking import Tracker
from orchestrator.training import Training, run_all
from orchestrator.trial import TrialContext

PENDING, TRAINED, PROMOTED, REFUSED, FAILED = "pending", "trained", "promoted", "refused", "failed"
BASELINE, CANDIDATE = "baseline", "candidate"


@dataclass
class Entry:
    """One trial's way through the promotion. `steps` are cumulative; losses in nats a token; `reasons`: why refused."""

    trial_id: str
    recipe: str
    kv_ratio: float
    steps: int
    role: str = CANDIDATE
    status: str = PENDING
    loss: float | None = None
    kl: float | None = None
    baseline_loss: float | None = None
    folder: str | None = None
    exported: str | None = None
    plain: bool = False
    kv_bytes_per_token: int | None = None
    checks: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    version: str | None = None
    model_uri: str | None = None
    run_id: str | None = None


@dataclass
class PromotionState:
    """`promotion.json`."""

    candidates: dict[str, Entry] = field(default_factory=dict)
    baselines: dict[str, Entry] = field(default_factory=dict)
    exported: str | None = None

    @classmethod
    def load(cls, path: Path) -> PromotionState:
        record = read_json(path) if path.exists() else {}
        entries = {
            kind: {k: Entry(**e) for k, e in record.get(kind, {}).items()} for kind in ("candidates", "baselines")
        }
        return cls(entries["candidates"], entries["baselines"], record.get("exported"))

    def save(self, path: Path) -> None:
        write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        failed = [e.trial_id for e in (*self.candidates.values(), *self.baselines.values()) if e.status == FAILED]
        return asdict(self) | {"failed": failed}


@dataclass(frozen=True)
class PromoteOutcome:
    """What `promote_search` returns. `exit_code` is 0 if at least one candidate was promoted and nothing failed."""

    folder: Path
    promotion: dict[str, Any]

    @property
    def exit_code(self) -> int:
        states = [c["status"] for c in self.promotion["candidates"].values()]
        return 0 if PROMOTED in states and not self.promotion["failed"] else 1

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.promotion}


def select(trials: Sequence[TrialRecord], how: str, top: int) -> list[TrialRecord]:
    """The trials to promote: the `top` best at each budget, or the front."""
    if how == "front":
        return front(trials)
    return [trial for best in ranked(trials).values() for trial in best[:top]]


def promote_search(search: str | Path, *, trials: Iterable[str] = (), top: int | None = None) -> PromoteOutcome:
    """`headfold promote`: promote from the folder of a search that has run.

    Raises ConfigError if the folder is none, a trial id is unknown, or the cluster is too small.
    """
    from orchestrator.search import trial_context
    from orchestrator.validate import validate_search

    folder = SearchFolder.existing(search)
    config = _stored_config(folder)
    records = load_trials(folder.trials_file)
    chosen = _chosen(records, list(trials), top, config)
    prepared = validate_search(config)
    with connected() as resources:
        parallel = concurrency(resources, Demand.of(config), config.resources.max_concurrent)
        tracker = Tracker.open(config.tracking.uri, config.tracking.experiment, folder.storage)
        base = read_json(folder.base)
        context = trial_context(config, prepared, folder, base)
        parent = read_json(folder.state)["parent_run"]
        promotion = promote(config, context, folder, tracker, parent, parallel, chosen)
    tables.print_promotion(promotion)
    return PromoteOutcome(folder.root, promotion)


def _stored_config(folder: SearchFolder) -> SearchConfig:
    """The snapshot of a search. Its tracking address has lost its password; the environment may give it."""
    record = yaml.safe_load(folder.snapshot.read_text(encoding="utf-8"))
    record["storage"] = str(folder.storage)
    base = read_json(folder.base) if folder.base.exists() else {}
    if "model" in base:
        record["model"]["path"] = base["model"]
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        record["tracking"]["uri"] = uri
    elif "***@" in str(record["tracking"].get("uri")):
        raise ConfigError("tracking.uri is stored without its password; set MLFLOW_TRACKING_URI to the whole address")
    return parse_config(record, where=str(folder.snapshot))


def _chosen(records: Sequence[TrialRecord], ids: list[str], top: int | None, config: SearchConfig) -> list[TrialRecord]:
    usable = {t.trial_id: t for t in records if t.usable}
    unknown = [trial_id for trial_id in ids if trial_id not in usable]
    if unknown:
        raise ConfigError(
            f"--trial: {unknown[0]!r} is no finished trial of this search; there are {sorted(usable) or 'none'}"
        )
    if ids:
        return [usable[trial_id] for trial_id in ids]
    section = config.promotion
    return select(records, "best_per_budget" if top else section.select, top or section.top)


def promote(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    parent: str,
    parallel: int,
    chosen: Sequence[TrialRecord] | None = None,
) -> dict[str, Any]:
    """Train, check and register; returns the content of `promotion.json`. Nothing finished is done again."""
    trials = load_trials(folder.trials_file)
    if chosen is None:
        chosen = select(trials, config.promotion.select, config.promotion.top)
    state = PromotionState.load(folder.promotion)
    total = context.rungs[-1] + config.promotion.steps
    for trial in chosen:
        known = state.candidates.get(trial.trial_id)
        if known is None or known.status == FAILED or known.steps != total:
            state.candidates[trial.trial_id] = Entry(trial.trial_id, trial.recipe, trial.kv_ratio, total)
    _add_baselines(state, trials, config, total)
    state.save(folder.promotion)
    _train(config, context, folder, tracker, parent, parallel, state, {t.trial_id: t for t in trials})
    for entry in state.candidates.values():
        if entry.status == TRAINED:
            _decide(entry, config, context, folder, tracker, parent, state)
            state.save(folder.promotion)
    _link_export(folder, state)
    state.save(folder.promotion)
    return state.to_dict()


def _add_baselines(state: PromotionState, trials: Sequence[TrialRecord], config: SearchConfig, total: int) -> None:
    """The best baseline trial of each budget that has a candidate: at its best learning rate of the same grid."""
    name = config.search.baseline
    for budget in {entry.kv_ratio for entry in state.candidates.values()}:
        best = next((t for t in ranked(trials).get(budget, []) if t.recipe == name), None)
        known = state.baselines.get(f"{budget:g}")
        if best is not None and (known is None or known.status == FAILED or known.steps != total):
            state.baselines[f"{budget:g}"] = Entry(best.trial_id, best.recipe, budget, total, role=BASELINE)


def _train(
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    parent: str,
    parallel: int,
    state: PromotionState,
    trials: dict[str, TrialRecord],
) -> None:
    """Bring every pending entry to its full number of steps; a trial that is both candidate and baseline once."""
    entries: dict[str, list[Entry]] = {}
    for entry in (*state.baselines.values(), *state.candidates.values()):
        if entry.status == PENDING:
            entries.setdefault(entry.trial_id, []).append(entry)
    trainings = [Training.of(trials[i], mine[0].steps, config, context, folder) for i, mine in entries.items()]
    if trainings:
        print(f"\npromotion: {len(trainings)} training(s) to {trainings[0].total} steps", flush=True)

    def done(training: Training, metrics: dict[str, Any] | None, error: str | None) -> None:
        for entry in entries[training.trial_id]:
            if entry.run_id is None:
                tags = {"headfold.kind": f"promotion {entry.role}", "trial_id": entry.trial_id}
                entry.run_id = tracker.start(f"promote {entry.recipe} {entry.kv_ratio:g}", parent=parent, tags=tags)
            for report in training.reports():
                tracker.metrics(entry.run_id, report, step=report["step"])
            if metrics is None:
                entry.status, entry.reasons = FAILED, [error or "unknown error"]
                tracker.tags(entry.run_id, {"error": error})
                tracker.end(entry.run_id, results.FAILED)
            else:
                entry.status, entry.folder = TRAINED, metrics["folder"]
                entry.loss, entry.kl = metrics["loss"], metrics.get("kl")
                if entry.role == BASELINE:
                    tracker.end(entry.run_id, results.DONE)
        state.save(folder.promotion)

    run_all(trainings, parallel, config, done)


def _decide(
    entry: Entry,
    config: SearchConfig,
    context: TrialContext,
    folder: SearchFolder,
    tracker: Tracker,
    parent: str,
    state: PromotionState,
) -> None:
    """Gate and registry of one trained candidate."""
    baseline = state.baselines.get(f"{entry.kv_ratio:g}")
    entry.baseline_loss = baseline.loss if baseline is not None and baseline.status == TRAINED else None
    checks = check_candidate(entry, config, context, folder)
    entry.checks, entry.reasons = checks.record, list(checks.reasons)
    entry.exported, entry.plain, entry.kv_bytes_per_token = checks.exported, checks.plain, checks.kv_bytes_per_token
    entry.status = REFUSED if checks.reasons else PROMOTED
    assert entry.run_id is not None
    if entry.status == PROMOTED:
        entry.version = _register(entry, checks, config, folder, tracker, parent, state)
    tracker.metrics(entry.run_id, {"loss": entry.loss, "baseline_loss": entry.baseline_loss}, step=entry.steps)
    tracker.tags(entry.run_id, {"gate": entry.status, "reasons": "; ".join(entry.reasons)})
    tracker.text(entry.run_id, yaml.safe_dump(entry.checks, sort_keys=True), "gate.yaml")
    tracker.end(entry.run_id, results.DONE)


def _register(
    entry: Entry,
    checks: Checks,
    config: SearchConfig,
    folder: SearchFolder,
    tracker: Tracker,
    parent: str,
    state: PromotionState,
) -> str:
    """A registered version with the evidence as tags; the alias (kv25) goes to the best of its budget."""
    better = [
        e
        for e in state.candidates.values()
        if e.status == PROMOTED and e.kv_ratio == entry.kv_ratio and (e.loss, e.trial_id) < (entry.loss, entry.trial_id)
    ]
    alias = f"kv{100 * entry.kv_ratio:g}".replace(".", "_") + (f"-{len(better) + 1}" if better else "")
    tags = {
        "recipe": entry.recipe,
        "kv_ratio": entry.kv_ratio,
        "kv_bytes_per_token": entry.kv_bytes_per_token,
        "loss": entry.loss,
        "loss_base": context_loss(folder),
        "baseline_loss": entry.baseline_loss,
        "steps": entry.steps,
        "gate": "passed",
        "search_run": parent,
        "trial_id": entry.trial_id,
        **checks.digests,
    }
    assert entry.exported is not None and entry.run_id is not None
    name = config.promotion.registered_name or config.name
    entry.model_uri = f"models:/{name}@{alias}"
    description = f"{entry.recipe} at {entry.kv_ratio:.0%} of the KV cache, from search {folder.root.name}"
    return tracker.register(name, entry.exported, entry.run_id, alias=alias, tags=tags, description=description)


def context_loss(folder: SearchFolder) -> float:
    """Held-out loss of the untouched model."""
    return read_json(folder.base)["loss"]


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
