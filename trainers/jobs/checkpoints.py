"""The training checkpoints of one run, with digests and reports, and the weights of its best measured step.

    <storage_path>/<run_name>/checkpoints.json     reports so far; checkpoints that are kept, oldest first
    <storage_path>/<run_name>/checkpoint_000024/   what all workers wrote at step 24
    <out_dir>.best/step-000024/                    a finished checkpoint; if the last step is the best one, <out_dir>

`checkpoints.json` names a checkpoint only once all of it is there, and is replaced as a whole, so that a kill at any
moment leaves the checkpoints before. One whose files have changed since is passed over for the one before it.
`storage_path` is a folder that every node sees.

Legend: W workers; all of them make every call together, each with its own rank.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from attention.io import checkpoint
from attention.io.files import sha256, write_whole
from trainers.jobs.job import TrainJob

INDEX = "checkpoints.json"
KEEP = 2  # the newest, and the one before it in case the newest is damaged


@dataclass(frozen=True)
class Kept:
    """A checkpoint in the index. `digests`: SHA-256 of each file, by its path below the checkpoint."""

    name: str
    step: int
    digests: dict[str, str]


def gathered(value: Any, world_size: int) -> list[Any]:
    """The values of all workers, by rank."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


class CheckpointStore:
    """Checkpoints of the run `run_name` under `storage_path`, as worker `rank` of `world_size` sees them."""

    def __init__(self, storage_path: str, run_name: str, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.root = Path(storage_path) / run_name

    def read(self) -> tuple[list[Kept], list[dict[str, Any]]]:
        """Checkpoints and reports of the index, oldest first; both empty before the first. Any process may ask."""
        try:
            record = json.loads((self.root / INDEX).read_bytes())
        except FileNotFoundError:
            return [], []
        return [Kept(**kept) for kept in record["checkpoints"]], record["reports"]

    def save(self, step: int, write: Callable[[Path], None], report: dict[str, Any] | None = None) -> None:
        """Keep what `write(folder)` of every worker writes as the checkpoint of `step`, and with it the `report` of
        rank 0, `checkpoint_path` added; None between two milestones."""
        name = f"checkpoint_{step:06d}"
        target, scratch = self.root / name, self.root / f".{name}-{self.rank}"
        if report is not None:
            report["checkpoint_path"] = str(target)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            write(scratch)
            files = {p.relative_to(scratch).as_posix(): p for p in scratch.rglob("*") if p.is_file()}
            digests = {file: sha256(path) for file, path in files.items()}
            for file, path in files.items():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                path.replace(target / file)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        whole = {file: digest for part in gathered(digests, self.world_size) for file, digest in part.items()}
        if self.rank == 0:
            kept, reports = self.read()
            kept = [*(k for k in kept if k.step < step), Kept(name, step, whole)][-KEEP:]
            reports = [*(r for r in reports if r["step"] < step), *([report] if report is not None else [])]
            self._write(kept, reports)
            self._remove_all_but({k.name for k in kept})
        gathered(None, self.world_size)  # nobody goes on before the index says so

    def newest_whole(self) -> tuple[Kept | None, list[dict[str, Any]], list[str]]:
        """The newest checkpoint that is as it was written, the reports up to it, and what is wrong with newer ones."""
        kept, reports = gathered(self.read() if self.rank == 0 else None, self.world_size)[0]
        damage: list[str] = []
        for candidate in reversed(kept):
            mine = sorted(candidate.digests)[self.rank :: self.world_size]
            wrong = [problem for problem in gathered(self._damage(candidate, mine), self.world_size) if problem]
            if not wrong:
                return candidate, [r for r in reports if r["step"] <= candidate.step], damage
            damage.append(f"checkpoint of step {candidate.step} passed over: {wrong[0]}")
        return None, [], damage

    def folder(self, kept: Kept) -> Path:
        return self.root / kept.name

    def keep_only(self, name: str | None) -> None:
        """Of a run that has ended: remove all checkpoints but one, or all of them. The reports stay."""
        if not self.root.is_dir():
            return
        kept, reports = self.read()
        if left := [k for k in kept if k.name != name]:
            self._write([k for k in kept if k not in left], reports)
        with contextlib.suppress(OSError):  # a worker that is being stopped may still be writing
            self._remove_all_but({str(name)})

    # ---- files ------------------------------------------------------------------------------------------------

    def _damage(self, kept: Kept, files: list[str]) -> str | None:
        """What is wrong with some files of a checkpoint."""
        for file in files:
            try:
                digest = sha256(self.folder(kept) / file)
            except OSError as error:
                return f"{file} cannot be read ({error.strerror or type(error).__name__})"
            if digest != kept.digests[file]:
                return f"{file} is not what was written (SHA-256 {digest[:12]}..., not {kept.digests[file][:12]}...)"
        return None

    def _write(self, kept: list[Kept], reports: list[dict[str, Any]]) -> None:
        record = {"checkpoints": [asdict(k) for k in kept], "reports": reports}
        write_whole(self.root / INDEX, json.dumps(record, indent=1))

    def _remove_all_but(self, names: set[str]) -> None:
        for folder in self.root.iterdir():
            ours = folder.name.lstrip(".").startswith("checkpoint_")
            if ours and folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder)


def reports_of(job: TrainJob) -> list[dict[str, Any]]:
    """What a job has reported so far, each milestone once."""
    return CheckpointStore(job.storage_path, job.run_name).read()[1]


# ---- the best measured step ---------------------------------------------------------------------------------------

# Each report names the best step so far and where its weights lie. What the report of a kept training checkpoint names
# is there as long as the checkpoint, so a job that goes on from one ends with the same best as one never stopped.
BEST = ("best_step", "best_loss", "best_kl", "best_dir")
"""In a report: the best step so far, its held-out loss and KL (nats a token), where its weights lie."""


def best_folder(out_dir: str, step: int) -> str:
    return f"{out_dir}.best/step-{step:06d}"


def best_is_there(report: dict[str, Any], out_dir: str) -> bool:
    """Whether the best weights that a report names are as they were written. Those in `out_dir` can be made again."""
    place = report.get("best_dir")
    return place in (None, out_dir) or checkpoint.intact(place)


def remove_other_bests(out_dir: str, reports: Iterable[dict[str, Any]]) -> None:
    """Remove what none of the reports names."""
    named = {report.get("best_dir") for report in reports}
    root = Path(f"{out_dir}.best")
    for folder in root.glob("*"):
        if str(folder) not in named:
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty, or never made
        root.rmdir()
