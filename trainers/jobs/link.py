"""A worker's connection to the client of a job."""

from __future__ import annotations

from typing import Any, Protocol

from trainers.jobs.train_job import TrainJob


class Link(Protocol):
    """Interface of a worker to the outside.

    `report` is called by all workers together with rank 0's numbers, after each milestone but also
    for those that an earlier start of the job has measured; it returns whether to continue.
    """

    rank: int
    world_size: int

    def report(self, metrics: dict[str, Any], last: bool) -> bool: ...

    def leaving(self) -> bool:
        """Whether a worker's node is about to be taken away. Called by all workers together."""
        ...

    def show(self, job: TrainJob, line: dict[str, Any]) -> None:
        """Show a line of a job's curve (`trainers.jobs.curve`). Called by rank 0 alone."""
        ...
