"""The state of a promotion, `promotion.json`.

It is written after each step, so that a promotion that was killed resumes from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attention.ratios import percent
from orchestrator.config.parsing import ConfigError
from orchestrator.reporting.promoted_models import promoted_models
from orchestrator.storage.json_files import read_if_there, write_json
from orchestrator.storage.promotion_record import (
    EntryRecord,
    FinalistScores,
    GateChecks,
    LineageRecord,
    LossComparison,
    PromotionRecord,
)
from orchestrator.storage.records import TrialRecord

PENDING, TRAINED, PASSED, REGISTERED = "pending", "trained", "passed", "registered"
PROMOTED, REFUSED, FAILED = "promoted", "refused", "failed"
BASELINE, CANDIDATE = "baseline", "candidate"


@dataclass(frozen=True)
class TrainedModel:
    """The result of a full training: the best model that was measured, which is the one shipped.

    Losses are held out, in nats per token.

    Attributes:
        folder: Of the weights.
        step: Cumulative training steps of the weights.
        description: What the model is, in words.
        loss: Of this model.
        kl: KL divergence from the original model.
        data_position: Sequences of the training data that were used.
        tokens: Tokens that it was trained on.
        last_loss: After all steps.
        untrained_loss: Of the conversion before any step.
        original_loss: Of the original model.
    """

    folder: str
    loss: float | None
    kl: float | None = None
    step: int | None = None
    description: str | None = None
    data_position: int | None = None
    tokens: int | None = None
    last_loss: float | None = None
    untrained_loss: float | None = None
    original_loss: float | None = None


@dataclass(frozen=True)
class BaselineModel:
    """The best measured model of the baseline at the same KV ratio."""

    folder: str | None
    loss: float | None
    step: int | None


@dataclass(frozen=True)
class GateRecord:
    """The results of the gate.

    Attributes:
        outcomes: `passed`, or the reasons against it, by the name of the check.
        checks: The measurements.
        scores: Tasks, generated text and long contexts, where the configuration names them.
        model: The exported folder; None if the export failed.
        plain: Whether stock transformers loads it.
        served: Folder of the same model for the engine of `search.target`.
        kv_bytes_per_token: By the plan, in the dtype that is shipped.
    """

    outcomes: Mapping[str, str]
    checks: GateChecks
    scores: FinalistScores
    model: str | None
    plain: bool
    served: str | None
    kv_bytes_per_token: int | None


@dataclass
class PromotionEntry:
    """One trial in a promotion: pending → trained → passed → registered → promoted.

    It ends as refused by the gate, or failed in training.

    Attributes:
        kv_ratio: The ratio that was requested; `used_kv_ratio`, that of its plan, is at most this.
        steps: Cumulative training steps.
        relaxation_remaining: Share of the relaxation that was left when its heads were fused.
        name: The trial as people read it; `label`: its recipe.
        reasons: Why it was refused or failed, or is not registered yet.
        gate_settings: By which the gate has decided; None before it, and of earlier versions.
        run_id: Of its MLflow run.
        trained_at: When the training ended, in seconds since 1970.
        offset: Steps of the trial that the job of the training did not count
            (`orchestrator.promotion.training.StartPoint`); None before it began.
        version: In the model registry; `model_uri` is its address there.
    """

    trial_id: str
    recipe: str
    kv_ratio: float
    steps: int
    role: str = CANDIDATE
    status: str = PENDING
    used_kv_ratio: float | None = None
    relaxation_remaining: float | None = None
    name: str = ""
    label: str = ""
    reasons: list[str] = field(default_factory=list)
    gate_settings: Mapping[str, Any] | None = None
    run_id: str | None = None
    trained_at: float | None = None
    offset: int | None = None
    trained: TrainedModel | None = None
    baseline: BaselineModel | None = None
    gate: GateRecord | None = None
    lineage: LineageRecord | None = None
    version: str | None = None
    model_uri: str | None = None

    def __post_init__(self) -> None:
        self.label = self.label or self.recipe
        self.name = self.name or f"{self.label} · {percent(self.kv_ratio)}"

    @classmethod
    def of(cls, trial: TrialRecord, steps: int, role: str = CANDIDATE) -> PromotionEntry:
        """Return the entry of a trial that is to be trained to so many steps."""
        return cls(
            trial.trial_id,
            trial.recipe,
            trial.kv_ratio,
            steps,
            role,
            used_kv_ratio=trial.actual_kv_ratio,
            relaxation_remaining=trial.relaxation_remaining,
            name=trial.name,
            label=trial.label,
        )

    @property
    def loss(self) -> float | None:
        """Held-out loss of the model that is shipped."""
        return self.trained.loss if self.trained else None

    @property
    def model(self) -> str | None:
        """Folder of the exported model."""
        return self.gate.model if self.gate else None

    @property
    def exported(self) -> str | None:
        """Folder of the exported model, if stock transformers loads it."""
        return self.gate.model if self.gate and self.gate.plain else None

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV bytes per token of its plan, once the gate has counted them."""
        return self.gate.kv_bytes_per_token if self.gate else None

    @property
    def comparison(self) -> LossComparison:
        """The losses that a promotion compares with `loss`, and the steps of best models."""
        trained, baseline = self.trained, self.baseline
        return {
            "untrained_loss": trained.untrained_loss if trained else None,
            "last_loss": trained.last_loss if trained else None,
            "baseline_loss": baseline.loss if baseline else None,
            "original_loss": trained.original_loss if trained else None,
            "best_step": trained.step if trained else None,
            "baseline_step": baseline.step if baseline else None,
        }

    @property
    def unfinished(self) -> bool:
        """Whether a step has failed that another run of the promotion may repeat."""
        unchecked = self.role == CANDIDATE and self.status == TRAINED
        return unchecked or self.status in (FAILED, PASSED, REGISTERED)

    def to_record(self) -> EntryRecord:
        """Return the entry as stored in `promotion.json`."""
        trained, baseline, gate = self.trained, self.baseline, self.gate
        record: EntryRecord = {
            "trial_id": self.trial_id,
            "recipe": self.recipe,
            "kv_ratio": self.kv_ratio,
            "steps": self.steps,
            "role": self.role,
            "status": self.status,
            "loss": self.loss,
            **self.comparison,
            "kl": trained.kl if trained else None,
            "shipped": trained.description if trained else None,
            "baseline_folder": baseline.folder if baseline else None,
            "folder": trained.folder if trained else None,
            "data_position": trained.data_position if trained else None,
            "model": self.model,
            "exported": self.exported,
            "served": gate.served if gate else None,
            "plain": bool(gate and gate.plain),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "gate": dict(gate.outcomes) if gate else {},
            "checks": gate.checks if gate else {},
            "measured": gate.scores if gate else {},
            "reasons": self.reasons,
            "lineage": self.lineage or {},
            "version": self.version,
            "model_uri": self.model_uri,
            "run_id": self.run_id,
            "trained_at": self.trained_at,
            "name": self.name,
            "label": self.label,
            "relaxation_remaining": self.relaxation_remaining,
            "used_kv_ratio": self.used_kv_ratio,
        }
        if self.gate_settings is not None:
            record["gate_settings"] = self.gate_settings
        if self.offset is not None:
            record["offset"] = self.offset
        if trained is not None and trained.tokens is not None:
            record["trained_tokens"] = trained.tokens
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PromotionEntry:
        """Return the entry that `to_record` wrote, perhaps by an earlier version with fewer keys.

        Raises:
            KeyError: If the trial is not named, or for a key of another version.
        """
        if unknown := sorted(record.keys() - EntryRecord.__annotations__.keys()):
            raise KeyError(f"unknown {', '.join(unknown)}")
        trained = baseline = gate = None
        if record.get("folder") is not None:
            trained = TrainedModel(
                folder=record["folder"],
                loss=record.get("loss"),
                kl=record.get("kl"),
                step=record.get("best_step"),
                description=record.get("shipped"),
                data_position=record.get("data_position"),
                tokens=record.get("trained_tokens"),
                last_loss=record.get("last_loss"),
                untrained_loss=record.get("untrained_loss"),
                original_loss=record.get("original_loss"),
            )
        if record.get("baseline_folder") is not None or record.get("baseline_loss") is not None:
            baseline = BaselineModel(
                folder=record.get("baseline_folder"),
                loss=record.get("baseline_loss"),
                step=record.get("baseline_step"),
            )
        if record.get("gate") or record.get("model"):
            gate = GateRecord(
                outcomes=record.get("gate", {}),
                checks=record.get("checks", {}),
                scores=record.get("measured", {}),
                model=record.get("model"),
                plain=record.get("plain", False),
                served=record.get("served"),
                kv_bytes_per_token=record.get("kv_bytes_per_token"),
            )
        return cls(
            record["trial_id"],
            record["recipe"],
            record["kv_ratio"],
            record["steps"],
            role=record.get("role", CANDIDATE),
            status=record.get("status", PENDING),
            used_kv_ratio=record.get("used_kv_ratio"),
            relaxation_remaining=record.get("relaxation_remaining"),
            name=record.get("name", ""),
            label=record.get("label", ""),
            reasons=record.get("reasons", []),
            gate_settings=record.get("gate_settings"),
            run_id=record.get("run_id"),
            trained_at=record.get("trained_at"),
            offset=record.get("offset"),
            trained=trained,
            baseline=baseline,
            gate=gate,
            lineage=record.get("lineage") or None,
            version=record.get("version"),
            model_uri=record.get("model_uri"),
        )


