"""Calls that actors take from a queue: one actor is enough, and what is lost is known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.cluster.task_queue import TaskQueue

OPTIONS = {"num_cpus": 0.3, "num_gpus": 0}


def worker() -> type:
    """A class of actors that square, and die at the calls of which there is a file."""

    class Worker:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def square(self, number: int) -> tuple[int, int]:
            if (marker := self.folder / str(number)).exists():
                marker.unlink()
                os._exit(1)
            return os.getpid(), number**2

        def total(self, *numbers: int) -> int:
            return sum(numbers)

        def fail(self) -> None:
            raise ValueError("no such layer")

    return Worker


def squares(queue: TaskQueue, count: int) -> tuple[set[int], list[Any], int]:
    """The processes that made `count` calls, references to their results, and how many calls were lost."""
    for number in range(count):
        queue.put(number, "square", number, results=1)
    references: dict[int, Any] = {}
    processes, lost = set(), 0
    while len(references) < count:
        finished = queue.next()
        if finished.lost:
            lost += 1
            queue.put(finished.key, "square", finished.key, results=1)
            continue
        processes.add(finished.value)
        (references[finished.key],) = finished.results
    return processes, [references[number] for number in range(count)], lost


def test_as_many_work_as_find_room_and_a_lost_one_is_replaced(ray_cluster: None, tmp_path: Path) -> None:
    (tmp_path / "3").touch()
    with TaskQueue(worker(), [tmp_path], OPTIONS, 40, "squares") as queue:  # more than have room
        processes, references, lost = squares(queue, 8)
        assert len(processes) >= 1
        assert lost == 1
        queue.put("total", "total", *references)
        assert queue.next().value == 140
        queue.put("failing", "fail")
        with pytest.raises(ValueError, match="no such layer"):
            queue.next()


def test_a_call_that_no_worker_survives_is_given_up(ray_cluster: None) -> None:
    class Dying:
        def call(self) -> None:
            os._exit(1)

    with TaskQueue(Dying, [], OPTIONS | {"num_cpus": 0.01}, 1, "dying") as queue:
        queue.put("only", "call")
        with pytest.raises(ray.exceptions.RayActorError):
            while queue.next().lost:
                queue.put("only", "call")
