"""The link of a job's only worker, in this process."""

from __future__ import annotations

from typing import Any

from trainers.jobs.job import TrainJob


class Alone:
    """Whoever wants the job done always says to go on."""

    rank, world_size = 0, 1

    def report(self, metrics: dict[str, Any], last: bool) -> bool:
        return True

    def leaving(self) -> bool:
        return False

    def show(self, job: TrainJob, line: dict[str, Any]) -> None:
        pass
