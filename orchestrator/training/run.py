"""A training job: carried out, and read as far as it has come, in the steps of its model.

Trials, promotions, `headfold train` and `headfold finetune` train by one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ray.exceptions import RayActorError

from orchestrator.cluster.pool_client import dispatch_training
from orchestrator.cluster.session import last_error
from trainers.jobs.checkpoints import CheckpointStore, reports_of
from trainers.jobs.curve import CurveReader, read_curve
from trainers.jobs.train_job import TrainJob
from trainers.jobs.write_rate import CheckpointCost, read_cost

TrainingReport = Mapping[str, Any]
"""A report at a milestone, or on the curve between milestones, by name; includes `step`."""


@dataclass(frozen=True)
class TrainingRun:
    """A training job.

    Attributes:
        job: What is trained, from where, and up to which milestones.
        offset: Steps of the model that the job does not count: those of a relaxation, or those of
            the weights from which it starts.
    """

    job: TrainJob
    offset: int = 0

    def reports(self) -> list[TrainingReport]:
        """Return the reports at the completed milestones."""
        return [add_steps(report, self.offset) for report in reports_of(self.job)]

    def curve(self) -> list[TrainingReport]:
        """Return the measurements between the completed milestones, every few seconds."""
        lines = read_curve(Path(self.job.storage_path) / self.job.run_name)
        return [add_steps(line, self.offset) for line in lines]

    def checkpoint_cost(self) -> CheckpointCost | None:
        """Return what its checkpoints take; None before that is measured, and for small ones."""
        return read_cost(Path(self.job.storage_path) / self.job.run_name)

    def checkpoint_step(self) -> int:
        """Return the step of the newest checkpoint.

        It is -1 without one, and where the address of checkpoints cannot be reached.
        """
        job = self.job
        return checkpoint_step(job.storage_path, job.checkpoint_address, job.run_name)

    def train(
        self,
        pool: str | None = None,
        on_report: Callable[[dict[str, Any]], None] = lambda report: None,
        callbacks: Callable[[], list[Any]] = list,
    ) -> TrainingReport:
        """Train, or resume, on workers of a pool or on separate ones.

        See `orchestrator.cluster.pool_client.dispatch_training`.

        Returns:
            The last report as the job gives it, with `out_dir` and `weights_digest`.
        """
        return dispatch_training(pool, self.job, on_report, callbacks)

    def train_through_losses(self, log: Callable[[str], None]) -> TrainingReport:
        """Train; when machines are lost, again from the last checkpoint.

        Args:
            log: Takes a line for each new start.

        Raises:
            Exception: The training's own error, and the loss of machines again and again without
                a new checkpoint.
        """
        failures = Failures()
        while True:
            try:
                return self.train()
            except Exception as error:
                step = self.checkpoint_step()
                failures = failures.another(step)
                if not (lost(error) and failures.retries_left):
                    raise
                log(
                    f"training: machines were lost; it starts again from step "
                    f"{max(0, step) + self.offset}: {last_error(str(error))}"
                )

    def remove_checkpoints(self) -> None:
        """Remove the training checkpoints; the weights in `out_dir` stay."""
        CheckpointStore.of(self.job).keep_only(None)


def checkpoint_step(storage_path: str, address: str | None, run_name: str) -> int:
    """Return the step of a run's newest checkpoint; -1 if none is found."""
    with contextlib.suppress(OSError):
        saved = CheckpointStore(storage_path, run_name, address=address).read()[0]
        return saved[-1].step if saved else -1
    return -1


class TrainingFollower:
    """Follows a training; each look reads what is new, however long the training is.

    Attributes:
        step: The latest step of which anything was reported.
    """

    def __init__(self, run: TrainingRun, start: int = 0) -> None:
        self.step = start
        self._run = run
        self._curve = CurveReader(Path(run.job.storage_path) / run.job.run_name)
        self._milestones = 0

    def look(self) -> tuple[list[TrainingReport], list[TrainingReport]]:
        """Return the milestones, and the lines between them, that are new since the last look."""
        reports = self._run.reports()
        milestones = reports[self._milestones :]
        self._milestones = len(reports)
        offset = self._run.offset
        lines: list[TrainingReport] = [add_steps(line, offset) for line in self._curve.new_lines()]
        self.step = max([self.step, *(report["step"] for report in (*milestones, *lines))])
        return milestones, lines


def add_steps(report: TrainingReport, offset: int) -> dict[str, Any]:
    """Return a report in steps of the model, of which `offset` precede those of the job."""
    return {
        **report,
        **{key: report[key] + offset for key in ("step", "best_step") if key in report},
    }


# ---- lost machines -------------------------------------------------------------------------------

LOSSES = 3
"""Losses of machines in a row, without getting any further, after which a training has failed."""
DISK_FULL = "|".join(
    (
        r"No space left on device",  # Python
        r"File too large",
        r"Disk quota exceeded",
        r"PytorchStreamWriter failed",  # torch's own files
        r"unexpected pos \d+ vs \d+",
    )
)
"""Messages of errors of a full disk."""
_LOST = re.compile(
    r"\b(RayActorError|ActorDiedError|ActorUnavailableError|NodeDiedError|WorkerCrashedError|"
    r"OwnerDiedError|ObjectLostError|WorkerHealthCheckFailedError|WorkerHealthCheckTimeoutError|"
    r"RaySystemError|JournalError|CheckpointNotSentError|AddressAwayError)\b|"
    # Ray Train on workers whose nodes did not come, or went before they had started
    r"worker group startup timed out|worker actors failed to initialize|" + DISK_FULL
)


def lost(error: BaseException | str) -> bool:
    """Return whether a training failed because of its machines (process, node, disk)."""
    workers = getattr(error, "worker_failures", {}).values()  # what Ray Train has seen of them
    if isinstance(error, RayActorError) or any(lost(failure) for failure in workers):
        return True
    # Some of Ray Train's errors are recognised by their names alone
    return _LOST.search(f"{type(error).__name__}: {error}") is not None


class Failures(NamedTuple):
    """Failures of a training in a row, after which it had got no further than `step`."""

    step: int = -1
    count: int = 0

    def another(self, step: int) -> Failures:
        """Return the failures with one more, at a step."""
        return Failures(step, self.count + 1 if step == self.step else 1)

    @property
    def retries_left(self) -> bool:
        """Whether the training may start again, if it was lost."""
        return self.count <= LOSSES
