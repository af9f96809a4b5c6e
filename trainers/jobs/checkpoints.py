"""The training checkpoints of one run, with digests and reports.

    <place>/<run_name>/checkpoints.json     the reports; checkpoints that are kept, oldest first
    <place>/<run_name>/checkpoint_000024/   files of all workers at step 24
    <address>/<run_name>/relaxation/        the same of the stages of its relaxation; in a shared
                                            folder they are next to its weights

`checkpoints.json` names a checkpoint only once all of it is there, and is replaced as a whole, so
that a kill at any moment leaves the checkpoints before. One whose files have changed since is
passed over for the one before it.

The place is a folder that every node sees, or an address (s3://...). Every worker writes its own
files to the scratch folder of its node (TMPDIR), and a thread computes their digests and copies
them to the place: training continues meanwhile, unless a report names the checkpoint or another one
is to be saved. In a folder the files are written to a hidden one, which is renamed once all are
complete. Where the scratch folder has no room, or is on the same disk as the place, files are
written to the place directly. Files at an address are downloaded once per node, by its workers
together.

Legend: W workers; all of them make every call together, each with its own rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from attention.base.messages import reason
from attention.io.files import sha256, write_whole
from trainers.jobs.addresses import (
    CHECKPOINT_INDEX,
    below,
    copy_folder,
    fetch,
    folders,
    open_location,
    private,
)
from trainers.jobs.train_job import TrainJob

logger = logging.getLogger(__name__)

RELAXATION_FOLDER = "relaxation"
"""Folder below a run's at an address: checkpoints of the stages of its relaxation."""
KEEP = 2  # the newest, and one before it in case the newest is damaged, see `_to_keep`
_SPARE = 1 << 30
"""Bytes that stay free on a node's own disk while a checkpoint is there."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in the index.

    Attributes:
        digests: SHA-256 of each file, by its path below the checkpoint.
    """

    name: str
    step: int
    digests: dict[str, str]


@dataclass(frozen=True)
class _Sending:
    """A checkpoint that is being copied: this worker's part of it.

    Attributes:
        done: The digests of its files.
    """

    name: str
    step: int
    report: dict[str, Any] | None
    done: Future[dict[str, str]]


