"""The records of trials, for tables, reports and the promotion.

`orchestrator.storage.journal.load_trials` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, TypeGuard

from attention.conversion.relaxation_knobs import UNFINISHED
from attention.ratios import is_met, percent
from orchestrator.storage.json_files import read_json
from search_spaces.recovery.tuning import AS_CONFIGURED

if TYPE_CHECKING:
    from attention.calibration.sizes import Mixed

WAITING, RUNNING = "waiting", "running"
DONE, STOPPED, FAILED, KILLED = "done", "stopped", "failed", "killed"
COPY = "copy"  # of a trial that leads to the same model: not trained again
ENDED = (DONE, STOPPED, COPY, FAILED, KILLED)


class OriginalRecord(TypedDict):
    """The original model of a search: `original.json`."""

    model: str
    """Absolute folder, or hub name."""
    dtype: str
    """Dtype of the written weights and the counted bytes."""
    loss: float
    """Held-out loss in nats per token."""
    eval_tokens: int
    family: str
    kv_ratio: float
    kv_bytes_per_token: int
    kv_bytes_per_token_per_gpu: NotRequired[int]
    """With `search.tensor_parallel` of more than 1."""
    cache_bytes_measured: int
    """Bytes of a cache that was filled with `cache_tokens` tokens."""
    cache_tokens: int
    parameters: int
    digests: dict[str, str]
    """Digests of its `weights` and of its `calibration`."""
    mixed_moments: Mixed | None
    """Storage format of the mixed moments of its statistics."""
    seconds: float
    notes: NotRequired[list[str]]
    texts: NotRequired[dict[str, str]]
    """Digest of the token set of each split."""


class RungReport(TypedDict):
    """The report of a trial at a rung: 0 is the untrained conversion, the others are milestones.

    The journal has it whole; `TrialRecord.rungs` has the keys that differ between rungs.
    """

    step: int
    """Completed training steps, including those of a relaxation."""
    loss: float
    """Held-out loss in nats per token; None in a record that was read, where it is not finite."""
    rung: NotRequired[int]
    """Index of the rung."""
    loss_increase: NotRequired[float]
    """Over the loss of the original model."""
    kl: NotRequired[float | None]
    """Held-out KL divergence from the original model; None where a training does not distil."""
    tokens: NotRequired[int]
    """Tokens used for training."""
    seconds: NotRequired[float]
    """Time of the conversion at rung 0, of the training until then at a milestone."""
    notes: NotRequired[list[str]]

    # Of the converted model, the same at each rung
    kv_ratio: NotRequired[float]
    actual_kv_ratio: NotRequired[float]
    kv_bytes_per_token: NotRequired[int]
    cache_bytes_measured: NotRequired[int]
    cache_tokens: NotRequired[int]
    decode_seconds_per_token: NotRequired[float]
    kv_bytes_per_token_per_gpu: NotRequired[int]
    parameters: NotRequired[int]
    plan_digest: NotRequired[str]
    seed: NotRequired[int]
    similarity: NotRequired[dict[str, Any] | None]
    conversion_cost: NotRequired[dict[str, float]]
    calibration_loss: NotRequired[float]

    # Of rung 0 alone
    phases: NotRequired[dict[str, float]]
    """Seconds by phase."""
    pooled: NotRequired[bool]
    """Whether the model is one that the trial's relaxation does not start from."""
    work_digest: NotRequired[str]
    """Equal for trainings that would end with the same weights."""

    # Of milestones alone
    time: NotRequired[float]
    train_loss: NotRequired[float]
    """Mean since the milestone before."""
    learning_rate: NotRequired[float]
    gradient_norm: NotRequired[float | None]
    tokens_per_second: NotRequired[float]
    data_position: NotRequired[int]
    first_step_at: NotRequired[float | None]
    checkpoint_path: NotRequired[str]
    out_dir: NotRequired[str]
    """Folder of the finished weights, in the last report."""
    weights_digest: NotRequired[str]
    best_step: NotRequired[int]
    best_loss: NotRequired[float]
    best_kl: NotRequired[float | None]
    best_dir: NotRequired[str]
    relaxation_steps: NotRequired[int]
    collapsed_loss: NotRequired[float]
    """Held-out loss once the heads are fused, before any recovery."""
    relaxation_history: NotRequired[list[dict[str, float]]]
    relaxation_remaining: NotRequired[float | None]
    """Share of its way that the relaxation had left when the heads were fused."""
    relaxed_dir: NotRequired[str]
    teacher_logits_digest: NotRequired[str]
    """Digest of the teacher's predictions that were read from disk."""

    copy_of: NotRequired[str]
    """Added by the scheduler: the first trial that leads to the same model."""


