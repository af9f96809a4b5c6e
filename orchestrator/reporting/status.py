"""`headfold watch`: the state of a search, from the files in its folder, on any machine.

Hours are those reported by trials: of a trial's own process while it plans, converts and measures,
and of its workers while they train. They do not include the start of processes, nor work that is
not reported yet.
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
from typing import Any, TypedDict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from attention.base.text import compact, number
from attention.base.timing import clock
from attention.ratios import percent
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.reporting.comparison import KV_COLUMN
from orchestrator.reporting.tables import PER_GPU_COLUMN, Table, facts_table
from orchestrator.storage import records
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_if_there
from orchestrator.storage.lock import last_heartbeat
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord, front

_STATES = (records.WAITING, records.RUNNING, *records.ENDED)
_MIN_SHARE = 0.05  # of the work, before the time left is a fair estimate
_POINTS = 12  # of the front, as many as a terminal has room for


class FrontPoint(TypedDict):
    """A trial on the front, at its best step."""

    trial_id: str
    recipe: str
    label: str
    """Displayed name of the recipe."""
    kv_ratio: float
    kv_bytes_per_token: int | None
    kv_bytes_per_token_per_gpu: int | None
    step: int
    loss: float
    loss_increase: float | None
    relaxation_unfinished: bool


@dataclass(frozen=True)
class SearchStatus:
    """A search at one moment: the JSON of `headfold watch`."""

    name: str
    state: str
    """running, ended, or interrupted (it can be resumed)."""
    started: str | None
    seconds: float | None
    seconds_left: float | None
    """By the share of finished rungs."""
    trials: dict[str, int]
    """Number of trials in each state."""
    probes: int
    expected: int | None
    """Expected number of trials; None if it is not known."""
    tokens: int
    """Tokens trained on until now."""
    tokens_per_second: float
    """Speed of the running trials, as last reported."""
    unit: str
    """Unit of the hours: GPU or CPU."""
    hours_spent: float
    """By trials."""
    hours_left: float | None
    """The estimate at the start minus the hours spent; None in the promotion."""
    money_spent: float | None
    """None without a price."""
    money_left: float | None
    original_loss: float | None
    front: list[FrontPoint]
    """By rising KV bytes."""
    unfinished: str
    """A note on unfinished relaxations."""
    failures: list[str]
    promotion: dict[str, int]
    """Number of candidates in each state."""
    waits_for: str | None
    """Nodes that are slow to start."""


def read_status(folder: SearchFolder, now: datetime | None = None) -> SearchStatus:
    """Return the state of a search. Reads a few small files, writes none."""
    trials = load_trials(folder.root)
    state = read_if_there(folder.state)
    original_loss = read_if_there(folder.original).get("loss")
    estimate = read_if_there(folder.estimate)
    candidates = read_if_there(folder.promotion).get("candidates", {})
    config = _config(folder)
    now = now or datetime.now(UTC)
    dead_since = last_heartbeat(folder.lock, now.timestamp())
    seconds = search_seconds(folder, state, now)
    search_state = _state(state, trials, driver_lives=dead_since is None)
    running = search_state == "running"
    unit, spent = hours_spent(trials, config)
    estimated = estimate.get(f"{unit.lower()}_hours")
    left = None
    # The hours of promotions are not known before they end
    if running and estimated is not None and not candidates:
        left = max(0.0, estimated - spent)
    price = config.resources.price_per_hour if config else None
    rungs = len(config.rungs.steps) if config else 1
    # Running trials count with their measurements until now
    under_way = (records.RUNNING, records.WAITING, records.KILLED)
    so_far = [replace(t, status=records.STOPPED) if t.status in under_way else t for t in trials]
    return SearchStatus(
        name=folder.root.name,
        state=search_state,
        started=state.get("started"),
        seconds=seconds,
        seconds_left=(seconds_left(trials, estimate, rungs, seconds) if running else None),
        trials={name: sum(t.status == name for t in trials) for name in _STATES},
        probes=sum(t.probe for t in trials),
        expected=estimate.get("trials"),
        tokens=sum(int(t.last.get("tokens") or 0) for t in trials if t.copy_of is None),
        tokens_per_second=tokens_per_second(trials),
        unit=unit,
        hours_spent=spent,
        hours_left=left,
        money_spent=None if price is None else price * spent,
        money_left=None if price is None or left is None else price * left,
        original_loss=original_loss,
        front=[_front_point(t, original_loss) for t in front(so_far)],
        unfinished=records.unfinished_note(records.without_probes(trials)),
        failures=[f"{t.name}: {t.error}" for t in trials if t.status == records.FAILED],
        promotion=dict(Counter(candidate["status"] for candidate in candidates.values())),
        waits_for=(records.waits_for(folder.waiting) or None) if running else None,
    )


def hours_spent(trials: Iterable[TrialRecord], config: SearchConfig | None) -> tuple[str, float]:
    """Return the unit, and the hours that trials have reported."""
    if config is None:
        return "CPU", sum(t.spent_seconds for t in trials) / 3600
    train = config.train
    resources = config.resources
    gpus = train.gpus_per_worker
    workers = train.num_workers * (gpus or train.cpus_per_worker)
    process = resources.trial_gpus if gpus else max(1.0, resources.trial_cpus)
    seconds = sum(process * sum(t.seconds.values()) + workers * t.train_seconds for t in trials)
    return "GPU" if gpus else "CPU", seconds / 3600


def tokens_per_second(trials: Iterable[TrialRecord]) -> float:
    """Return the speed of all trials that train now, as last reported by each."""
    running = [t for t in trials if t.status == records.RUNNING]
    return sum(float(t.last.get("tokens_per_second") or 0) for t in running)


def seconds_left(
    trials: Sequence[TrialRecord],
    estimate: Mapping[str, Any],
    rungs: int,
    elapsed: float | None,
) -> float | None:
    """Return the remaining seconds, by the share of finished trials and rungs.

    In the first half of the work the estimate made before the search counts too, the more the
    less is done: the first trials may be those of the fastest recipes.

    Args:
        trials: All started trials.
        estimate: That of the search: `trials`, `hours`; empty if it has none.
        rungs: Rungs of a trial.
        elapsed: Seconds since the start.

    Returns:
        None before 5 % of the work is done, and where it cannot be estimated.
    """
    expected = estimate.get("trials")
    if not expected or elapsed is None:
        return None
    done = sum(1.0 if t.status in records.ENDED else len(t.rungs) / rungs for t in trials)
    share = done / expected
    if share < _MIN_SHARE or share >= 1:
        return None
    by_share = elapsed * (1 - share) / share
    hours = estimate.get("hours")
    if hours is None:
        return by_share
    weight = min(1.0, 2 * share)
    by_estimate = max(0.0, 3600 * hours - elapsed)
    return weight * by_share + (1 - weight) * max(by_share, by_estimate)


def _config(folder: SearchFolder) -> SearchConfig | None:
    try:
        return parse_config(folder.stored(), where=str(folder.snapshot))
    except ConfigError:
        return None  # of another version: values derived from the settings are left out


def _state(state: Mapping[str, Any], trials: Sequence[TrialRecord], *, driver_lives: bool) -> str:
    if "ended" in state:
        return "ended"
    if not driver_lives:
        return "interrupted"
    if "seconds" not in state or "resumed" in state:
        return "running"
    return "running" if any(t.status == records.RUNNING for t in trials) else "interrupted"


def search_seconds(folder: SearchFolder, state: Mapping[str, Any], now: datetime) -> float | None:
    """Return the time of all drivers of a search, of one that was killed until it was last seen.

    Args:
        folder: Of the search.
        state: Its state.
        now: The present.
    """
    if (dead_since := last_heartbeat(folder.lock, now.timestamp())) is not None:
        now = datetime.fromtimestamp(dead_since, UTC)
    earlier = float(state.get("seconds", 0.0))
    if "seconds" in state and "resumed" not in state:
        return earlier
    if (began := state.get("resumed") or state.get("started")) is None:
        return None
    return earlier + max(0.0, (now - datetime.fromisoformat(began)).total_seconds())


def _front_point(trial: TrialRecord, original_loss: float | None) -> FrontPoint:
    return {
        "trial_id": trial.trial_id,
        "recipe": trial.recipe,
        "label": trial.label,
        "kv_ratio": trial.kv_ratio,
        "kv_bytes_per_token": trial.kv_bytes_per_token,
        "kv_bytes_per_token_per_gpu": trial.kv_bytes_per_token_per_gpu,
        "step": trial.best.get("step", 0),
        "loss": trial.loss,
        "loss_increase": None if original_loss is None else trial.loss - original_loss,
        "relaxation_unfinished": trial.relaxation_unfinished,
    }


# ---- on a terminal, and elsewhere ----------------------------------------------------------------


def status_facts(status: SearchStatus) -> dict[str, str]:
    """Return the numbers as text by topic; unknown ones are left out."""
    facts = {"state": status.state}
    if status.waits_for is not None:
        facts["waits for"] = status.waits_for
    if status.seconds is not None:
        left = status.seconds_left
        facts["time"] = clock(status.seconds) + (
            "" if left is None else f", about {clock(left)} left"
        )
    ended = sum(status.trials[name] for name in records.ENDED)
    counts = [f"{count} {name}" for name, count in status.trials.items() if count]
    probes = f" ({status.probes} probes)" if status.probes else ""
    states = ", ".join(counts) or "none yet"
    facts["trials"] = f"{ended}/{status.expected or '?'} finished: {states}{probes}"
    rate = status.tokens_per_second
    facts["tokens"] = compact(status.tokens) + (f", {compact(rate)}/s now" if rate else "")
    hours = f"{status.hours_spent:.2f} {status.unit}-hours of trials"
    facts["spent"] = hours + _remaining_text(status.hours_left)
    if status.money_spent is not None:
        facts["money"] = f"{status.money_spent:.2f}{_remaining_text(status.money_left)}"
    if status.promotion:
        facts["promotion"] = ", ".join(
            f"{count} {name}" for name, count in status.promotion.items()
        )
    return facts


def _remaining_text(amount: float | None) -> str:
    return "" if amount is None else f", about {amount:.2f} left"


def status_view(status: SearchStatus) -> Group:
    """Return facts, front and failures for a terminal."""
    facts = facts_table(status_facts(status)).for_terminal(show_header=False)
    parts: list[RenderableType] = [Text(status.name, style="bold"), facts]
    if status.front:
        per_gpu = any(point["kv_bytes_per_token_per_gpu"] for point in status.front)
        more = (PER_GPU_COLUMN,) * per_gpu
        columns = ("recipe", KV_COLUMN, "KV bytes/token", *more, "at step", "loss", "loss increase")
        rows = [
            (
                point["label"],
                percent(point["kv_ratio"]),
                str(point["kv_bytes_per_token"]),
                *(str(point["kv_bytes_per_token_per_gpu"]),) * per_gpu,
                str(point["step"]),
                number(point["loss"]) + records.UNFINISHED_SIGN * point["relaxation_unfinished"],
                number(point["loss_increase"], "+z.3f"),
            )
            for point in status.front[:_POINTS]
        ]
        table = Table(columns, rows)
        parts.append(table.for_terminal(title="current front", title_justify="left"))
    if status.unfinished:
        parts.append(Text(status.unfinished, style="yellow"))
    parts += [Text(f"failed: {failure}", style="red") for failure in status.failures[-3:]]
    return Group(*parts)


def status_line(status: SearchStatus) -> str:
    """Return the status in one line, for a log."""
    points = [
        f"{percent(point['kv_ratio'])} {number(point['loss'])} ({point['label']})"
        for point in reversed(status.front[-_POINTS:])
    ]
    parts = [f"{name} {text}" for name, text in status_facts(status).items() if name != "state"]
    parts.append(f"front {', '.join(points) or 'none yet'}")
    if status.unfinished:
        parts.append(status.unfinished)
    return f"{status.name} {status.state} | " + " | ".join(parts)


def watch_search(
    folder: SearchFolder,
    *,
    every: float = 2.0,
    once: bool = False,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> SearchStatus:
    """Show a search until it ends: updated in place on a terminal, else one line per change.

    Args:
        folder: Of the search.
        every: Seconds between two updates.
        once: Whether to show the state once and return.
        console: The console to print to.
        sleep: Function that waits for some seconds.
    """
    out = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    printed = ""
    live_view = Live(console=out, auto_refresh=False)
    with live_view if out.is_terminal and not once else nullcontext() as live:
        while True:
            status = read_status(folder)
            if live is not None:
                live.update(status_view(status), refresh=True)
            elif out.is_terminal:
                out.print(status_view(status))
            else:
                fields = asdict(status).items()
                content = json.dumps({k: v for k, v in fields if not k.startswith("seconds")})
                if content != printed:
                    out.print(status_line(status), markup=False)
                    printed = content
            if once or status.state != "running":
                return status
            sleep(every)
