"""When workers look together whether a checkpoint is due: seldom, after the same steps, and soon after a notice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.needs.alone import Alone
from trainers.jobs import checkpoint_timer
from trainers.jobs.checkpoint_timer import CheckpointTimer
from trainers.jobs.checkpoints import CheckpointStore

CPU = torch.device("cpu")


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(checkpoint_timer.time, "monotonic", lambda: self.now)


class Looked(Alone):
    """A link that counts its calls, and leaves once `gone` is set."""

    looks = 0
    gone = False

    def leaving(self) -> bool:
        self.looks += 1
        return self.gone


@pytest.mark.parametrize(("a_step", "looks"), [(0.01, (9, 13)), (0.5, (9, 12)), (3.0, (4, 4))])
def test_short_steps_are_not_delayed_by_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_step: float, looks: tuple[int, int]
) -> None:
    """About once per second, or after each step that takes longer; over ten seconds."""
    clock, link = Clock(monkeypatch), Looked()
    timer = CheckpointTimer(CheckpointStore(str(tmp_path), "run"), link, 30, CPU)
    while clock.now < 1010:
        clock.now += a_step
        assert not timer.due()
    assert looks[0] <= link.looks <= looks[1]


def test_a_checkpoint_is_due_by_the_clock_and_once_when_a_node_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, link = Clock(monkeypatch), Looked()
    store = CheckpointStore(str(tmp_path), "run")
    timer = CheckpointTimer(store, link, 1, CPU)
    seen = []
    for second in range(1, 200):
        clock.now += 1
        link.gone = second >= 150
        if timer.due():
            seen.append(second)
            store.save(second, lambda folder: (folder / "state").write_text("here"))
            timer.saved()
    assert seen == [60, 120, 150]
    assert [saved.step for saved in store.read()[0]] == [120, 150], "it waits for that of a node which leaves"


def two(rank: int, place: str) -> list[int]:
    """The steps after which a checkpoint is due on one of two workers, of which rank 1 has a notice at step 30."""
    checkpoint_timer.LOOK_SECONDS = 0.02
    link = Looked(rank, 2)
    timer = CheckpointTimer(CheckpointStore(place, "run", rank, 2), link, None, CPU)
    due = []
    for step in range(1, 200):
        time.sleep(0.002 * (1 + rank))  # their clocks disagree
        link.gone = rank == 1 and step >= 30
        if timer.due():
            due.append(step)
            break
    return [*due, link.looks]


def test_workers_agree_on_the_step(on_both: Any, tmp_path: Path) -> None:
    one, other = on_both(tmp_path / "both", two, str(tmp_path / "place"))
    assert one == other
    assert len(one) == 2 and one[0] >= 30, "a notice that one worker has is known to all"
