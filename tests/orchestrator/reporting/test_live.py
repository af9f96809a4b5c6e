"""The state of a search, from its folder: on a terminal, as lines, as JSON."""

from __future__ import annotations

import io
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from journals import write_journal
from rich.console import Console
from typer.testing import CliRunner

from orchestrator import pipeline
from orchestrator.config.schema import parse_config
from orchestrator.main import app
from orchestrator.reporting import status as live
from orchestrator.reporting.tables import trial_table
from orchestrator.storage import records
from orchestrator.storage.json_files import write_json
from orchestrator.storage.lock import SearchLock
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord

CONFIG = {
    "name": "mine",
    "model": {"path": "m"},
    "search": {"kv_ratios": [0.5, 0.25]},
    "rungs": {"steps": [0, 8, 24]},
    "train": {"num_workers": 2, "batch_size": 8, "cpus_per_worker": 1.0},
    "resources": {"price_per_hour": 3.0},
}
NOW = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)


def trial(number: int, budget: float, losses: list[float], status: str, **more: Any) -> TrialRecord:
    rungs = [
        {"step": 8 * i, "loss": loss, "tokens": 1000 * i, "tokens_per_second": 50.0 * bool(i), "seconds": 360.0 * i}
        for i, loss in enumerate(losses)
    ]
    facts = {"kv_bytes_per_token": int(8192 * budget), "seconds": {"plan": 36.0}}
    return TrialRecord(f"t{number}", f"arm{number}", budget, 1e-3, {}, status, rungs, **{**facts, **more})


@pytest.fixture
def folder(tmp_path: Path) -> SearchFolder:
    created = SearchFolder.fresh(tmp_path, "mine")
    write_journal(created.root)
    created.snapshot.write_text(yaml.safe_dump(parse_config(CONFIG).model_dump(mode="json")))
    write_json(created.state, {"started": "2026-01-01T12:00:00+00:00"})
    write_json(created.original, {"loss": 2.0})
    write_json(created.estimate, {"trials": 8, "cpu_hours": 2.0, "gpu_hours": 0.0})
    return created


def started(folder: SearchFolder) -> None:
    write_journal(
        folder.root,
        [
            trial(1, 0.5, [3.0, 2.5], records.DONE),
            trial(2, 0.25, [4.0, 2.8], records.RUNNING),
            trial(3, 0.25, [5.0], records.STOPPED),
            trial(4, 0.25, [], records.FAILED, error="ValueError: no"),
        ],
    )


def test_the_view_counts_what_was_reported(folder: SearchFolder) -> None:
    started(folder)
    view = live.read_status(folder, NOW)
    assert view.state == "running"
    assert (view.trials["done"], view.trials["running"], view.trials["failed"], view.expected) == (1, 1, 1, 8)
    assert view.seconds == 1800
    assert view.tokens == 2000
    assert view.tokens_per_second == 50.0
    # three trials have planned for 36 s on a CPU, two trained for 360 s on two workers of one CPU each
    assert view.hours_spent == pytest.approx((3 * 36 + 2 * 2 * 360) / 3600)
    assert view.hours_left == pytest.approx(2.0 - view.hours_spent)
    assert view.money_spent == pytest.approx(3 * view.hours_spent)
    assert [p["trial_id"] for p in view.front] == ["t2", "t1"]
    assert view.front[0]["loss_increase"] == pytest.approx(0.8)
    # three trials have ended, the fourth is at two of three rungs: 3.67 of 8 in half an hour
    assert view.seconds_left == pytest.approx(1800 * (8 - 11 / 3) / (11 / 3))


def test_the_estimate_counts_until_half_of_the_work_is_done() -> None:
    """A quarter of eight trials after 6 of 60 estimated minutes: 18 minutes by the share, 54 by the estimate."""
    ended = [trial(number, 0.5, [3.0], records.STOPPED) for number in range(8)]
    estimate = {"trials": 8, "hours": 1.0}
    assert live.seconds_left(ended[:2], estimate, 3, 360.0) == pytest.approx((18 + 54) / 2 * 60)
    assert live.seconds_left(ended[:4], estimate, 3, 360.0) == pytest.approx(360)
    assert live.seconds_left(ended[:2], estimate, 3, 7200.0) == pytest.approx(3 * 7200), "the estimate was too low"
    assert live.seconds_left(ended[:2], {"trials": 8, "hours": None}, 3, 360.0) == pytest.approx(18 * 60)
    assert live.seconds_left([], estimate, 3, 360.0) is None
    assert live.seconds_left(ended, estimate, 3, 360.0) is None


