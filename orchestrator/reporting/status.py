"""`headfold watch`: where a search stands, from the files in its folder; it need not run on this machine.

Hours are those of trials as they have reported them: a trial's own process while it plans, converts and measures, and
its workers while they train. What processes take to start, and what has not been reported yet, is not in them.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from attention.base.text import compact, number
from attention.base.timing import clock
from attention.ratios import percent
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.reporting.comparison import OF_THE_CHECKPOINT
from orchestrator.reporting.tables import Table, facts_table
from orchestrator.storage import records
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord, front

STATES = (records.WAITING, records.RUNNING, *records.ENDED)
POINTS = 12  # of the front, as many as a terminal has room for


@dataclass(frozen=True)
class View:
    """A search at one moment.

    `state`: "running", "ended", or "interrupted" (it can be resumed). `trials`: how many are in each state; `expected`:
    how many there will be, None if the search has not told. `tokens`: trained on so far; `tokens_per_second`: of the
    trials under way, as last reported. `hours_spent`, `hours_left` of `unit` ("GPU" or "CPU"), `money_spent`,
    `money_left` where there is a price; left is what the estimate at the start says, less what is spent. `front`: by
    rising KV bytes. `unfinished`: what to say of relaxations that did not come to their end. `seconds_left`: by the
    share of rungs that is behind. `waits_for`: nodes that are slow to come.
    """

    name: str
    state: str
    started: str | None
    seconds: float | None
    seconds_left: float | None
    trials: dict[str, int]
    probes: int
    expected: int | None
    tokens: int
    tokens_per_second: float
    unit: str
    hours_spent: float
    hours_left: float | None
    money_spent: float | None
    money_left: float | None
    original_loss: float | None
    front: list[dict[str, Any]]
    unfinished: str
    failures: list[str]
    promotion: dict[str, int]
    waits_for: str | None


def read_status(folder: SearchFolder, now: datetime | None = None) -> View:
    """Where the search of a folder stands. Reads a few small files, writes none."""
    trials = load_trials(folder.root)
    under_way = (records.RUNNING, records.WAITING, records.KILLED)  # these count with what was measured so far
    so_far = [replace(t, status=records.STOPPED) if t.status in under_way else t for t in trials]
    state = read_json(folder.state) if folder.state.exists() else {}
    original = read_json(folder.original) if folder.original.exists() else {}
    estimate = read_json(folder.estimate) if folder.estimate.exists() else {}
    promotion = read_json(folder.promotion) if folder.promotion.exists() else {}
    config = _config(folder)
    seconds = _seconds(state, now or datetime.now(UTC))
    stands = _state(state, trials)
    unit, spent = hours_spent(trials, config)
    estimated = estimate.get(f"{unit.lower()}_hours")
    running = stands == "running"
    left = max(0.0, estimated - spent) if running and estimated is not None else None
    price = config.resources.price_per_hour if config else None
    rungs = len(config.rungs.steps) if config else 1
    return View(
        name=folder.root.name,
        state=stands,
        started=state.get("started"),
        seconds=seconds,
        seconds_left=seconds_left(trials, estimate.get("trials"), rungs, seconds) if running else None,
        trials={name: sum(t.status == name for t in trials) for name in STATES},
        probes=sum(t.probe for t in trials),
        expected=estimate.get("trials"),
        tokens=sum(int(t.last.get("tokens") or 0) for t in trials if t.copy_of is None),
        tokens_per_second=tokens_per_second(trials),
        unit=unit,
        hours_spent=spent,
        hours_left=left,
        money_spent=None if price is None else price * spent,
        money_left=None if price is None or left is None else price * left,
        original_loss=original.get("loss"),
        front=[_point(t, original.get("loss")) for t in front(so_far)],
        unfinished=records.unfinished_note(records.without_probes(trials)),
        failures=[f"{t.name}: {t.error}" for t in trials if t.status == records.FAILED],
        promotion=dict(Counter(entry["status"] for entry in promotion.get("candidates", {}).values())),
        waits_for=(records.waits_for(folder.waiting) or None) if running else None,
    )


def hours_spent(trials: Iterable[TrialRecord], config: SearchConfig | None) -> tuple[str, float]:
    """The unit, and the hours of it that trials have reported."""
    if config is None:
        return "CPU", sum(sum(t.seconds.values()) + _trained(t) for t in trials) / 3600
    gpus, train = config.train.gpus_per_worker, config.train
    workers = train.num_workers * (gpus or train.cpus_per_worker)
    driving = config.resources.trial_gpus if gpus else max(1.0, config.resources.trial_cpus)
    seconds = sum(driving * sum(t.seconds.values()) + workers * _trained(t) for t in trials)
    return "GPU" if gpus else "CPU", seconds / 3600


def _trained(trial: TrialRecord) -> float:
    """Seconds that the workers of a trial have worked."""
    return float(trial.last.get("seconds") or 0.0) if trial.step and trial.copy_of is None else 0.0


def tokens_per_second(trials: Iterable[TrialRecord]) -> float:
    """Of the trials that train now, together, each as it last reported."""
    return sum(float(t.last.get("tokens_per_second") or 0) for t in trials if t.status == records.RUNNING)


def seconds_left(
    trials: Sequence[TrialRecord], expected: int | None, rungs: int, elapsed: float | None
) -> float | None:
    """By the share of trials and rungs that is behind; None before the first report, and where it cannot be told."""
    if not expected or elapsed is None:
        return None
    behind = sum(1.0 if t.status in records.ENDED else len(t.rungs) / rungs for t in trials)
    return elapsed * (expected - behind) / behind if 0 < behind < expected else None


def _config(folder: SearchFolder) -> SearchConfig | None:
    try:
        return parse_config(folder.stored(), where=str(folder.snapshot))
    except ConfigError:
        return None  # of another version: what follows from the settings is left out


def _state(state: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str:
    if "ended" in state:
        return "ended"
    if "seconds" not in state or any(t.status == records.RUNNING for t in trials):
        return "running"
    return "interrupted" if any(t.status == records.KILLED for t in trials) or not trials else "ended"


def _seconds(state: Mapping[str, Any], now: datetime) -> float | None:
    if "seconds" in state:
        return float(state["seconds"])
    return (now - datetime.fromisoformat(state["started"])).total_seconds() if state.get("started") else None


def _point(trial: TrialRecord, original_loss: float | None) -> dict[str, Any]:
    return {
        "trial_id": trial.trial_id,
        "recipe": trial.recipe,
        "label": trial.label,
        "kv_ratio": trial.kv_ratio,
        "kv_bytes_per_token": trial.kv_bytes_per_token,
        "step": trial.best.get("step", 0),
        "loss": trial.loss,
        "loss_increase": None if original_loss is None else trial.loss - original_loss,
        "relaxation_unfinished": trial.relaxation_unfinished,
    }


# ---- on a terminal, and elsewhere -------------------------------------------------------------------------------


def facts(view: View) -> dict[str, str]:
    """The view's numbers in words, by what they are about; what is not known is left out."""
    ended = sum(view.trials[name] for name in records.ENDED)
    states = ", ".join(f"{count} {name}" for name, count in view.trials.items() if count) or "none yet"
    words = {"state": view.state}
    if view.waits_for is not None:
        words["waits for"] = view.waits_for
    if view.seconds is not None:
        left = "" if view.seconds_left is None else f", about {clock(view.seconds_left)} left"
        words["time"] = clock(view.seconds) + left
    words["trials"] = f"{ended}/{view.expected or '?'} ended: {states}" + (
        f" ({view.probes} probes)" if view.probes else ""
    )
    rate = f", {compact(view.tokens_per_second)}/s now" if view.tokens_per_second else ""
    words["tokens"] = f"{compact(view.tokens)}{rate}"
    words["spent"] = f"{view.hours_spent:.2f} {view.unit}-hours{_left(view.hours_left)}"
    if view.money_spent is not None:
        words["money"] = f"{view.money_spent:.2f}{_left(view.money_left)}"
    if view.promotion:
        words["promotion"] = ", ".join(f"{count} {name}" for name, count in view.promotion.items())
    return words


