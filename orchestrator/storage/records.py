"""What came out of trials, for the table, the report and the promotion: `orchestrator.storage.journal.load_trials`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from attention.conversion.relaxation_knobs import UNFINISHED
from attention.ratios import is_met, percent
from orchestrator.storage.json_files import read_json

WAITING, RUNNING, DONE, STOPPED, FAILED, KILLED = "waiting", "running", "done", "stopped", "failed", "killed"
COPY = "copy"  # of a trial that leads to the same model: not trained again
ENDED = (DONE, STOPPED, COPY, FAILED, KILLED)
RUNG_KEYS = (
    "step", "rung", "loss", "loss_increase", "kl", "tokens", "train_loss", "learning_rate", "gradient_norm",
    "tokens_per_second", "seconds",
    "checkpoint_path", "data_position", "collapsed_loss", "relaxed_dir", "relaxation_steps", "relaxation_remaining",
    "weights_digest", "best_step", "best_loss", "best_kl", "best_dir", "pooled", "timestamp",
)  # fmt: skip
"""What is kept of a report for each rung."""
NOT_REPORTED = {"trial_id", "recipe", "kv_ratio", "learning_rate", "seconds", "status", "rungs", "error", "error_log",
                "run_id", "choices", "relaxation", "label", "name", "started", "ended"}  # fmt: skip
"""Fields that no report of a trial sets directly."""


@dataclass
class TrialRecord:
    """One candidate and its scores.

    `rungs` holds one mapping for each rung reached: step (training steps so far), loss (held-out, nats per token),
    increase (over the original model), kl (to it), tokens (trained on), seconds and what else the trial reported.
    `kv_bytes_per_token` is of the plan in the model's dtype; `cache_bytes_measured` of a prefill of `cache_tokens`.
    `decode_seconds_per_token`: of its plan in the engine, where the search measures that.
    `calibration_loss`: untrained, on calibration tokens, where the searcher made the plan. A `probe` was measured for
    the searcher alone: it ends untrained, its plan may be unfinished, and it is no candidate for anything.
    `relaxation`: points over a relaxation stage, each with step, train_loss and what the relaxation measures of itself.
    `copy_of`: the first trial that leads to the same model; this one was not trained, its scores are those of that one.
    `notes`: what its training met and went on from (out of memory, a damaged checkpoint).
    `conversion_cost`: what the conversion took before any training (`orchestrator.conversion.execution.cost`).
    `label` and `name`: what its recipe and itself are called where people read (`orchestrator.storage.trial_names`).
    `started`, `ended`: in seconds since 1970, where the journal tells.
    `similarity`: of the heads that share, before and after alignment
    (`search_spaces.similarity.sharing.sharing_similarity`).
    """

    trial_id: str
    recipe: str
    kv_ratio: float
    learning_rate: float
    choices: dict[str, Any]
    status: str = WAITING
    rungs: list[dict[str, Any]] = field(default_factory=list)
    kv_bytes_per_token: int | None = None
    cache_bytes_measured: int | None = None
    cache_tokens: int | None = None
    decode_seconds_per_token: float | None = None
    parameters: int | None = None
    plan_digest: str | None = None
    actual_kv_ratio: float | None = None
    seed: int | None = None
    calibration_loss: float | None = None
    probe: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    error_log: str | None = None
    run_id: str | None = None
    relaxation: list[dict[str, Any]] = field(default_factory=list)
    similarity: dict[str, Any] | None = None
    conversion_cost: dict[str, float] | None = None
    notes: list[str] = field(default_factory=list)
    copy_of: str | None = None
    label: str = ""
    name: str = ""
    started: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        self.label = self.label or self.recipe
        self.name = self.name or f"{self.label} · {percent(self.kv_ratio)}"

    @classmethod
    def of(cls, trial_id: str, config: Mapping[str, Any]) -> TrialRecord:
        """A fresh record of a trial, from what the searcher has suggested."""
        given = {name: config[name] for name in ("recipe", "kv_ratio", "learning_rate", "choices")}
        more: dict[str, Any] = {"seed": config.get("seed"), "actual_kv_ratio": config.get("used_kv_ratio")}
        return cls(trial_id, **given, probe=bool(config.get("probe", False)), **more)

    @property
    def last(self) -> dict[str, Any]:
        """The scores at the highest rung reached; empty before the first."""
        return max(self.rungs, key=lambda rung: rung["step"], default={})

    @property
    def best(self) -> dict[str, Any]:
        """The scores that count for this trial, those of lowest held-out loss (of equal ones the least trained); empty
        before the first. Tables, figures, the front, the choice of what is promoted and the searcher read them here.

        They may be of the untrained conversion, or of the model that a relaxation came to before any recovery. A
        conversion that no training starts from (`pooled`) counts only where nothing else was measured.
        """
        rungs = [rung for rung in self.rungs if not rung.get("pooled")] or self.rungs
        measured = [rung for rung in rungs if _is_finite(rung.get("loss"))]
        measured += [
            {"step": int(rung.get("relaxation_steps", 0)), "loss": rung["collapsed_loss"]}
            for rung in rungs
            if _is_finite(rung.get("collapsed_loss"))
        ]
        return min(measured, key=lambda rung: (rung["loss"], rung["step"]), default={})

    @property
    def loss(self) -> float:
        """Held-out loss of the best measured step; infinite before the first and for a diverged trial."""
        return self.best["loss"] if math.isfinite(self.last_loss) else math.inf

    @property
    def last_loss(self) -> float:
        """Held-out loss at the highest rung reached; infinite before the first and for a diverged trial."""
        value = self.last.get("loss")
        return value if _is_finite(value) else math.inf

    @property
    def remaining_distance(self) -> float | None:
        """What PostShare's pull has left of the squared distance of the pairs; None without one that has ended."""
        return self.relaxation[-1].get("distance") if self.relaxation else None

    @property
    def relaxation_remaining(self) -> float | None:
        """Share of its way that the trial's relaxation had left when its heads were fused; None without one that has
        ended. Of a search before this was reported: what its history tells."""
        if (left := self.last.get("relaxation_remaining")) is not None:
            return left
        last = self.relaxation[-1] if self.relaxation else {}
        return last.get("mean_mask", last.get("distance"))

    @property
    def relaxation_unfinished(self) -> bool:
        """Whether heads were fused before the relaxation had brought them together."""
        left = self.relaxation_remaining
        return left is not None and left > UNFINISHED

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def cost(self) -> dict[str, float]:
        """What it took up to the highest rung reached: `optimizer_steps` of single layers, `steps` of training, tokens
        that went through a layer (`fit_tokens`) and through the model (`tokens`), `flops` of both (6 a parameter and
        token; a teacher is left out) and `seconds` of the conversion, of training and of measuring."""
        spent, tokens = self.conversion_cost or {}, int(self.last.get("tokens") or 0)
        # A rung tells how long it trained so far; what came before is in the phases.
        trained = float(self.last.get("seconds") or 0.0) if self.step else 0.0
        return {
            "optimizer_steps": spent.get("optimizer_steps", 0),
            "steps": self.step,
            "fit_tokens": spent.get("tokens", 0),
            "tokens": tokens,
            "flops": spent.get("flops", 0.0) + 6.0 * (self.parameters or 0) * tokens,
            "seconds": sum(self.seconds.values()) + trained,
        }

    @property
    def untrained(self) -> dict[str, Any] | None:
        """The scores at step 0, before any training; None before they are there. See `relaxes`."""
        return next((rung for rung in self.rungs if rung["step"] == 0), None)

    @property
    def relaxes(self) -> bool:
        """Whether its heads are fused while it trains: what was measured at step 0 is then the closed-form pooled
        conversion, which the training does not start from."""
        return any(rung.get("pooled") or rung.get("relaxation_steps") for rung in self.rungs)

    @property
    def usable(self) -> bool:
        """Whether the trial has a score and weights of its own, did not fail, and is no probe."""
        return math.isfinite(self.loss) and self.status in (DONE, STOPPED) and not self.probe

    def add(self, result: dict[str, Any]) -> None:
        """Take over one report of the trial. A step that was reported before is replaced (a resumed trial)."""
        for name in {f.name for f in fields(self)} & result.keys() - NOT_REPORTED:
            setattr(self, name, result[name])
        self.seconds.update(result.get("phases", {}))
        self.relaxation = result.get("relaxation_history") or self.relaxation
        rung = {key: result[key] for key in RUNG_KEYS if key in result}
        self.rungs = sorted([r for r in self.rungs if r["step"] != rung["step"]] + [rung], key=lambda r: r["step"])


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def family(recipe: str) -> str:
    """The name that a trial is drawn under: candidates of the searcher's own (joint-...) share one."""
    return "joint" if recipe.startswith("joint-") else recipe


