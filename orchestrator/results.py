"""What came out of trials: plain records on disk, written by the driver alone.

`trials.json` in the folder of a search is the one source for the table, the report, the promotion and a resumed search.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

WAITING, RUNNING, DONE, STOPPED, FAILED, KILLED = "waiting", "running", "done", "stopped", "failed", "killed"
ENDED = (DONE, STOPPED, FAILED, KILLED)
RUNG_KEYS = (
    "step",
    "rung",
    "loss",
    "rise",
    "kl",
    "tokens",
    "train_loss",
    "tokens_per_second",
    "seconds",
    "checkpoint_path",
)


@dataclass
class TrialRecord:
    """One candidate and its scores.

    `rungs` holds one mapping for each rung reached: step (training steps so far), loss (held-out, nats a token), rise
    (over the untouched model), kl (to it), tokens (trained on), seconds and what else the trial reported.
    `kv_bytes_per_token` is of the plan in the model's dtype; `cache_bytes_measured` of a prefill of `cache_tokens`.
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
    parameters: int | None = None
    plan_digest: str | None = None
    actual_kv_ratio: float | None = None
    seed: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    error_log: str | None = None
    run_id: str | None = None

    @property
    def last(self) -> dict[str, Any]:
        """The scores at the highest rung reached; empty before the first."""
        return max(self.rungs, key=lambda rung: rung["step"], default={})

    @property
    def loss(self) -> float:
        """Held-out loss at the highest rung reached; infinite before the first and for a diverged trial."""
        value = self.last.get("loss")
        return value if value is not None and math.isfinite(value) else math.inf

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def usable(self) -> bool:
        """Whether the trial has a score and did not fail."""
        return math.isfinite(self.loss) and self.status in (DONE, STOPPED)

    def add(self, result: dict[str, Any]) -> None:
        """Take over one report of the trial. A step that was reported before is replaced (a resumed trial)."""
        names = {f.name for f in fields(self)} & set(result) - {"trial_id", "recipe", "kv_ratio", "learning_rate"}
        for name in names - {"seconds", "status", "rungs", "error", "error_log", "run_id", "choices"}:
            setattr(self, name, result[name])
        self.seconds.update(result.get("phases", {}))
        rung = {key: result[key] for key in RUNG_KEYS if key in result}
        self.rungs = sorted([r for r in self.rungs if r["step"] != rung["step"]] + [rung], key=lambda r: r["step"])


def write_json(path: str | Path, record: Any) -> None:
    """Write JSON so that a reader, or a kill in the middle, never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    text = json.dumps(_finite(record), indent=1, sort_keys=True, allow_nan=False)
    fresh.write_text(text + "\n", encoding="utf-8")
    fresh.replace(path)


def _finite(record: Any) -> Any:
    """A record without nan and infinity, which JSON does not have: null in their place."""
    if isinstance(record, dict):
        return {key: _finite(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [_finite(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def number(value: float | None, form: str = ".3f") -> str:
    """A loss for a table; "-" where there is none."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def save_trials(path: str | Path, trials: Iterable[TrialRecord]) -> None:
    write_json(path, [asdict(trial) for trial in trials])


def load_trials(path: str | Path) -> list[TrialRecord]:
    """The records of a search; none if no trial has started."""
    return [TrialRecord(**record) for record in read_json(path)] if Path(path).exists() else []


def front(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that no other one beats in both held-out loss and KV bytes a token, by rising bytes.

    Trials are compared at their last rung, as they would be shipped.
    """
    scored = [t for t in trials if t.usable and t.kv_bytes_per_token is not None]
    best: list[TrialRecord] = []
    for trial in sorted(scored, key=lambda t: (t.kv_bytes_per_token, t.loss, t.trial_id)):
        if not best or trial.loss < best[-1].loss:
            best.append(trial)
    return best


def ranked(trials: Sequence[TrialRecord]) -> dict[float, list[TrialRecord]]:
    """The usable trials of each budget by rising held-out loss; budgets falling."""
    by_budget: dict[float, list[TrialRecord]] = {}
    for trial in sorted((t for t in trials if t.usable), key=lambda t: (t.loss, t.trial_id)):
        by_budget.setdefault(trial.kv_ratio, []).append(trial)
    return dict(sorted(by_budget.items(), reverse=True))


def best_per_budget(trials: Sequence[TrialRecord]) -> dict[float, TrialRecord]:
    """The usable trial of lowest held-out loss at each budget; budgets falling."""
    return {budget: best[0] for budget, best in ranked(trials).items()}