def _left(amount: float | None) -> str:
    return "" if amount is None else f", about {amount:.2f} left"


def picture(view: View) -> Group:
    """The view for a terminal: facts, front, failures."""
    parts: list[Any] = [Text(view.name, style="bold"), facts_table(facts(view)).for_terminal(show_header=False)]
    if view.front:
        rows = [
            (p["label"], percent(p["kv_ratio"]), str(p["kv_bytes_per_token"]), str(p["step"]), number(p["loss"]),
             number(p["loss_increase"], "+.3f"))
            for p in view.front[:POINTS]
        ]  # fmt: skip
        columns = ("recipe", OF_THE_CHECKPOINT, "KV bytes/token", "at step", "loss", "loss increase")
        parts.append(Table(columns, rows).for_terminal(title="front so far", title_justify="left"))
    if view.unfinished:
        parts.append(Text(view.unfinished, style="yellow"))
    parts += [Text(f"failed: {text}", style="red") for text in view.failures[-3:]]
    return Group(*parts)


def line(view: View) -> str:
    """The view in one line, for a log."""
    best = ", ".join(
        f"{percent(p['kv_ratio'])} {number(p['loss'])} ({p['label']})" for p in reversed(view.front[-POINTS:])
    )
    parts = [f"{name} {value}" for name, value in facts(view).items() if name != "state"]
    parts += [f"front {best or 'none yet'}", *([view.unfinished] if view.unfinished else [])]
    return f"{view.name} {view.state} | " + " | ".join(parts)


def watch_search(
    folder: SearchFolder,
    *,
    every: float = 2.0,
    once: bool = False,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> View:
    """Show a search until it ends: in place on a terminal, else a line whenever something has changed."""
    out = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    shown = ""
    with Live(console=out, auto_refresh=False) if out.is_terminal and not once else nullcontext() as live:
        while True:
            view = read_status(folder)
            fixed = json.dumps({k: v for k, v in asdict(view).items() if not k.startswith("seconds")})
            if live is not None:
                live.update(picture(view), refresh=True)
            elif out.is_terminal:
                out.print(picture(view))
            elif fixed != shown:
                out.print(line(view), markup=False)
                shown = fixed
            if once or view.state != "running":
                return view
            sleep(every)
