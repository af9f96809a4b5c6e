"""Where the files of a search lie.

<storage>/mlflow.db, mlartifacts/     the MLflow store, unless tracking.uri names another
<storage>/<name>/                     one search; a second one of the same name becomes <name>-2
    search.yaml, versions.json        snapshot of the configuration, package versions
    base.json, data/, calibration/    the untouched model's scores; token sequences and statistics that trials share
    trials.json, trials/<id>/         records; recipe, plan, converted and trained checkpoint of each trial
    tune/, train/                     state of Ray Tune and Ray Train
    promotion.json, promoted/         the promotion's steps and checkpoints
    report.html
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from orchestrator.config import ConfigError


def in_ray_job() -> bool:
    """Whether this process was started by `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def home() -> Path:
    """Where relative storage of a Ray job goes: the job's own working folder is Ray's and vanishes."""
    return Path(os.environ.get("HEADFOLD_HOME", "~/headfold")).expanduser()


def storage_path(storage: str) -> Path:
    """The absolute folder of a `storage` setting.

    Relative paths count from the working folder, in a Ray job from HEADFOLD_HOME (default ~/headfold). Raises
    ConfigError for an address that is not a folder: trials on all nodes read and write it as files.
    """
    address = urlparse(storage)
    if address.scheme == "file":
        return Path(address.path)
    if len(address.scheme) > 1:
        raise ConfigError(
            f"storage: got {storage!r}; it must be a folder that every node sees. Mount the bucket or share on all "
            "nodes and give the mounted path"
        )
    path = Path(storage).expanduser()
    return path if path.is_absolute() else (home() if in_ray_job() else Path.cwd()) / path


def check_writable(folder: Path) -> None:
    """Create `folder` and write a file into it. Raises ConfigError if either fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".headfold"):
            pass
    except OSError as error:
        raise ConfigError(
            f"storage: cannot write to {str(folder)!r} ({error.strerror or error}); give a folder that can be written"
        ) from None


@dataclass(frozen=True)
class SearchFolder:
    """The files of one search."""

    root: Path

    @classmethod
    def fresh(cls, storage: Path, name: str) -> SearchFolder:
        """The first of <name>, <name>-2, ... that is not taken; created."""
        storage.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            root = storage / (name if number == 1 else f"{name}-{number}")
            try:
                root.mkdir()
            except FileExistsError:
                number += 1
            else:
                return cls(root)

    @classmethod
    def newest(cls, storage: Path, name: str) -> SearchFolder:
        """The newest search of that name. Raises ConfigError if there is none."""
        found = [p.parent for p in storage.glob("*/search.yaml") if _belongs(p.parent.name, name)]
        if not found:
            raise ConfigError(f"--resume: no search named {name!r} in {storage}; start one without --resume")
        return cls(max(found, key=lambda root: (root / "search.yaml").stat().st_mtime))

    @classmethod
    def existing(cls, root: str | Path) -> SearchFolder:
        """The folder of a search that has run. Raises ConfigError if `root` is none."""
        folder = cls(Path(root).expanduser().absolute())
        if not folder.snapshot.is_file():
            raise ConfigError(
                f"{str(root)!r} is not the folder of a search (it has no search.yaml); give the folder that "
                "`headfold search` printed, e.g. runs/demo"
            )
        return folder

    @property
    def storage(self) -> Path:
        return self.root.parent

    @property
    def snapshot(self) -> Path:
        return self.root / "search.yaml"

    @property
    def versions(self) -> Path:
        return self.root / "versions.json"

    @property
    def state(self) -> Path:
        """What `search` has settled: the MLflow parent run, the command, when it started and ended."""
        return self.root / "state.json"

    @property
    def base(self) -> Path:
        return self.root / "base.json"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def calibration(self) -> Path:
        return self.root / "calibration"

    @property
    def trials_file(self) -> Path:
        return self.root / "trials.json"

    @property
    def tune(self) -> Path:
        return self.root / "tune"

    @property
    def train(self) -> Path:
        return self.root / "train"

    @property
    def promotion(self) -> Path:
        return self.root / "promotion.json"

    @property
    def promoted(self) -> Path:
        return self.root / "promoted"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def trial(self, trial_id: str) -> Path:
        return self.root / "trials" / trial_id

    def tokens(self, split: str) -> Path:
        return self.data / f"{split}.safetensors"


def _belongs(folder: str, name: str) -> bool:
    return folder == name or (folder.startswith(f"{name}-") and folder[len(name) + 1 :].isdigit())