def unmet(point: Mapping[str, Any]) -> str:
    """What to say of a ratio below the one that was requested; nothing where that is met."""
    requested, used = point["kv_ratio_asked"], point["kv_ratio"]
    return "" if is_met(requested, used) else f" ({point.get('ceiling') or f'requested {percent(requested)}'})"


def waits_for(file: Path) -> str | None:
    """What a search waits for, and since when, by its file; "" if it has waited and does no longer."""
    if not file.exists():
        return None
    record = read_json(file)
    return f"{record['waits_for']} (since {record['since']})" if record.get("waits_for") else ""


POOLED_NOTE = (
    "pooled: the closed-form conversion that was measured at step 0; the relaxation of such a trial starts from "
    "unfused heads and not from it"
)


UNFINISHED_MARK = "relaxation unfinished"


def unfinished_note(trials: Iterable[TrialRecord]) -> str:
    """Say which relaxations did not come to their end, and what that means; "" if all did."""
    left = [f"{t.name} ({t.relaxation_remaining:.0%} left)" for t in trials if t.relaxation_unfinished]
    if not left:
        return ""
    return (
        f"{UNFINISHED_MARK.capitalize()}: {', '.join(left[:MOST_NAMED])}{', ...' if len(left) > MOST_NAMED else ''}. "
        "Its heads were fused before it had brought them together, so the method is not shown at its best: give it "
        "more steps (rungs.steps) or a higher relaxation.rate."
    )