def test_a_search_that_has_ended_or_was_killed_says_so(folder: SearchFolder) -> None:
    assert live.read_status(folder, NOW).state == "running"
    started(folder)
    write_json(folder.state, {"started": "2026-01-01T12:00:00+00:00", "seconds": 60.0, "ended": "done"})
    assert live.read_status(folder, NOW).state == "ended"
    write_journal(folder.root, [trial(1, 0.5, [3.0], records.KILLED)])
    write_json(folder.state, {"started": "2026-01-01T12:00:00+00:00", "seconds": 60.0})
    view = live.read_status(folder, NOW)
    assert view.state == "interrupted"
    assert view.hours_left is None
    write_journal(folder.root, [trial(1, 0.5, [3.0], records.DONE)])
    assert live.read_status(folder, NOW).state == "interrupted", "in its promotion"


def test_a_search_whose_driver_was_killed_is_interrupted(folder: SearchFolder) -> None:
    """SIGKILL or a lost machine: nobody has written the end."""
    started(folder)
    lock = SearchLock(folder.lock).acquire()
    now = datetime.now(UTC)
    assert live.read_status(folder, now).state == "running"
    view = live.read_status(folder, now + timedelta(hours=1))
    assert view.state == "interrupted" and view.hours_left is None
    begun = datetime.fromisoformat("2026-01-01T12:00:00+00:00")
    assert view.seconds == pytest.approx((now - begun).total_seconds(), abs=60), "up to its last heartbeat"
    lock.release()
    assert live.read_status(folder, now).state == "interrupted"


def test_the_time_of_a_trial_has_its_training_and_a_copy_has_none() -> None:
    trials = [trial(1, 0.5, [3.0, 2.5], records.DONE), trial(2, 0.25, [3.0, 2.5], records.COPY, copy_of="t1")]
    table = trial_table(trials, {"loss": 2.0})
    times = [row[table.columns.index("time")] for row in table.rows]
    assert times == ["6:36", "0:36"]


def test_a_resumed_search_runs_and_counts_the_time_of_all_its_drivers(folder: SearchFolder) -> None:
    write_journal(folder.root, [trial(1, 0.5, [3.0], records.DONE)])
    resumed = (NOW - timedelta(seconds=30)).isoformat()
    state = {"started": "2026-01-01T00:00:00+00:00", "seconds": 60.0, "resumed": resumed}
    write_json(folder.state, state)
    view = live.read_status(folder, NOW)
    assert (view.state, view.seconds) == ("running", 90.0)


def test_the_time_of_a_driver_that_was_killed_counts_and_that_after_it_does_not(folder: SearchFolder) -> None:
    began = datetime.now(UTC) - timedelta(hours=30)
    write_json(folder.state, {"started": began.isoformat(), "seconds": 60.0, "resumed": began.isoformat()})
    SearchLock(folder.lock).acquire()  # whose last heartbeat was two hours later
    os.utime(folder.lock, (began.timestamp() + 7200,) * 2)
    earlier = live.search_seconds(folder, folder.read_state(), datetime.now(UTC))
    assert earlier == pytest.approx(7260, abs=1)
    pipeline._save_start(parse_config(CONFIG), folder, None, [], 1, earlier)
    assert folder.read_state()["seconds"] == earlier and "resumed" not in folder.read_state()


def test_lines_come_only_when_something_has_changed(folder: SearchFolder) -> None:
    started(folder)
    looks = iter([lambda: None, lambda: None, lambda: write_json(folder.state, {"seconds": 9.0, "ended": "done"})])
    out = io.StringIO()
    live.watch_search(folder, console=Console(file=out, width=400, soft_wrap=True), sleep=lambda seconds: next(looks)())
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("mine running") and "3/8 finished" in lines[0] and "50%" in lines[0]
    assert lines[1].startswith("mine ended")
    assert "\x1b" not in out.getvalue()


def test_a_terminal_is_updated_in_place(folder: SearchFolder) -> None:
    started(folder)
    looks = iter([lambda: None, lambda: write_json(folder.state, {"seconds": 9.0, "ended": "done"})])
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    live.watch_search(folder, console=console, sleep=lambda seconds: next(looks)())
    text = out.getvalue()
    assert "\x1b[1A" in text, "the cursor never went up"
    for word in ("current front", "arm2", "+0.800", "failed: arm4", "CPU-hours", "50/s now"):
        assert word in text


def test_scripts_get_one_object(folder: SearchFolder, tmp_path: Path) -> None:
    started(folder)
    done = CliRunner().invoke(app, ["watch", str(folder.root), "--json", "-"])
    assert json.loads(done.output)["trials"]["running"] == 1
    done = CliRunner().invoke(app, ["watch", str(folder.root), "--json", str(tmp_path / "view.json")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "view.json").read_text())["expected"] == 8


def test_a_snapshot_of_another_version_leaves_out_what_follows_from_it(folder: SearchFolder) -> None:
    started(folder)
    folder.snapshot.write_text("name: mine\nold_section: {}\n")
    view = live.read_status(folder, NOW)
    assert view.money_spent is None
    assert view.front
