"""How far a promotion has come: `promotion.json`, written after each step, so that a killed one goes on from there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attention.ratios import percent
from orchestrator.config.parsing import ConfigError
from orchestrator.reporting.promoted_models import promoted_models
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.records import TrialRecord

PENDING, TRAINED, PASSED, REGISTERED = "pending", "trained", "passed", "registered"
PROMOTED, REFUSED, FAILED = "promoted", "refused", "failed"
BASELINE, CANDIDATE = "baseline", "candidate"


@dataclass
class Entry:
    """One trial's way through the promotion: pending → trained → passed → registered → promoted.

    Ends as refused by the gate, or failed in training. `steps` are cumulative; losses are held out, in nats per token;
    `reasons`: why refused or failed, or why not yet registered; `gate`: the outcome of each check by name.

    What is shipped is the best measured step: `loss`, `kl`, `folder` and `data_position` (sequences of the training
    data) are of it, `best_step` says which it is and `shipped` what, in words; `last_loss` is that after all `steps`,
    `untrained_loss` that of the conversion before any. `baseline_loss` is of the baseline's best measured step,
    `baseline_step`; `original_loss` of the original model. `model`: the folder that the gate has written; `exported`:
    the same, if stock transformers loads it (`plain`); `served`: the same model for the engine of `search.target`.
    `measured`: tasks, generated text and long contexts, where asked for, of `checkpoint`, `original` and `baseline`, as
    the verb `evaluate` records them; `baseline_folder`: the weights of that baseline.
    `relaxation_remaining`: share of its way that the trial's relaxation had left when its heads were fused.
    `used_kv_ratio`: what its plan keeps, at most `kv_ratio`.
    `trained_at`: when the training was over, in seconds since 1970. `name`, `label`: of the trial and its recipe, as
    people read them.
    """

    trial_id: str
    recipe: str
    kv_ratio: float
    steps: int
    role: str = CANDIDATE
    status: str = PENDING
    loss: float | None = None
    kl: float | None = None
    best_step: int | None = None
    shipped: str | None = None
    last_loss: float | None = None
    untrained_loss: float | None = None
    baseline_loss: float | None = None
    baseline_step: int | None = None
    baseline_folder: str | None = None
    original_loss: float | None = None
    folder: str | None = None
    data_position: int | None = None
    model: str | None = None
    exported: str | None = None
    served: str | None = None
    plain: bool = False
    kv_bytes_per_token: int | None = None
    gate: dict[str, str] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    lineage: dict[str, Any] = field(default_factory=dict)
    version: str | None = None
    model_uri: str | None = None
    run_id: str | None = None
    trained_at: float | None = None
    name: str = ""
    label: str = ""
    relaxation_remaining: float | None = None
    used_kv_ratio: float | None = None

    def __post_init__(self) -> None:
        self.label = self.label or self.recipe
        self.name = self.name or f"{self.label} · {percent(self.kv_ratio)}"

    @classmethod
    def of(cls, trial: TrialRecord, steps: int, role: str = CANDIDATE) -> Entry:
        """Of a trial that is to be trained to so many steps."""
        facts = {
            "name": trial.name,
            "label": trial.label,
            "relaxation_remaining": trial.relaxation_remaining,
            "used_kv_ratio": trial.actual_kv_ratio,
        }
        return cls(trial.trial_id, trial.recipe, trial.kv_ratio, steps, role, **facts)

    @property
    def compared(self) -> dict[str, float | int | None]:
        """What a promotion compares, beside the `loss` that is shipped."""
        losses = ("untrained_loss", "last_loss", "baseline_loss", "original_loss")
        return {name: getattr(self, name) for name in (*losses, "best_step", "baseline_step")}

    @property
    def unfinished(self) -> bool:
        """Whether a step has failed that running the promotion again may carry out."""
        return self.status in (FAILED, PASSED, REGISTERED)


@dataclass
class PromotionState:
    """`promotion.json`. `earlier`: entries that a later promotion of the same trial has taken the place of."""

    candidates: dict[str, Entry] = field(default_factory=dict)
    baselines: dict[str, Entry] = field(default_factory=dict)
    exported: str | None = None
    earlier: list[Entry] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> PromotionState:
        record = read_json(path) if path.exists() else {}
        try:
            candidates, baselines = (
                {key: Entry(**entry) for key, entry in record.get(kind, {}).items()}
                for kind in ("candidates", "baselines")
            )
            earlier = [Entry(**entry) for entry in record.get("earlier", [])]
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"{path} does not hold the state of a promotion: {error}") from None
        return cls(candidates, baselines, record.get("exported"), earlier)

    def save(self, path: Path) -> None:
        write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        failed = [e.trial_id for e in (*self.candidates.values(), *self.baselines.values()) if e.unfinished]
        return asdict(self) | {"failed": failed}

    def before(self, entry: Entry) -> list[Entry]:
        """The earlier entries that were there before this one."""
        return self.earlier[: next((i for i, known in enumerate(self.earlier) if known is entry), None)]

    def add(self, entries: dict[str, Entry], key: str, fresh: Entry) -> None:
        """Take an entry up, unless it is known and on its way; one with other steps, or failed, is kept as earlier."""
        if (known := entries.get(key)) is not None:
            if known.status != FAILED and (known.trial_id, known.steps) == (fresh.trial_id, fresh.steps):
                return
            self.earlier.append(known)
        entries[key] = fresh


@dataclass(frozen=True)
class PromoteOutcome:
    """What `promote_search` returns. `chosen`: the trials that it was to promote; `exit_code` is 0 if at least one of
    them was promoted and nothing failed."""

    folder: Path
    promotion: dict[str, Any]
    chosen: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        candidates = self.promotion["candidates"]
        states = [candidates[trial_id]["status"] for trial_id in self.chosen]
        return 0 if PROMOTED in states and not self.promotion["failed"] else 1

    def to_dict(self) -> dict[str, Any]:
        promoted = promoted_models(self.promotion)
        return {"folder": str(self.folder), **self.promotion, "promoted": promoted}