class RungRecord(RungReport):
    """The keys of a report in `RUNG_KEYS`, and when the journal took it."""

    timestamp: float
    """In seconds since 1970."""


RUNG_KEYS = (
    "step", "rung", "loss", "loss_increase", "kl", "tokens", "train_loss", "learning_rate",
    "gradient_norm", "tokens_per_second", "seconds", "checkpoint_path", "data_position",
    "collapsed_loss", "relaxed_dir", "relaxation_steps", "relaxation_remaining", "weights_digest",
    "best_step", "best_loss", "best_kl", "best_dir", "pooled", "timestamp",
    "teacher_logits_digest",
)  # fmt: skip
"""The keys of a report that a record has for each rung."""
_NOT_REPORTED = {
    "trial_id", "recipe", "kv_ratio", "learning_rate", "seconds", "status", "rungs", "error",
    "error_log", "run_id", "choices", "relaxation", "label", "name", "started", "ended",
}  # fmt: skip
"""Fields that no report of a trial sets directly."""


_NO_SCORES: Mapping[str, Any] = {}


@dataclass
class TrialRecord:
    """A candidate and its scores.

    Attributes:
        rungs: Of the rungs reached.
        kv_bytes_per_token: Of the plan in the model's dtype.
        cache_bytes_measured: Bytes of a cache that was filled with `cache_tokens` tokens.
        kv_bytes_per_token_per_gpu: Of a tensor-parallel engine, where the search is for one.
        decode_seconds_per_token: Of its plan in the engine, where the search measures that.
        calibration_loss: Untrained, on calibration tokens, where the searcher made the plan.
        probe: Whether it was measured for the searcher alone: it ends untrained, its plan may be
            unfinished, and it is no candidate for anything.
        relaxation: Points over a relaxation stage, each with step, train_loss and what the
            relaxation measures of itself.
        copy_of: The first trial that leads to the same model; this one was not trained, its scores
            are those of that one.
        notes: Events of its training (out of memory, a damaged checkpoint).
        conversion_cost: Of the conversion before training (`orchestrator.conversion.execution`).
        label: Of its recipe where people read; `name`: of the trial
            (`orchestrator.storage.trial_names`).
        started: In seconds since 1970, like `ended`, where the journal has it.
        similarity: Of the heads that share, before and after alignment
            (`search_spaces.similarity.sharing.sharing_similarity`).
    """

    trial_id: str
    recipe: str
    kv_ratio: float
    learning_rate: float
    choices: dict[str, Any]
    status: str = WAITING
    rungs: list[RungRecord] = field(default_factory=list[RungRecord])
    kv_bytes_per_token: int | None = None
    cache_bytes_measured: int | None = None
    cache_tokens: int | None = None
    decode_seconds_per_token: float | None = None
    kv_bytes_per_token_per_gpu: int | None = None
    parameters: int | None = None
    plan_digest: str | None = None
    actual_kv_ratio: float | None = None
    seed: int | None = None
    calibration_loss: float | None = None
    probe: bool = False
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    error: str | None = None
    error_log: str | None = None
    run_id: str | None = None
    relaxation: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    similarity: dict[str, Any] | None = None
    conversion_cost: dict[str, float] | None = None
    notes: list[str] = field(default_factory=list[str])
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
        """Return a fresh record of a trial, from the suggestion of the searcher."""
        return cls(
            trial_id,
            config["recipe"],
            config["kv_ratio"],
            config["learning_rate"],
            config["choices"],
            actual_kv_ratio=config.get("used_kv_ratio"),
            seed=config.get("seed"),
            probe=bool(config.get("probe", False)),
        )

    @property
    def served_bytes(self) -> int | None:
        """The KV bytes per token that count: on each GPU of a search for several, else in all."""
        return self.kv_bytes_per_token_per_gpu or self.kv_bytes_per_token

    @property
    def last(self) -> Mapping[str, Any]:
        """The scores at the highest rung reached; empty before the first."""
        return max(self.rungs, key=lambda rung: rung["step"], default=_NO_SCORES)

    @property
    def best(self) -> Mapping[str, Any]:
        """The scores that count for this trial; empty before the first.

        They are those of lowest held-out loss, of equal ones the least trained. Tables, figures,
        the front, the choice of what is promoted and the searcher read them here. They may be of
        the untrained conversion, or of the relaxed model before any recovery. A conversion that no
        training starts from (`pooled`) counts only where nothing else was measured.
        """
        rungs = [rung for rung in self.rungs if not rung.get("pooled")] or self.rungs
        measured: list[Mapping[str, Any]] = [rung for rung in rungs if _is_finite(rung.get("loss"))]
        for rung in rungs:
            if _is_finite(loss := rung.get("collapsed_loss")):
                measured.append({"step": int(rung.get("relaxation_steps", 0)), "loss": loss})
        return min(measured, key=lambda rung: (rung["loss"], rung["step"]), default=_NO_SCORES)

    @property
    def loss(self) -> float:
        """Held-out loss of the best measured step; infinite before it and for a diverged trial."""
        return self.best["loss"] if math.isfinite(self.last_loss) else math.inf

    @property
    def last_loss(self) -> float:
        """Held-out loss at the highest rung reached; infinite before it and after a divergence."""
        value = self.last.get("loss")
        return value if _is_finite(value) else math.inf

    @property
    def remaining_distance(self) -> float | None:
        """Share of the squared distance of pairs that PostShare has left; None before it ends."""
        return self.relaxation[-1].get("distance") if self.relaxation else None

    @property
    def relaxation_remaining(self) -> float | None:
        """Share of the relaxation that was left when heads were fused; None before it ends.

        In a search before this was reported it follows from the points.
        """
        if (left := self.last.get("relaxation_remaining")) is not None:
            return left
        last = self.relaxation[-1] if self.relaxation else {}
        return last.get("mean_mask", last.get("distance"))

    @property
    def relaxation_unfinished(self) -> bool:
        """Whether heads were fused before the relaxation had brought them together."""
        return relaxation_left(self.relaxation_remaining)

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def train_seconds(self) -> float:
        """Seconds that the workers have trained; a copy is not trained."""
        return 0.0 if self.copy_of else self._last_seconds

    @property
    def spent_seconds(self) -> float:
        """Seconds that its processes have run."""
        return sum(self.seconds.values()) + self.train_seconds

    @property
    def _last_seconds(self) -> float:
        """Seconds of training of the result, which for a copy is that of another trial."""
        # A rung has the seconds of its training until then; earlier ones are in the phases
        return float(self.last.get("seconds") or 0.0) if self.step else 0.0

    @property
    def cost(self) -> dict[str, float]:
        """The cost up to the highest rung reached.

        `optimizer_steps` of single layers, `steps` of training, tokens that passed a layer
        (`fit_tokens`) and the model (`tokens`), `flops` of both (6 per parameter and token; a
        teacher is left out) and `seconds` of the conversion, of training and of measuring.
        """
        conversion = self.conversion_cost or {}
        tokens = int(self.last.get("tokens") or 0)
        return {
            "optimizer_steps": conversion.get("optimizer_steps", 0),
            "steps": self.step,
            "fit_tokens": conversion.get("tokens", 0),
            "tokens": tokens,
            "flops": conversion.get("flops", 0.0) + 6.0 * (self.parameters or 0) * tokens,
            "seconds": sum(self.seconds.values()) + self._last_seconds,
        }

    @property
    def distillation(self) -> str | None:
        """The objective of training that its recipe names; None where the search's settings do."""
        chosen = self.choices.get("settings", {}).get("recovery.distillation", AS_CONFIGURED)
        return None if chosen == AS_CONFIGURED else str(chosen)

    @property
    def untrained(self) -> RungRecord | None:
        """The scores at step 0, before any training; None before they are there. See `relaxes`."""
        return next((rung for rung in self.rungs if rung["step"] == 0), None)

    @property
    def relaxes(self) -> bool:
        """Whether its heads are fused while it trains.

        Step 0 is then the closed-form pooled conversion, which the training does not start from.
        """
        return any(rung.get("pooled") or rung.get("relaxation_steps") for rung in self.rungs)

    @property
    def usable(self) -> bool:
        """Whether the trial has a score and separate weights, did not fail, and is no probe."""
        return math.isfinite(self.loss) and self.status in (DONE, STOPPED) and not self.probe

    def add(self, report: Mapping[str, Any]) -> None:
        """Add a report of the trial; a step that was reported before (a resumed trial) is replaced.

        Args:
            report: A `RungReport`.
        """
        for name in {f.name for f in fields(self)} & report.keys() - _NOT_REPORTED:
            setattr(self, name, report[name])
        self.seconds.update(report.get("phases", {}))
        self.relaxation = report.get("relaxation_history") or self.relaxation
        rung: Any = {key: report[key] for key in RUNG_KEYS if key in report}
        others = [other for other in self.rungs if other["step"] != rung["step"]]
        self.rungs = sorted([*others, rung], key=lambda rung: rung["step"])


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def family(recipe: str) -> str:
    """Return the family of a recipe: those that the searcher has drawn (joint-...) share one."""
    return "joint" if recipe.startswith("joint-") else recipe


