"""The files of a search.

<storage>/mlflow.db, mlartifacts/    the MLflow store, unless tracking.uri names another
<storage>/<name>/                    one search; a second one of the same name becomes <name>-2
    search.yaml, versions.json       snapshot of the configuration, package versions
    original.json                    the original model's scores
    data/, calibration/              token sequences and statistics that trials share
    decode_times.json                seconds per token by KV heads, where that is an objective
    journal.jsonl                    what was tried, reported, decided and ended: the only record
    .conversions/                    conversions that trials share, as long as trials run
    trials/<id>/                     recipe, plan, converted and trained checkpoint of each trial
    state.json, driver.lock          when and how the search began and ended; which process runs it
    tune/, train/                    files of Ray Tune and Ray Train
    promotion.json, promoted/        the promotion's steps and checkpoints: `exported` for stock
                                     software, or `headfold`
    report.html
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict, cast
from urllib.parse import urlparse

from attention.io.replacing import checkpoint_around, parents_made
from orchestrator.config.parsing import ConfigError, read_sections
from orchestrator.storage import journal
from orchestrator.storage.mirror import check_address, is_remote, working_folder
from trainers.jobs.addresses import below


def in_ray_job() -> bool:
    """Return whether this process was started by `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def home() -> Path:
    """Return the folder of HEADFOLD_HOME, by default ~/headfold.

    It has the relative storage of Ray jobs, whose working folder is Ray's and vanishes, and the
    working folders of addresses.
    """
    return Path(os.environ.get("HEADFOLD_HOME", "~/headfold")).expanduser().absolute()


def storage_path(storage: str) -> Path:
    """Return the absolute folder of a `storage` setting; for an address its working folder.

    Relative paths count from the current folder, in a Ray job from `home`.

    Raises:
        ConfigError: For an address that contains credentials or names no bucket.
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
    """Try to create `folder` and to write a file into it, without a trace.

    Raises:
        ConfigError: If either fails, or if it is in a checkpoint.
    """
    if (around := checkpoint_around(folder.resolve() / "search")) is not None:
        raise ConfigError(
            f"{key}: {str(folder)!r} is within a checkpoint, {str(around)!r}; give a folder outside"
        )
    try:
        with (
            parents_made(folder / "file", keep=False),
            tempfile.NamedTemporaryFile(dir=folder, prefix=".headfold"),
        ):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot write to {str(folder)!r} ({error.strerror or error}); give a folder "
            "that can be written"
        ) from None


class SearchState(TypedDict, total=False):
    """The content of `state.json`; a search that has ended says how."""

    started: str
    """In ISO 8601."""
    resumed: str
    """When the running driver took it up again; only while it runs."""
    command: str
    tracking: str
    """Address of the MLflow store, without a password."""
    parent_run: str
    seconds: float
    """Time of all its earlier drivers."""
    ended: str


_UNFINISHED = re.compile(r"\..*\.new")
"""Names of files and folders until they are whole (`attention.io.files`)."""


@dataclass
class SearchFolder:
    """The files of one search.

    Attributes:
        waiting: The nodes that it waits for, and since when.
        estimate: The estimate before it began.
        engine_caches: What its models lose with their caches in the formats of engines.
        origin: The folder in which it was made, see `orchestrator.storage.trust`.
    """

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
        self.engine_caches = self.root / "engine_caches.json"
        self.report = self.root / "report.html"

    @classmethod
    def fresh(cls, storage: Path, name: str) -> SearchFolder:
        """Create the first of <name>, <name>-2, ... that does not exist."""
        storage.mkdir(parents=True, exist_ok=True)
        while True:
            root = cls.free_path(storage, name)
            with contextlib.suppress(FileExistsError):  # by another search in this moment
                root.mkdir()
                break
        folder = cls(root)
        origin = {"folder": str(root), "id": uuid.uuid4().hex}
        folder.origin.write_text(json.dumps(origin), encoding="utf-8")
        return folder

    @staticmethod
    def free_path(storage: Path, name: str) -> Path:
        """Return the first of <name>, <name>-2, ... that does not exist."""
        number = 1
        root = storage / name
        while root.exists() or root.is_symlink():
            number += 1
            root = storage / f"{name}-{number}"
        return root

    @classmethod
    def newest(cls, storage: Path, name: str) -> SearchFolder:
        """Return the newest search of a name.

        Raises:
            ConfigError: If there is none.
        """
        searches = cls._of(storage, name)
        if not searches:
            others = cls._describe(storage)
            raise ConfigError(f"--resume: no search named {name!r} in {storage}; {others}")
        return searches[-1]

    @classmethod
    def named(cls, storage: Path, folder: str) -> SearchFolder:
        """Return the search in a folder of the storage, named by its name there or by its path.

        Raises:
            ConfigError: If there is none.
        """
        for root in (storage / folder, Path(folder).expanduser().absolute()):
            if (root / "search.yaml").is_file() and root.parent.resolve() == storage.resolve():
                return cls(storage / root.name)
        raise ConfigError(f"--resume: no search {folder!r} in {storage}; {cls._describe(storage)}")

    @classmethod
    def unended(cls, storage: Path, name: str) -> list[SearchFolder]:
        """Return the searches of a name that were killed, or run, oldest first."""
        return [folder for folder in cls._of(storage, name) if not folder.ended]

    @classmethod
    def _describe(cls, storage: Path) -> str:
        """Return the searches in a storage, in words."""
        searches = [cls(snapshot.parent) for snapshot in storage.glob("*/search.yaml")]
        if not searches:
            return "there is none at all; start one without --resume"
        ended = sorted(folder.root.name for folder in searches if folder.ended)
        others = sorted(folder.root.name for folder in searches if not folder.ended)
        return f"unfinished: {', '.join(others) or 'none'}; finished: {', '.join(ended) or 'none'}"

    @classmethod
    def _of(cls, storage: Path, name: str) -> list[SearchFolder]:
        """Return the searches of a name, oldest first."""
        pattern = re.escape(name) + r"(-\d+)?"
        searches = [cls(snapshot.parent) for snapshot in storage.glob("*/search.yaml")]

        # `fresh` has written its origin
        numbered = [
            f for f in searches if re.fullmatch(pattern, f.root.name) and f.origin.is_file()
        ]
        of_name = [folder for folder in numbered if folder._configured_name(name) == name]
        return sorted(of_name, key=lambda folder: folder._age)

    def _configured_name(self, default: str) -> str:
        """Return the name in the configuration, which may itself end in a number (`demo-2`)."""
        with contextlib.suppress(ConfigError):
            return str(self.stored().get("name", default))
        return default

    @property
    def _age(self) -> tuple[float, int, str]:
        """The start and the number of a search, by which the searches of a name are ordered.

        Never by the times of files: a folder that was filled from an address has new ones.
        """
        return self.started, len(self.root.name), self.root.name

    @property
    def started(self) -> float:
        """When the search began, in seconds since 1970: by its journal, else by its state.

        0 if neither says it.
        """
        if (began := journal.began(self.journal)) is not None:
            return began
        with contextlib.suppress(TypeError, ValueError):
            return datetime.fromisoformat(self.read_state().get("started", "")).timestamp()
        return 0.0

    def read_state(self) -> SearchState:
        """Return `state.json`; empty if there is none, or if another kind of file is there."""
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return cast(SearchState, state) if isinstance(state, dict) else {}

    @property
    def ended(self) -> bool:
        """Whether the search has run to its end, with or without success."""
        return "ended" in self.read_state()

    def sweep(self) -> None:
        """Remove what killed writers have left unfinished; for the driver that has the lock."""
        # Not rglob, which fails where a worker removes a folder meanwhile
        for root, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if Path(root, name) != self.tune]
            for name in (name for name in folders if _UNFINISHED.fullmatch(name)):
                shutil.rmtree(Path(root, name), ignore_errors=True)
            for name in (name for name in files if _UNFINISHED.fullmatch(name)):
                Path(root, name).unlink(missing_ok=True)

    @classmethod
    def existing(cls, root: str | Path) -> SearchFolder:
        """Return the folder of a search that has run.

        Raises:
            ConfigError: If `root` is none.
        """
        folder = cls(Path(root).expanduser().absolute())
        if not folder.snapshot.is_file():
            raise ConfigError(
                f"{str(root)!r} is not the folder of a search (it has no search.yaml); give the "
                "folder that `headfold search` printed, e.g. runs/demo"
            )
        journal.check_format(folder.journal)
        return folder

    def stored(self) -> dict[str, Any]:
        """Return the snapshot of the configuration.

        Raises:
            ConfigError: If it cannot be read.
        """
        return read_sections(self.snapshot, "cannot be read")

    @property
    def address(self) -> str | None:
        """The address of the working folder that contains this search; None without one."""
        storage = str(self.stored().get("storage")) if self.snapshot.is_file() else ""
        if is_remote(storage) and storage_path(storage) == self.storage:
            return storage
        return None

    @property
    def train_address(self) -> str | None:
        """The address of training checkpoints; None where that is a folder."""
        address = self.address
        return below(address, f"{self.root.name}/{self.train.name}") if address else None

    @property
    def readable(self) -> bool:
        """Whether this version can read the search's journal."""
        with contextlib.suppress(ConfigError):
            journal.check_format(self.journal)
            return True
        return False

    def trial(self, trial_id: str) -> Path:
        """Return the folder of a trial.

        Raises:
            ConfigError: For an id that would lead out of the search: records may come from
                elsewhere.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", trial_id):
            raise ConfigError(
                f"{self.journal}: {trial_id[:100]!r} is no trial's id; the file has been changed"
            )
        return self.root / "trials" / trial_id


def disk_free(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free