@dataclass
class PromotionState:
    """The content of `promotion.json`.

    Attributes:
        candidates: By trial id.
        baselines: By KV ratio.
        exported: The promoted checkpoint of the smallest cache that stock transformers loads.
        earlier: Entries that a later promotion of the same trial has replaced.
    """

    candidates: dict[str, PromotionEntry] = field(default_factory=dict)
    baselines: dict[str, PromotionEntry] = field(default_factory=dict)
    exported: str | None = None
    earlier: list[PromotionEntry] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> PromotionState:
        """Read the state; it is empty if there is no file.

        Raises:
            ConfigError: If the file holds anything else.
        """
        record: Mapping[str, Any] = read_if_there(path)
        read = PromotionEntry.from_record
        try:
            return cls(
                {key: read(entry) for key, entry in record.get("candidates", {}).items()},
                {key: read(entry) for key, entry in record.get("baselines", {}).items()},
                record.get("exported"),
                [read(entry) for entry in record.get("earlier", [])],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} does not hold the state of a promotion: {error}") from None

    def save(self, path: Path) -> None:
        """Write the state."""
        write_json(path, self.to_record())

    def to_record(self) -> PromotionRecord:
        """Return the state as it is written."""
        entries = (*self.candidates.values(), *self.baselines.values())
        return {
            "candidates": {key: entry.to_record() for key, entry in self.candidates.items()},
            "baselines": {key: entry.to_record() for key, entry in self.baselines.items()},
            "exported": self.exported,
            "earlier": [entry.to_record() for entry in self.earlier],
            "failed": [entry.trial_id for entry in entries if entry.unfinished],
        }

    def attempt(self, entry: PromotionEntry) -> int:
        """Return which attempt at the same goal an entry is; the first one is 1."""
        before = self.earlier
        for index, other in enumerate(self.earlier):
            if other is entry:
                before = self.earlier[:index]
                break
        goal = (entry.trial_id, entry.role, entry.steps)
        return 1 + sum((other.trial_id, other.role, other.steps) == goal for other in before)

    def add(
        self,
        entries: dict[str, PromotionEntry],
        key: str,
        entry: PromotionEntry,
        *,
        keep_longer: bool = False,
        reinstate: bool = False,
    ) -> None:
        """Add an entry, unless there is one with the same goal that has not failed.

        Args:
            entries: The candidates or the baselines.
            key: Of the entry.
            entry: The entry.
            keep_longer: Whether one of the same trial that was trained for more steps stays too.
            reinstate: Whether an earlier entry with the same goal that has not failed is taken
                again.
        """
        if (existing := entries.get(key)) is not None:
            longer = existing.steps > entry.steps and existing.status != PENDING
            enough = existing.steps == entry.steps or (keep_longer and longer)
            if existing.trial_id == entry.trial_id and enough and existing.status != FAILED:
                return
            self.earlier.append(existing)
        goal = (entry.trial_id, entry.role, entry.steps)
        for index, former in enumerate(self.earlier):
            alike = (former.trial_id, former.role, former.steps) == goal
            if reinstate and alike and former.status not in (PENDING, FAILED):
                entry = self.earlier.pop(index)
                break
        entries[key] = entry

    def withdraw(self, selected: Collection[str]) -> list[PromotionEntry]:
        """Withdraw untrained candidates that are not selected, and baselines that none needs.

        Args:
            selected: Ids of trials.

        Returns:
            The candidates.
        """
        unselected = [
            key
            for key, entry in self.candidates.items()
            if entry.status == PENDING and key not in selected
        ]
        withdrawn = [self.candidates.pop(key) for key in unselected]
        goals = {(entry.kv_ratio, entry.steps) for entry in self.candidates.values()}
        unneeded = [
            key
            for key, entry in self.baselines.items()
            if entry.status == PENDING and (entry.kv_ratio, entry.steps) not in goals
        ]
        self.earlier += [*withdrawn, *(self.baselines.pop(key) for key in unneeded)]
        return withdrawn

    def replaced(self, trial_id: str) -> set[int]:
        """Return the steps of unfinished trainings of a trial that no entry needs any more."""
        current = (*self.candidates.values(), *self.baselines.values())
        needed = [*current, *(entry for entry in self.earlier if entry.trained_at is not None)]
        before, still = (
            {entry.steps for entry in entries if entry.trial_id == trial_id}
            for entries in (self.earlier, needed)
        )
        return before - still


@dataclass(frozen=True)
class PromoteOutcome:
    """The result of `headfold promote`.

    Attributes:
        folder: Of the search.
        chosen: Ids of the trials that it was to promote.
    """

    folder: Path
    promotion: PromotionRecord
    chosen: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if at least one of the trials was promoted, and none of them or their baselines failed.

        Trials of earlier promotions do not count.
        """
        chosen = [self.promotion["candidates"][trial_id] for trial_id in self.chosen]
        goals = {(entry["kv_ratio"], entry["steps"]) for entry in chosen}
        baselines = self.promotion["baselines"].values()
        opponents = [entry for entry in baselines if (entry["kv_ratio"], entry["steps"]) in goals]
        failed = {entry["trial_id"] for entry in (*chosen, *opponents)} & {
            *self.promotion["failed"]
        }
        promoted = any(entry["status"] == PROMOTED for entry in chosen)
        return 0 if promoted and not failed else 1

    def to_dict(self) -> Mapping[str, Any]:
        """Return the result as `--json` writes it."""
        promoted = promoted_models(self.promotion)
        return {"folder": str(self.folder), **self.promotion, "promoted": promoted}