def unmet(point: Mapping[str, Any]) -> str:
    """Return a note on a ratio below the one that was requested; empty where that is met."""
    requested, used = point["kv_ratio_asked"], point["kv_ratio"]
    if is_met(requested, used):
        return ""
    return f" ({point.get('ceiling') or f'requested {percent(requested)}'})"


def waits_for(file: Path) -> str | None:
    """Return what a search waits for, and since when, from its file.

    Returns:
        An empty string if it has waited and does no longer, None if it has never waited.
    """
    if not file.exists():
        return None
    record = read_json(file)
    return f"{record['waits_for']} (since {record['since']})" if record.get("waits_for") else ""


POOLED_NOTE = (
    "pooled: the closed-form conversion that was measured at step 0; the relaxation of such a "
    "trial starts from unfused heads and not from it"
)
UNFINISHED_MARK = "relaxation unfinished"
UNFINISHED_SIGN = "†"
"""Suffix of a loss of trials with that mark, where a table has no column for it."""
_MOST_NAMED = 6


def relaxation_left(remaining: float | None) -> bool:
    """Return whether so much was left of a relaxation, if there was one, that it was unfinished."""
    return remaining is not None and remaining > UNFINISHED


def unfinished_note(trials: Iterable[TrialRecord]) -> str:
    """Return which relaxations were not finished, and what that means; empty if all were."""
    names = [
        f"{trial.name} ({trial.relaxation_remaining:.0%} left)"
        for trial in trials
        if trial.relaxation_unfinished
    ]
    if not names:
        return ""
    more = ", ..." if len(names) > _MOST_NAMED else ""
    trials_text = ", ".join(names[:_MOST_NAMED])
    return (
        f"{UNFINISHED_SIGN} {UNFINISHED_MARK.capitalize()}: {trials_text}{more}. "
        "Its heads were fused before it had brought them together, so the method is not shown at "
        "its best: give it more steps (rungs.steps) or a higher relaxation.rate."
    )


