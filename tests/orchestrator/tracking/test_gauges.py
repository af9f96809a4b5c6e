"""The gauges of a search and its trainings in Ray's metrics arrive where Prometheus collects them."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from attention.plan import AttentionPlan, LayerPlan
from orchestrator.search.callbacks import best_so_far
from orchestrator.storage.records import DONE, FAILED, RUNNING, TrialRecord
from orchestrator.tracking import gauges
from trainers.jobs.ray_link import set_gauges
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings

PATIENCE = 180.0
"""Seconds; a process hands its gauges over every second or ten (`RAY_metrics_report_interval_ms`)."""
OWN = ("search", "state", "kv_ratio", "trial")
"""Labels that are not Ray's."""
SPEED = "headfold_tokens_per_second"
PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)

Values = dict[str, dict[str, float]]


def exported(search: str) -> Values:
    """Gauges of a search on this machine's metrics port: by name, then by what their other labels say."""
    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    text, result = urllib.request.urlopen(address, timeout=30).read().decode(), {}
    for name, labels, value in re.findall(r"^ray_(headfold_\w+){(.*)} (\S+)$", text, re.MULTILINE):
        own = {key: what for key, what in re.findall(r'(\w+)="(.*?)"', labels) if key in OWN}
        if own.pop("search") == search:
            result.setdefault(name, {})[" ".join(own.values())] = float(value)
    return result


def wait_for(search: str, expected: Values) -> Values:
    """The gauges of a search once they have the expected values, or at the time limit."""
    end = time.monotonic() + PATIENCE
    while (result := exported(search)) != expected and time.monotonic() < end:
        time.sleep(1)
    return result


@ray.remote(num_cpus=0)
class Worker:
    """A process that lives: Ray drops the gauges of one that has ended."""

    def set(self, values: dict[str, float]) -> None:
        set_gauges(TrainJob("m", "t", "e", "/s/runs/demo/out", "/s/runs/demo/train", "t7", (1,)), values)


@pytest.mark.extended
def test_gauges_are_exported(ray_cluster: None) -> None:
    gauges.set_trial_gauges("demo", [RUNNING, DONE, DONE, FAILED], {0.5: 0.125, 0.25: 0.5})
    gauges.set_gauge(gauges.WAITS, True, search="demo")
    gauges.set_gauge(gauges.BEHIND, 3, search="demo")
    worker: Any = Worker.remote()
    ray.get(worker.set.remote({"tokens_per_second": 1234.5, "mfu": 0.25}))
    expected = {
        gauges.TRIAL_COUNT: {"waiting": 0, "running": 1, "done": 2, "stopped": 0, "copy": 0, "failed": 1, "killed": 0},
        gauges.BEST: {"0.5": 0.125, "0.25": 0.5},
        gauges.WAITS: {"": 1},
        gauges.BEHIND: {"": 3},
        SPEED: {"t7": 1234.5},
        "headfold_mfu": {"t7": 0.25},
    }
    assert wait_for("demo", expected) == expected


def test_a_training_that_has_ended_is_at_rest(on_group: Callable[[Any], Any], tiny_job: Any, tmp_path: Path) -> None:
    """Its workers live on, and what Ray exports with them."""
    generator = torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, 64, (rows, 16), generator=generator) for rows in (40, 9))
    settings = TrainSettings(learning_rate=3e-3, cpus_per_worker=0.4)
    on_group(tiny_job(tmp_path / "trained", PLAN, train, held_out, settings, milestones=(2,)))
    assert wait_for("trained", {SPEED: {"whole": 0.0}}) == {SPEED: {"whole": 0.0}}


def test_without_ray_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(gauges, "_gauge", lambda name: pytest.fail("a gauge was made"))
    gauges.set_gauge(gauges.WAITS, 1, search="demo")


def test_the_best_so_far_counts_who_still_runs_and_nobody_who_failed() -> None:
    def trial(number: int, status: str, loss: float, **more: Any) -> TrialRecord:
        return TrialRecord(f"t{number}", "gqa", 0.5, 1e-3, {}, status, [{"step": 1, "loss": loss}], **more)

    records = [trial(0, DONE, 2.0), trial(1, RUNNING, 1.5), trial(2, FAILED, 1.0), trial(3, DONE, 1.0, probe=True)]
    assert best_so_far(records)[0.5].trial_id == "t1"
    assert best_so_far([TrialRecord("t", "gqa", 0.5, 1e-3, {})]) == {}
