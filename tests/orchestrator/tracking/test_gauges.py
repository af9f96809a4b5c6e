"""What a search and its trainings tell Ray's metrics arrives where Prometheus collects it."""

from __future__ import annotations

import re
import time
import urllib.request
from typing import Any

import pytest
import ray

from orchestrator.search.callbacks import best_so_far
from orchestrator.storage.records import DONE, FAILED, RUNNING, TrialRecord
from orchestrator.tracking import gauges
from trainers.jobs.job import TrainJob
from trainers.jobs.worker import set_gauges

PATIENCE = 60.0
"""Seconds; a process hands its gauges over every 10."""
OWN = ("search", "state", "kv_ratio", "trial")
"""Labels that are not Ray's."""
JOB = TrainJob("m", "t", "e", "/s/runs/demo/out", "/s/runs/demo/train", "t7", (1,))


def exported(names: set[str]) -> dict[str, dict[str, float]]:
    """Values of gauges on this machine's metrics port, by name and labels; once all names are there."""
    port, text, end = ray.nodes()[0]["MetricsExportPort"], "", time.monotonic() + PATIENCE
    while not all(f"\nray_{name}{{" in text for name in names) and time.monotonic() < end:
        time.sleep(1)
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for name, labels, value in re.findall(r"^ray_(headfold_\w+){(.*)} (\S+)$", text, re.MULTILINE):
        own = {key: what for key, what in re.findall(r'(\w+)="(.*?)"', labels) if key in OWN}
        if own.pop("search") == "demo":
            found[name][" ".join(own.values())] = float(value)
    return found


@ray.remote(num_cpus=0)
class Worker:
    """A process in which a training runs: Ray drops the gauges of one that has ended."""

    def set(self, values: dict[str, float]) -> None:
        set_gauges(JOB, values)


def test_gauges_are_exported(ray_cluster: None) -> None:
    gauges.tell_trials("demo", [RUNNING, DONE, DONE, FAILED], {0.5: 0.125, 0.25: 0.5})
    gauges.tell(gauges.WAITS, True, search="demo")
    gauges.tell(gauges.BEHIND, 3, search="demo")
    worker: Any = Worker.remote()
    ray.get(worker.set.remote({"tokens_per_second": 1234.5, "mfu": 0.25}))
    found = exported({*gauges.GAUGES, "headfold_tokens_per_second", "headfold_mfu"})
    states = {"waiting": 0, "running": 1, "done": 2, "stopped": 0, "copy": 0, "failed": 1, "killed": 0}
    assert found[gauges.TRIALS] == states
    assert found[gauges.BEST] == {"0.5": 0.125, "0.25": 0.5}
    assert (found[gauges.WAITS], found[gauges.BEHIND]) == ({"": 1}, {"": 3})
    assert found["headfold_tokens_per_second"] == {"t7": 1234.5}
    assert found["headfold_mfu"] == {"t7": 0.25}


def test_without_ray_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(gauges, "_gauge", lambda name: pytest.fail("a gauge was made"))
    gauges.tell(gauges.WAITS, 1, search="demo")


def test_the_best_so_far_counts_who_still_runs_and_nobody_who_failed() -> None:
    def trial(number: int, status: str, loss: float, **more: Any) -> TrialRecord:
        return TrialRecord(f"t{number}", "gqa", 0.5, 1e-3, {}, status, [{"step": 1, "loss": loss}], **more)

    records = [trial(0, DONE, 2.0), trial(1, RUNNING, 1.5), trial(2, FAILED, 1.0), trial(3, DONE, 1.0, probe=True)]
    assert best_so_far(records)[0.5].trial_id == "t1"
    assert best_so_far([TrialRecord("t", "gqa", 0.5, 1e-3, {})]) == {}