def counts_per_gpu(original: OriginalRecord) -> bool:
    """Whether a search counts the bytes on each GPU of a tensor-parallel engine."""
    return "kv_bytes_per_token_per_gpu" in original


def served_bytes(original: OriginalRecord) -> int:
    """Return the KV bytes per token of the original model that those of trials compare with."""
    return original.get("kv_bytes_per_token_per_gpu") or original["kv_bytes_per_token"]


def promoted_bytes(model: Mapping[str, Any], trials: Iterable[TrialRecord]) -> int | None:
    """Return the KV bytes per token of a promoted model: on each GPU where its trial has them."""
    per_gpu = {trial.trial_id: trial.kv_bytes_per_token_per_gpu for trial in trials}
    return per_gpu.get(model.get("trial_id", "")) or model.get("kv_bytes_per_token")


def without_probes(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that stand for a candidate: those that a table or picture compares."""
    return [trial for trial in trials if not trial.probe]


def front(trials: Sequence[TrialRecord], *, timed: bool = True) -> list[TrialRecord]:
    """Return the trials that no other one beats in all scores, by rising bytes.

    Scores are KV bytes per token (per GPU in a search for a tensor-parallel engine), held-out loss
    (of the best step of each) and, with `timed` and where it was measured, decode time.
    """

    def scores(trial: TrialRecord) -> tuple[float, ...]:
        seconds = (trial.decode_seconds_per_token or 0.0) if timed else 0.0
        return trial.served_bytes or 0, trial.loss, seconds

    def beats(other: TrialRecord, trial: TrialRecord) -> bool:
        return all(a <= b for a, b in zip(scores(other), scores(trial), strict=True))

    scored = [trial for trial in trials if trial.usable and trial.kv_bytes_per_token is not None]
    best: list[TrialRecord] = []
    # All trials that beat a trial, or equal it, precede it
    for trial in sorted(scored, key=lambda trial: (scores(trial), trial.trial_id)):
        if not any(beats(other, trial) for other in best):
            best.append(trial)
    return best


def ranked(trials: Sequence[TrialRecord]) -> dict[float, list[TrialRecord]]:
    """Return the usable trials of each KV ratio by rising held-out loss; KV ratios falling."""
    usable = [trial for trial in trials if trial.usable]
    by_ratio: dict[float, list[TrialRecord]] = {}
    for trial in sorted(usable, key=lambda trial: (trial.loss, trial.trial_id)):
        by_ratio.setdefault(trial.kv_ratio, []).append(trial)
    return dict(sorted(by_ratio.items(), reverse=True))


def worthwhile(trials: Sequence[TrialRecord]) -> dict[float, list[TrialRecord]]:
    """Return what `ranked` does, without the KV ratios that save nothing on a GPU.

    With tensor parallelism a smaller ratio may take as many bytes on each GPU as a larger one. It
    is left out if its best trial takes no less there, and loses no less, than that of another
    ratio.
    """
    by_ratio = ranked(trials)
    best = [group[0] for group in by_ratio.values() if group[0].kv_bytes_per_token_per_gpu]
    on_front = {trial.trial_id for trial in front(best, timed=False)}
    return {
        ratio: group
        for ratio, group in by_ratio.items()
        if not group[0].kv_bytes_per_token_per_gpu or group[0].trial_id in on_front
    }


def best_per_budget(trials: Sequence[TrialRecord]) -> dict[float, TrialRecord]:
    """Return the usable trial of lowest held-out loss at each KV ratio; KV ratios falling.

    The ratios are those of `worthwhile`.
    """
    return {kv_ratio: best[0] for kv_ratio, best in worthwhile(trials).items()}
