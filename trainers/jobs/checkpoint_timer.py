"""When a checkpoint is due between two milestones, as all workers of a training agree on it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.link import Link

LOOK_SECONDS = 1.0
"""Approximate time between two synchronised checks of the workers."""
_MOST_STEPS = 1000
"""Between two looks."""


class CheckpointTimer:
    """The clock of rank 0, and what any worker knows of its node, looked at by all together.

    A check is a collective operation, which takes a noticeable part of a short step. It runs about
    once per second, after a number of steps that rank 0 has computed at the previous check.

    Args:
        minutes: After which a checkpoint is due; None: never by the clock.
    """

    def __init__(
        self, store: CheckpointStore, link: Link, minutes: float | None, device: torch.device
    ) -> None:
        self._store = store
        self._link = link
        self._minutes = minutes
        self._device = device
        self._seconds = LOOK_SECONDS
        if minutes is not None:  # several times before one is due
            self._seconds = min(LOOK_SECONDS, 6 * minutes)
        self._saved_at = time.monotonic()
        self._looked_at = time.monotonic()
        self._steps = 0  # since the last look
        self._look_after = 1  # so many
        self._leaving = False

    def due(self) -> bool:
        """Whether to save a checkpoint after this step.

        One is saved, once, when a node is about to be taken away. All workers ask after each step.
        """
        self._steps += 1
        if self._steps < self._look_after:
            return False
        now = time.monotonic()
        a_step = max(1e-9, (now - self._looked_at) / self._steps)
        late = self._minutes is not None and now - self._saved_at >= 60 * self._minutes
        steps = max(1, min(_MOST_STEPS, int(self._seconds / a_step)))
        leaving = self._link.leaving()
        if self._link.world_size > 1:
            first = self._link.rank == 0
            seen = [int(late and first), int(leaving), steps if first else 0]
            together = torch.tensor(seen, device=self._device)
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
            late, leaving, steps = (int(value) for value in together.tolist())
        self._store.advance()
        self._looked_at = now
        self._steps = 0
        self._look_after = steps
        if leaving and not self._leaving:
            self._leaving = True
            return True
        return bool(late)

    def saved(self) -> None:
        """Take note of a checkpoint; that of a node which leaves is waited for."""
        if self._leaving:
            self._store.settle()
        self._saved_at = time.monotonic()
        self._look_after = 1  # a small one is there by then
