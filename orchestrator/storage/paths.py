"""Where the files of a search lie.

<storage>/mlflow.db, mlartifacts/     the MLflow store, unless tracking.uri names another
<storage>/<name>/                     one search; a second one of the same name becomes <name>-2
    search.yaml, versions.json        snapshot of the configuration, package versions
    original.json, data/, calibration/    the original model's scores; token sequences and statistics that trials share
    decode_times.json                 seconds a token by KV heads, where decode time is an objective
    journal.jsonl                     what was tried, reported, decided and ended: the only record of the search
    trials/<id>/                      recipe, plan, converted and trained checkpoint of each trial
    state.json, driver.lock           when and how the search began and ended; who runs it
    tune/, train/                     files of Ray Tune and Ray Train
    promotion.json, promoted/         the promotion's steps and checkpoints: `exported` (stock software), or `headfold`
    report.html
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from attention.io.replacing import checkpoint_around, parents_made
from orchestrator.config.parsing import ConfigError, read_sections
from orchestrator.storage import journal
from orchestrator.storage.mirror import check_address, is_remote, working_folder
from trainers.jobs.addresses import below


def in_ray_job() -> bool:
    """Whether this process was started by `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def home() -> Path:
    """Where relative storage of a Ray job goes (its working folder is Ray's and vanishes), and that of addresses."""
    return Path(os.environ.get("HEADFOLD_HOME", "~/headfold")).expanduser().absolute()


def storage_path(storage: str) -> Path:
    """The absolute folder of a `storage` setting; for an address (s3://...) the folder that the search works in.

    Relative paths count from the working folder, in a Ray job from HEADFOLD_HOME (default ~/headfold). Raises
    ConfigError for an address that holds credentials or names no bucket.
    """
    if is_remote(storage):
        check_address(storage)
        return working_folder(storage, home())
    address = urlparse(storage)
    if address.scheme == "file":
        return Path(address.path)
    path = Path(storage).expanduser()
    return path if path.is_absolute() else (home() if in_ray_job() else Path.cwd()) / path


def check_writable(folder: Path, key: str = "storage") -> None:
    """Try to create `folder` and to write a file into it; no trace of it is left. Raises ConfigError if either fails,
    or if it lies in a checkpoint."""
    if (around := checkpoint_around(folder.resolve() / "search")) is not None:
        raise ConfigError(f"{key}: {str(folder)!r} lies within a checkpoint, {str(around)!r}; give a folder outside")
    try:
        with parents_made(folder / "file", keep=False), tempfile.NamedTemporaryFile(dir=folder, prefix=".headfold"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot write to {str(folder)!r} ({error.strerror or error}); give a folder that can be written"
        ) from None


@dataclass
class SearchFolder:
    """The files of one search. `waiting`: nodes that it waits for, since when; `estimate`: what it was said to take
    before it began; `origin`: where it was made, see `orchestrator.storage.trust`."""

    root: Path

    def __post_init__(self) -> None:
        self.storage = self.root.parent
        self.snapshot = self.root / "search.yaml"
        self.versions = self.root / "versions.json"
        self.state = self.root / "state.json"
        self.waiting = self.root / "waiting.json"
        self.estimate = self.root / "estimate.json"
        self.origin = self.root / "origin.json"
        self.original = self.root / "original.json"
        self.decode_times = self.root / "decode_times.json"
        self.journal = self.root / journal.NAME
        self.lock = self.root / "driver.lock"
        self.tune = self.root / "tune"
        self.train = self.root / "train"
        self.promotion = self.root / "promotion.json"
        self.promoted = self.root / "promoted"
        self.report = self.root / "report.html"

    @classmethod
    def fresh(cls, storage: Path, name: str) -> SearchFolder:
        """The first of <name>, <name>-2, ... that is not taken; created."""
        storage.mkdir(parents=True, exist_ok=True)
        while True:
            root = cls.free_place(storage, name)
            with contextlib.suppress(FileExistsError):  # by another search in this moment
                root.mkdir()
                break
        folder = cls(root)
        folder.origin.write_text(json.dumps({"folder": str(root)}), encoding="utf-8")
        return folder

    @staticmethod
    def free_place(storage: Path, name: str) -> Path:
        """The first of <name>, <name>-2, ... that is not taken, in a storage that need not be there."""
        number, root = 1, storage / name
        while root.exists() or root.is_symlink():
            number += 1
            root = storage / f"{name}-{number}"
        return root

    @classmethod
    def newest(cls, storage: Path, name: str) -> SearchFolder:
        """The newest search of that name. Raises ConfigError if there is none."""
        searches = cls._of(storage, name)
        if not searches:
            raise ConfigError(f"--resume: no search named {name!r} in {storage}; {cls._told(storage)}")
        return searches[-1]

    @classmethod
    def named(cls, storage: Path, folder: str) -> SearchFolder:
        """The search in a folder of the storage, given by its name there or by its path. Raises ConfigError."""
        for root in (storage / folder, Path(folder).expanduser().absolute()):
            if (root / "search.yaml").is_file() and root.parent.resolve() == storage.resolve():
                return cls(storage / root.name)
        raise ConfigError(f"--resume: no search {folder!r} in {storage}; {cls._told(storage)}")

    @classmethod
    def unended(cls, storage: Path, name: str) -> list[SearchFolder]:
        """The searches of that name that were killed, or run, oldest first."""
        return [folder for folder in cls._of(storage, name) if not folder.ended]

    @classmethod
    def _told(cls, storage: Path) -> str:
        """What can be resumed in a storage."""
        searches = sorted((cls(p.parent) for p in storage.glob("*/search.yaml")), key=lambda folder: folder.root.name)
        if not searches:
            return "there is none at all; start one without --resume"
        open_ones = [folder.root.name for folder in searches if not folder.ended]
        ended = [folder.root.name for folder in searches if folder.ended]
        return f"not ended: {', '.join(open_ones) or 'none'}; ended: {', '.join(ended) or 'none'}"

    @classmethod
    def _of(cls, storage: Path, name: str) -> list[SearchFolder]:
        """The searches of a name, oldest first."""
        pattern, searches = re.escape(name) + r"(-\d+)?", [cls(p.parent) for p in storage.glob("*/search.yaml")]
        # `fresh` has written its origin
        searches = [f for f in searches if re.fullmatch(pattern, f.root.name) and f.origin.is_file()]
        # By the number too: a file system's clock may be coarse
        return sorted(searches, key=lambda f: (f.snapshot.stat().st_mtime_ns, len(f.root.name), f.root.name))

    @property
    def ended(self) -> bool:
        """Whether the search has run to its end, for better or worse."""
        return self.state.exists() and "ended" in json.loads(self.state.read_text(encoding="utf-8"))

    def sweep(self) -> None:
        """Remove what killed writers have left unfinished. For the driver that holds the lock."""
        for half in [p for p in self.root.rglob(".*.new") if not p.is_relative_to(self.tune)]:
            if half.is_dir():
                shutil.rmtree(half, ignore_errors=True)
            else:
                half.unlink(missing_ok=True)

    @classmethod
    def existing(cls, root: str | Path) -> SearchFolder:
        """The folder of a search that has run. Raises ConfigError if `root` is none."""
        folder = cls(Path(root).expanduser().absolute())
        if not folder.snapshot.is_file():
            raise ConfigError(
                f"{str(root)!r} is not the folder of a search (it has no search.yaml); give the folder that "
                "`headfold search` printed, e.g. runs/demo"
            )
        journal.check_format(folder.journal)
        return folder

    def stored(self) -> dict[str, Any]:
        """The configuration as it was kept. Raises ConfigError if it is none any more."""
        return read_sections(self.snapshot, "cannot be read")

    @property
    def address(self) -> str | None:
        """The address whose working folder holds this search; None for a folder that stands for itself."""
        storage = str(self.stored().get("storage")) if self.snapshot.is_file() else ""
        return storage if is_remote(storage) and storage_path(storage) == self.storage else None

    @property
    def train_address(self) -> str | None:
        """Where workers keep training checkpoints, where that is no folder."""
        return below(self.address, f"{self.root.name}/{self.train.name}") if self.address else None

    @property
    def readable(self) -> bool:
        """Whether the search is of a version whose journal is read here."""
        with contextlib.suppress(ConfigError):
            journal.check_format(self.journal)
            return True
        return False

    def trial(self, trial_id: str) -> Path:
        """Raises ConfigError for an id that would lead out of the folder: records may come from elsewhere."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", trial_id):
            raise ConfigError(f"{self.journal}: {trial_id[:100]!r} is no trial's id; the file has been changed")
        return self.root / "trials" / trial_id


def disk_free(folder: Path) -> int:
    """Bytes that are free where a folder lies or would lie."""
    folder = folder.absolute()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
