"""Tasks of lm-evaluation-harness by name: shipped, in files of a folder, or those of the harness.

A task file is read as data: `!function`, which names a program next to the file, is refused,
templates are rendered in a sandbox (`orchestrator.evaluation.tasks`), and metrics must be those of
the harness, since it would fetch the program of any other from the hub. Names that the harness
knows itself are loaded by it, with what they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from attention.io.files import sha256
from orchestrator.config.schema import ConfigError

SHIPPED = {"demo": Path(__file__).parent / "demo_tasks"}
STRING_MATCH = "string_match"
"""Metric of the long-context tasks: the share of the expected strings that an answer has."""
ACCURACIES = ("acc", "exact_match", STRING_MATCH)
_FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text")  # data sets that are files

TaskConfig = dict[str, Any]
"""A task file of the harness, as it was read."""


class NotInstalledError(ConfigError):
    """lm-evaluation-harness is requested and not installed."""


def check_installed() -> None:
    """Check that the harness can be imported.

    Raises:
        NotInstalledError: Naming what to install.
    """
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise NotInstalledError(
            "tasks need lm-evaluation-harness, which is not installed: pip install lm-eval, or "
            "Headfold's extra eval"
        )


def task_specs(names: Iterable[str]) -> list[str | TaskConfig]:
    """Return what the harness takes for each name; nothing is loaded yet.

    Args:
        names: `demo`, a folder of task files or one such file (each task becomes the content of
            its file, paths absolute), or a name of the harness's own, which stays as it is.

    Raises:
        ConfigError: For what is none of them, and for a file that cannot be used.
    """
    specs: list[str | TaskConfig] = []
    for name in names:
        if not name.strip():
            raise ConfigError(f"tasks: got an empty name; give {_allowed()}")
        path = SHIPPED.get(name, Path(name).expanduser())
        if path.is_dir():
            specs += _tasks_in(path.absolute())
        elif path.is_file():
            specs.append(_read_task(path.absolute()))
        elif path.suffix in (".yaml", ".yml") or len(path.parts) != 1:
            raise ConfigError(f"tasks: no file or folder at {name!r}; give {_allowed()}")
        else:
            specs.append(name)
    tasks = [spec if isinstance(spec, str) else spec["task"] for spec in specs]
    if repeated := sorted({task for task in tasks if tasks.count(task) > 1}):
        raise ConfigError(
            f"tasks: {repeated[0]!r} is requested more than once; every task needs its own name"
        )
    return specs


def data_digests(specs: Iterable[str | TaskConfig]) -> list[str]:
    """Return the SHA-256 of each data file of task files, in the order in which they are named."""
    digests = []
    for spec in specs:
        options = {} if isinstance(spec, str) else spec.get("dataset_kwargs") or {}
        named = options.get("data_files") or []
        groups = list(named.values()) if isinstance(named, Mapping) else [named]
        for group in groups:
            for pattern in group if isinstance(group, list) else [group]:
                path = Path(pattern)
                for file in [path] if path.is_file() else sorted(path.parent.glob(path.name)):
                    digests.append(sha256(file))
    return digests


def with_absolute_paths(names: Iterable[str]) -> list[str]:
    """Return the names, folders and files by their absolute paths: for another working folder."""
    paths = {name: Path(name).expanduser().absolute() for name in names}
    return [
        str(path) if name not in SHIPPED and path.exists() else name for name, path in paths.items()
    ]


def _allowed() -> str:
    return (
        f"{', '.join(SHIPPED)}, a folder of task files (.yaml), one such file, or a name that the "
        "harness knows"
    )


def _tasks_in(folder: Path) -> list[TaskConfig]:
    """Return the tasks of a folder; files without a key `task` are included by others."""
    files = sorted((*folder.glob("*.yaml"), *folder.glob("*.yml")))
    contents = {file: _read_yaml(file) for file in files}
    tasks = [
        _checked(task, file) for file, task in contents.items() if isinstance(task.get("task"), str)
    ]
    if not tasks:
        raise ConfigError(f"tasks: no task file (.yaml with a key `task`) in {str(folder)!r}")
    return tasks


def _read_task(file: Path) -> TaskConfig:
    task = _read_yaml(file)
    if not isinstance(task.get("task"), str):
        raise ConfigError(
            f"tasks: {str(file)!r} has no key `task` with a name; it is no task file of the harness"
        )
    return _checked(task, file)


def _read_yaml(file: Path, including: tuple[Path, ...] = ()) -> TaskConfig:
    """Read a file over those that it includes, with absolute paths of its data."""
    if file in including:
        raise ConfigError(f"tasks: {str(file)!r} includes itself")
    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if "!function" in str(error):
            raise ConfigError(
                f"tasks: {str(file)!r} names a program by !function, and task files are read as "
                "data only; write it as a template, e.g. doc_to_text: '{{question}}'"
            ) from None
        message = " ".join(str(error).split())
        raise ConfigError(f"tasks: {str(file)!r} cannot be read as YAML: {message}") from None
    if not isinstance(task, dict):
        raise ConfigError(
            f"tasks: {str(file)!r} must hold keys and values, got {type(task).__name__}"
        )
    _make_data_absolute(task, file.parent)
    included = task.pop("include", [])
    merged: TaskConfig = {}
    for other in [included] if isinstance(included, str) else included:
        merged |= _read_yaml(file.parent / str(other), (*including, file))
    return merged | task


def _make_data_absolute(task: TaskConfig, folder: Path) -> None:
    """Make the paths of data files absolute, which are relative to the folder of their task file.

    Raises:
        ConfigError: For a file that is not there.
    """
    options = task.get("dataset_kwargs")
    if task.get("dataset_path") not in _FILE_FORMATS:
        return
    if not isinstance(options, Mapping) or not options.get("data_files"):
        return

    def absolute(name: Any) -> Any:
        if isinstance(name, list):
            return [absolute(entry) for entry in name]
        path = (folder / str(name)).absolute()
        root = Path(path.anchor)
        if not path.is_file() and not any(root.glob(str(path.relative_to(root)))):
            raise ConfigError(
                f"tasks: {task.get('task')}: no data file at {str(path)!r}; data_files are next "
                "to the task file"
            )
        return str(path)

    files = options["data_files"]
    if isinstance(files, Mapping):
        files = {split: absolute(name) for split, name in files.items()}
    else:
        files = absolute(files)
    task["dataset_kwargs"] = {**options, "data_files": files}


def _checked(task: TaskConfig, file: Path) -> TaskConfig:
    """Return the task, unless it would run or fetch a program.

    Raises:
        ConfigError: If it would.
    """
    check_installed()
    from lm_eval.api import metrics
    from lm_eval.api.registry import metric_registry

    assert metrics  # whose import fills the registry
    for entry in task.get("metric_list") or []:
        metric = entry.get("metric") if isinstance(entry, Mapping) else entry
        fetched = not isinstance(entry, Mapping) or entry.get("hf_evaluate")
        if not isinstance(metric, str) or metric not in metric_registry or fetched:
            raise ConfigError(
                f"tasks: {str(file)!r} has metric {metric!r}, which the harness would fetch from "
                f"the hub as a program; choose among its own, e.g. {', '.join(ACCURACIES)}"
            )
    if task.get("unsafe_code"):
        raise ConfigError(
            f"tasks: {str(file)!r} runs what the model writes (unsafe_code); that is not done here"
        )
    return task


def accuracies_of(metrics: Iterable[str]) -> list[str]:
    """Return which of a task's metrics are its accuracy: one of each of its filters.

    `exact_match.strict-match` is the metric `exact_match` of the filter `strict-match`.
    """
    names = list(metrics)
    of_kind = ([n for n in names if n.partition(".")[0] == kind] for kind in ACCURACIES)
    return next(filter(None, of_kind), [])