def gather_objects(value: Any, world_size: int) -> list[Any]:
    """Return the values of all workers, by rank."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def of_rank_0(look: Callable[[], Any]) -> Any:
    """Return on all workers what rank 0 finds.

    Of files that workers share: another node may see a new file seconds later than rank 0.
    """
    if not dist.is_initialized():
        return look()
    found = look() if dist.get_rank() == 0 else None
    return gather_objects(found, dist.get_world_size())[0]


class AddressAwayError(OSError):
    """An address of checkpoints that does not answer; it may later."""


class CheckpointNotSentError(OSError):
    """A checkpoint that a report was to name did not come to its place."""


class CheckpointStore:
    """Checkpoints of the run `run_name`, as worker `rank` of `world_size` sees them.

    At `address`, or else under the folder `storage_path`. Reports name them below `storage_path` in
    either case.
    """

    def __init__(
        self,
        storage_path: str,
        run_name: str,
        rank: int = 0,
        world_size: int = 1,
        address: str | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.named = Path(storage_path) / run_name
        self.remote = address is not None
        self._address = address
        location = below(address, run_name) if address else str(self.named)
        with self._answering():
            self.files, root = open_location(location)
        self.root = Path(root)
        self.expected_bytes: int | None = None
        self._sending: _Sending | None = None
        self._token = ""
        self._scratch = (
            Path(tempfile.gettempdir())
            / f"headfold-{hashlib.sha256(root.encode()).hexdigest()[:16]}"
        )

    @classmethod
    def of(cls, job: TrainJob, rank: int = 0, world_size: int = 1) -> CheckpointStore:
        """Return the store of a job, as worker `rank` of `world_size` sees it."""
        return cls(job.storage_path, job.run_name, rank, world_size, job.checkpoint_address)

    @classmethod
    def of_stage(
        cls, job: TrainJob, folder: Path, rank: int = 0, world_size: int = 1
    ) -> CheckpointStore:
        """Return the store of a stage of a job's relaxation; `folder` is the stage's."""
        address = job.checkpoint_address
        if address is not None:
            address = below(address, f"{job.run_name}/{RELAXATION_FOLDER}/{folder.name}")
        return cls(str(folder), "states", rank, world_size, address)

    def of_run(self, run_name: str) -> CheckpointStore:
        """Return the store of another run in the same place."""
        return CheckpointStore(
            str(self.named.parent), run_name, self.rank, self.world_size, self._address
        )

    def read(self) -> tuple[list[SavedCheckpoint], list[dict[str, Any]]]:
        """Checkpoints and reports of the index, oldest first; both empty before the first.

        Any process may ask.

        Raises:
            AddressAwayError: If the address does not answer.
        """
        try:
            with (
                self._answering(),
                self.files.open_input_stream(str(self.root / CHECKPOINT_INDEX)) as stream,
            ):
                record = json.loads(stream.read())
        except FileNotFoundError:
            return [], []
        return [SavedCheckpoint(**entry) for entry in record["checkpoints"]], record["reports"]

    # ---- saving --------------------------------------------------------------------------------

    def save(
        self, step: int, write: Callable[[Path], None], report: dict[str, Any] | None = None
    ) -> None:
        """Save what `write(folder)` of every worker writes as the checkpoint of `step`.

        A checkpoint with a report is complete when this returns, and one that needs no copy. Any
        other is still being copied: see `settle`.

        Args:
            step: The step.
            write: Writes one worker's share.
            report: That of rank 0, to which `checkpoint_path` is added; None between two
                milestones.
        """
        self.settle()
        if not self._token:  # files of a killed start have another token
            self._token = of_rank_0(lambda: uuid.uuid4().hex[:8])
        name = f"checkpoint_{step:06d}"
        if report is not None:
            report["checkpoint_path"] = str(self.named / name)
        staged = self.remote or self._has_room()
        copied = any(gather_objects(staged, self.world_size))  # by this worker or another
        scratch = self._scratch_folder(name, staged)
        try:
            write(scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        sender = ThreadPoolExecutor(1, "headfold-checkpoint")
        done = sender.submit(self._send, scratch, name)
        self._sending = _Sending(name, step, report, done)
        sender.shutdown(wait=False)
        if report is not None or not copied:
            self.settle()

    def advance(self) -> None:
        """Between two steps: register the checkpoint that is being copied, if it is complete."""
        if self._sending is not None and all(
            gather_objects(self._sending.done.done(), self.world_size)
        ):
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint that is being copied.

        One that did not arrive is reported and left out.

        Raises:
            CheckpointNotSentError: If it has a report.
        """
        if self._sending is None:
            return
        sending = self._sending
        self._sending = None
        error = sending.done.exception()
        problems = [p for p in gather_objects(error and reason(error), self.world_size) if p]
        if not problems:
            entry = SavedCheckpoint(sending.name, sending.step, sending.done.result())
            problems = self._enter(entry, sending.report)
        if not problems:
            return
        message = (
            f"training checkpoint of step {sending.step} did not come to "
            f"{'its address' if self.remote else self.root}: {problems[0]}"
        )
        if sending.report is not None:
            raise CheckpointNotSentError(message)
        logger.warning(message)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[Path]:
        """Open a checkpoint of this run, by the path in a report, as a folder.

        Raises:
            OSError: If it is not as it was written, or, at an address, not there.
        """
        checkpoints, _ = of_rank_0(self.read)
        checkpoint = next((k for k in checkpoints if k.name == Path(path).name), None)
        if checkpoint is not None:
            problem = self.damage(checkpoint)
        else:
            problem = "it is not in the index" if self.remote else None
        if problem is not None:
            self.release()
            where, remedy = " at its address", ""
            if not self.remote:
                where, remedy = "", "; remove this folder to begin from the weights alone"
            raise OSError(f"training checkpoint {path}{where}: {problem}{remedy}")
        yield self._scratch / Path(path).name if self.remote else Path(path)
        self.release()

    def text(self, path: str, file: str) -> str | None:
        """Return a text file of a checkpoint of this run, by its path in a report.

        None where it is not there; nothing is fetched.
        """
        folder = self.root / Path(path).name if self.remote else Path(path)
        try:
            with self.files.open_input_stream(str(folder / file)) as stream:
                return stream.read().decode()
        except FileNotFoundError:
            return None

    def _scratch_folder(self, name: str, staged: bool) -> Path:
        """Make the folder in which this worker writes its share of a checkpoint."""
        scratch = (self._scratch if staged else self.root) / f".{name}-{self.rank}"
        if staged:
            private(self._scratch)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        return scratch

    def _has_room(self) -> bool:
        """Whether this node's own disk is another than that of the place, with room to spare."""
        scratch = Path(tempfile.gettempdir())
        self.root.mkdir(parents=True, exist_ok=True)
        if not _on_different_disks(scratch, self.root):
            return False
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Rank 0 may write the weights in addition to its share of the optimiser's state
        share = (self.expected_bytes or 0) * min(1.0, (on_node + 1) / self.world_size)
        return shutil.disk_usage(scratch).free > share + _SPARE

    def _send(self, scratch: Path, name: str) -> dict[str, str]:
        """Bring this worker's files to the place; returns their digests."""
        try:
            files = {
                p.relative_to(scratch).as_posix(): p for p in scratch.rglob("*") if p.is_file()
            }
            digests = {file: sha256(path) for file, path in files.items()}
            target = self.root / (name if self.remote else self._incoming(name))
            if scratch.parent != self.root:
                copy_folder(scratch, self.files, str(target))
                return digests
            target.mkdir(parents=True, exist_ok=True)
            for file, path in files.items():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                path.replace(target / file)
            return digests
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            self._remove_empty_scratch()

    def _remove_empty_scratch(self) -> None:
        with contextlib.suppress(OSError):  # other workers' files, or never made
            self._scratch.rmdir()

    def _incoming(self, name: str) -> str:
        """Return the folder of a checkpoint until all of it is there."""
        return f".{name}-{self._token}"

    def _enter(self, entry: SavedCheckpoint, report: dict[str, Any] | None) -> list[str]:
        """Name a checkpoint whose files are all there in the index; `entry` has this worker's.

        Returns:
            Why that failed; empty if it did not.
        """
        parts = gather_objects(entry.digests, self.world_size)
        whole = SavedCheckpoint(
            entry.name,
            entry.step,
            {file: digest for part in parts for file, digest in part.items()},
        )
        problem = None
        if self.rank == 0:
            try:
                self._register(whole, report)
            except (OSError, ValueError) as error:  # an index that is no JSON is the second
                problem = reason(error)
        # All wait until the index has been written
        return [p for p in gather_objects(problem, self.world_size) if p]

    def _register(self, entry: SavedCheckpoint, report: dict[str, Any] | None) -> None:
        """Write the index with one more checkpoint, and remove those that it no longer names."""
        if not self.remote:
            shutil.rmtree(self.root / entry.name, ignore_errors=True)  # a damaged one
            (self.root / self._incoming(entry.name)).rename(self.root / entry.name)
        checkpoints, reports = self.read()
        reports = [
            *(r for r in reports if r["step"] < entry.step),
            *([report] if report is not None else []),
        ]
        before = [k for k in checkpoints if k.step < entry.step]
        checkpoints = _to_keep(before, entry, {r["step"] for r in reports})
        self._write(checkpoints, reports)
        with contextlib.suppress(OSError):  # the next time
            self._remove_all_but({k.name for k in checkpoints})

    # ---- reading -------------------------------------------------------------------------------

    def newest_whole(self) -> tuple[SavedCheckpoint | None, list[dict[str, Any]], list[str]]:
        """Return the newest undamaged checkpoint, the reports up to it, and newer damage."""
        for leftover in self._scratch.glob(f".*-{self.rank}"):  # by a worker that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        self._remove_empty_scratch()
        checkpoints, reports = of_rank_0(self.read)
        damage: list[str] = []
        for candidate in reversed(checkpoints):
            wrong = self.damage(candidate)
            if wrong is None:
                return candidate, [r for r in reports if r["step"] <= candidate.step], damage
            damage.append(f"checkpoint of step {candidate.step} passed over: {wrong}")
        return None, [], damage

    def damage(self, checkpoint: SavedCheckpoint) -> str | None:
        """Return what is wrong with a checkpoint, of which every worker looks at a part.

        One at an address is fetched.
        """
        everyone = range(self.world_size)
        if self.remote:
            hosts = gather_objects(socket.gethostname(), self.world_size)
            everyone = [rank for rank in everyone if hosts[rank] == hosts[self.rank]]
            private(self._scratch)
        files = sorted(checkpoint.digests)[list(everyone).index(self.rank) :: len(everyone)]
        return next(
            (
                problem
                for problem in gather_objects(self._damage(checkpoint, files), self.world_size)
                if problem
            ),
            None,
        )

    def folder(self, checkpoint: SavedCheckpoint) -> Path:
        """Return the folder of a checkpoint; that of an address from `damage` until `release`."""
        return (self._scratch if self.remote else self.root) / checkpoint.name

    def release(self) -> None:
        """Remove what was fetched, after it has been read."""
        gather_objects(None, self.world_size)
        if self.remote:
            shutil.rmtree(self._scratch, ignore_errors=True)
        gather_objects(None, self.world_size)

    def keep_only(self, name: str | None) -> None:
        """For a run that has ended: remove all checkpoints but one, or all of them.

        The reports stay.
        """
        checkpoints, reports = self.read()
        if left := [k for k in checkpoints if k.name != name]:
            self._write([k for k in checkpoints if k not in left], reports)
        with contextlib.suppress(OSError):  # a worker that is being stopped may still be writing
            self._remove_all_but({str(name)})
        with contextlib.suppress(OSError):  # it has none, or as above
            self.files.delete_dir(str(self.root / RELAXATION_FOLDER))

    def remove(self) -> None:
        """Remove everything, the index included.

        Raises:
            AddressAwayError: If the address does not answer.
        """
        with contextlib.suppress(FileNotFoundError), self._answering():
            self.files.delete_dir(str(self.root))

    # ---- files ---------------------------------------------------------------------------------

    def _damage(self, checkpoint: SavedCheckpoint, files: list[str]) -> str | None:
        """Return what is wrong with some files of a checkpoint."""
        for file in files:
            try:
                with self._answering():
                    if self.remote:
                        fetch(
                            self.files,
                            str(self.root / checkpoint.name / file),
                            self.folder(checkpoint) / file,
                        )
                    digest = sha256(self.folder(checkpoint) / file)
            except AddressAwayError:
                raise  # which is no damage
            except OSError as error:
                return f"{file} cannot be read ({error.strerror or type(error).__name__})"
            if digest != checkpoint.digests[file]:
                return (
                    f"{file} is not what was written (SHA-256 {digest[:12]}..., not "
                    f"{checkpoint.digests[file][:12]}...)"
                )
        return None

    def _write(self, checkpoints: list[SavedCheckpoint], reports: list[dict[str, Any]]) -> None:
        record = json.dumps(
            {"checkpoints": [asdict(k) for k in checkpoints], "reports": reports}, indent=1
        )
        if self.files.type_name == "local":  # also one that an address (file://) names
            write_whole(self.root / CHECKPOINT_INDEX, record)
            return
        with (
            self._answering(),
            self.files.open_output_stream(str(self.root / CHECKPOINT_INDEX)) as stream,
        ):
            stream.write(record.encode())  # objects are replaced as a whole

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise AddressAwayError if an address does not answer within."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if not self.remote:
                raise
            raise AddressAwayError(
                f"training checkpoints of {self.named.name} at their address: {reason(error)}"
            ) from error

    def _remove_all_but(self, names: set[str]) -> None:
        for folder in folders(self.files, str(self.root)):
            name = Path(folder).name
            if name.lstrip(".").startswith("checkpoint_") and name not in names:
                self.files.delete_dir(folder)


def _to_keep(
    before: list[SavedCheckpoint], newest: SavedCheckpoint, reported: set[int]
) -> list[SavedCheckpoint]:
    """Return what stays: the newest, and that of the last report, else the one before it."""
    named = [k for k in before if k.step in reported]
    if newest.step in reported or not named:
        named = before
    return [*named[1 - KEEP :], newest]


def _on_different_disks(one: Path, other: Path) -> bool:
    return one.stat().st_dev != other.stat().st_dev


def is_saved(path: str, address: str | None) -> bool:
    """Whether the checkpoint of a report still exists.

    Args:
        address: That of the job which has reported.
    """
    if address is None:
        return Path(path).is_dir()
    file = Path(path)
    store = CheckpointStore(str(file.parent.parent), file.parent.name, address=address)
    return any(checkpoint.name == file.name for checkpoint in store.read()[0])


def reports_of(job: TrainJob) -> list[dict[str, Any]]:
    """Return the reports of a job, each milestone once."""
    return CheckpointStore.of(job).read()[1]
