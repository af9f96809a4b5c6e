"""A training job's link of a worker that nobody outside listens to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.jobs.train_job import TrainJob


@dataclass
class Alone:
    """The caller always answers that the job continues. By default there is no other worker."""

    rank: int = 0
    world_size: int = 1

    def report(self, metrics: dict[str, Any], last: bool) -> bool:
        return True

    def leaving(self) -> bool:
        return False

    def show(self, job: TrainJob, line: dict[str, Any]) -> None:
        pass