MOST_NAMED = 6


def without_probes(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The trials that stand for a candidate: those that a table or picture compares."""
    return [trial for trial in trials if not trial.probe]


def front(trials: Sequence[TrialRecord], *, timed: bool = True) -> list[TrialRecord]:
    """The trials that no other one beats in all of KV bytes a token, held-out loss (of the best step of each) and, with
    `timed` and where it was measured, decode time, by rising bytes."""

    def scores(trial: TrialRecord) -> tuple[float, ...]:
        return trial.kv_bytes_per_token or 0, trial.loss, (trial.decode_seconds_per_token or 0.0) if timed else 0.0

    scored = [t for t in trials if t.usable and t.kv_bytes_per_token is not None]
    best: list[TrialRecord] = []
    for trial in sorted(scored, key=lambda t: (scores(t), t.trial_id)):  # whoever beats it, or equals it, comes first
        if not any(all(a <= b for a, b in zip(scores(kept), scores(trial), strict=True)) for kept in best):
            best.append(trial)
    return best


def ranked(trials: Sequence[TrialRecord]) -> dict[float, list[TrialRecord]]:
    """The usable trials of each KV ratio by rising held-out loss; KV ratios falling."""
    by_budget: dict[float, list[TrialRecord]] = {}
    for trial in sorted((t for t in trials if t.usable), key=lambda t: (t.loss, t.trial_id)):
        by_budget.setdefault(trial.kv_ratio, []).append(trial)
    return dict(sorted(by_budget.items(), reverse=True))


def best_per_budget(trials: Sequence[TrialRecord]) -> dict[float, TrialRecord]:
    """The usable trial of lowest held-out loss at each KV ratio; KV ratios falling."""
    return {kv_ratio: best[0] for kv_ratio, best in ranked(trials).items()}
