"""Which tasks of lm-evaluation-harness are to be run: those that come along, task files in a folder, names it knows.

A task file is read as data: `!function`, which names a program beside the file, is refused, templates are rendered in
a sandbox (`orchestrator.evaluation.tasks`), and metrics must be the harness's own, since it would fetch the program of
any other from the hub. Names that the harness knows itself are loaded by it, with what they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.schema import ConfigError

SHIPPED = {"demo": Path(__file__).parent / "demo_tasks"}
LOCAL = ("json", "csv", "parquet", "arrow", "text")  # data sets that are files
ACCURACIES = ("acc", "exact_match")


class NotInstalledError(ConfigError):
    """lm-evaluation-harness is asked for and not there."""


def check_installed() -> None:
    """Raises NotInstalledError, naming what to install."""
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise NotInstalledError(
            "tasks need lm-evaluation-harness, which is not installed: pip install lm-eval, or Headfold's extra eval"
        )


def task_specs(asked: Iterable[str]) -> list[str | dict[str, Any]]:
    """What the harness is handed for each of `asked`: `demo`, a folder of task files or one such file (each task as
    the dict of its file, paths absolute), or a name of the harness's own as it is.

    Raises ConfigError for what is none of them, and for a file that cannot be used; nothing is loaded yet.
    """
    specs: list[str | dict[str, Any]] = []
    for name in asked:
        if not name.strip():
            raise ConfigError(f"tasks: got an empty name; give {_allowed()}")
        place = SHIPPED.get(name, Path(name).expanduser())
        if place.is_dir():
            specs += _of_folder(place.absolute())
        elif place.is_file():
            specs.append(_task_of(place.absolute()))
        elif place.suffix in (".yaml", ".yml") or len(place.parts) != 1:
            raise ConfigError(f"tasks: no file or folder at {name!r}; give {_allowed()}")
        else:
            specs.append(name)
    names = [spec if isinstance(spec, str) else spec["task"] for spec in specs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"tasks: {repeated[0]!r} is asked for more than once; every task needs a name of its own")
    return specs


def with_absolute_paths(asked: Iterable[str]) -> list[str]:
    """The same, folders and files by their absolute paths: for a process in another folder."""
    paths = {name: Path(name).expanduser().absolute() for name in asked}
    return [str(path) if name not in SHIPPED and path.exists() else name for name, path in paths.items()]


def _allowed() -> str:
    return f"{', '.join(SHIPPED)}, a folder of task files (.yaml), one such file, or a name that the harness knows"


def _of_folder(folder: Path) -> list[dict[str, Any]]:
    """The tasks of a folder; files without a `task` of their own are there to be included by others."""
    files = sorted((*folder.glob("*.yaml"), *folder.glob("*.yml")))
    found = [_read(file) for file in files]
    tasks = [_checked(task, file) for file, task in zip(files, found, strict=True) if isinstance(task.get("task"), str)]
    if not tasks:
        raise ConfigError(f"tasks: no task file (.yaml with a key `task`) in {str(folder)!r}")
    return tasks


def _task_of(file: Path) -> dict[str, Any]:
    task = _read(file)
    if not isinstance(task.get("task"), str):
        raise ConfigError(f"tasks: {str(file)!r} has no key `task` with a name; it is no task file of the harness")
    return _checked(task, file)


def _read(file: Path, including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A task file, what it includes under it, and the paths of its data made absolute."""
    if file in including:
        raise ConfigError(f"tasks: {str(file)!r} includes itself")
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if "!function" in str(error):
            raise ConfigError(
                f"tasks: {str(file)!r} names a program by !function, and task files are read as data only; write it "
                "as a template, e.g. doc_to_text: '{{question}}'"
            ) from None
        said = " ".join(str(error).split())
        raise ConfigError(f"tasks: {str(file)!r} cannot be read as YAML: {said}") from None
    if not isinstance(task, dict):
        raise ConfigError(f"tasks: {str(file)!r} must hold keys and values, got {type(task).__name__}")
    _absolute(task, file.parent)
    included = task.pop("include", [])
    merged: dict[str, Any] = {}
    for other in [included] if isinstance(included, str) else included:
        merged |= _read(file.parent / str(other), (*including, file))
    return merged | task


def _absolute(task: dict[str, Any], folder: Path) -> None:
    """Data files that lie beside a task file are found from anywhere. Raises ConfigError for one that is not there."""
    given = task.get("dataset_kwargs")
    if task.get("dataset_path") not in LOCAL or not isinstance(given, Mapping) or not given.get("data_files"):
        return
    files = given["data_files"]

    def found(name: Any) -> Any:
        if isinstance(name, list):
            return [found(one) for one in name]
        path = folder / str(name)
        if not path.is_file() and not any(folder.glob(str(name))):
            raise ConfigError(f"tasks: {task.get('task')}: no data file at {str(path)!r}; data_files are beside it")
        return str(path.absolute())

    files = {split: found(name) for split, name in files.items()} if isinstance(files, Mapping) else found(files)
    task["dataset_kwargs"] = {**given, "data_files": files}


def _checked(task: dict[str, Any], file: Path) -> dict[str, Any]:
    """Raises ConfigError for a task that would run or fetch a program."""
    check_installed()
    from lm_eval.api import metrics
    from lm_eval.api.registry import metric_registry

    assert metrics  # whose import fills the registry
    for entry in task.get("metric_list") or []:
        metric = entry.get("metric") if isinstance(entry, Mapping) else entry
        own = isinstance(entry, Mapping) and not entry.get("hf_evaluate")
        if not isinstance(metric, str) or metric not in metric_registry or not own:
            raise ConfigError(
                f"tasks: {str(file)!r} has metric {metric!r}, which the harness would fetch from the hub as a program; "
                f"choose among its own, e.g. {', '.join(ACCURACIES)}"
            )
    if task.get("unsafe_code"):
        raise ConfigError(f"tasks: {str(file)!r} runs what the model writes (unsafe_code); that is not done here")
    return task


def accuracy_of(metrics: Iterable[str]) -> str | None:
    """Which of a task's metrics is its accuracy; None if it has none."""
    return next((name for name in ACCURACIES if name in metrics), None)
