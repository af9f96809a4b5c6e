"""Run a verb: options, check, estimate, work, result, in the same way for all verbs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.models import OptionInfo, ParameterInfo

from orchestrator.cli import help_panels
from orchestrator.config.options import DryRun, JsonFile, Typed, Verbose, option_types
from orchestrator.tasks.packages import check_packages
from orchestrator.tasks.task import print_by_topic

if TYPE_CHECKING:
    from orchestrator.tasks.task import Task


_VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT", list[str]: "TEXT"}


def command(name: str, options: type, run: Callable[..., None], **more: Any) -> Callable[..., None]:
    """Return the function of a verb for Typer: it calls `run` with an object of `options`.

    Args:
        name: Name of the verb.
        options: The class of its options, whose docstring is its help.
        run: Takes the options, and those in `more` by name.
        more: Annotations of options of the runner: `dry_run`, `json`, `verbose`.
    """

    def verb(**values: Any) -> None:
        run_options = {key: values.pop(key) for key in more}
        run(options(**values), **run_options)

    defaults = {field.name: field.default for field in fields(options)}
    parameters = [
        _parameter(key, kind, defaults[key]) for key, kind in option_types(options).items()
    ]
    for key, kind in more.items():
        parameters.append(_parameter(key, kind, None if key == "json" else False))
    verb.__name__, verb.__doc__ = name, options.__doc__
    verb.__signature__ = inspect.Signature([each for each in parameters if each])  # type: ignore[attr-defined]
    return verb


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter | None:
    """Return the parameter of an option for Typer; None for an option of Python alone."""
    kind, *extras = get_args(annotation) if get_args(annotation) else (annotation,)
    described = next((extra for extra in extras if isinstance(extra, ParameterInfo)), None)
    if described is None:
        return None
    kind = next((extra.annotation for extra in extras if isinstance(extra, Typed)), kind)
    if isinstance(described, OptionInfo):
        described = copy(described)
        described.rich_help_panel = help_panels.PANELS.get(name)
        described.metavar = described.metavar or _metavar(kind)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, described],
    )


def _metavar(kind: Any) -> str | None:
    """Return the metavar of an option; blank for a switch, None for named choices."""
    kinds = set(get_args(kind) or (kind,)) - {type(None)}
    if bool in kinds:
        return " "
    return next((word for each, word in _VALUES.items() if each in kinds), None)


def task_command(
    name: str,
    options: type,
    task: str,
    *,
    needs: Sequence[str] = (),
    dry_run: bool = True,
    estimates: bool = False,
) -> Callable[..., None]:
    """Return the function of a verb whose work is a task, which is loaded when the verb is run.

    An option of the runner that the verb defines itself, such as a dry run of an upload, is handled
    by the task.

    Args:
        task: `module:Class`.
        needs: Packages that only processes started by the verb import.
        dry_run: Whether the verb can be rehearsed.
        estimates: Whether it prints an estimate of memory, whose parts `--verbose` prints.
    """

    def run(
        values: Any, *, dry_run: bool = False, json: Path | None = None, verbose: bool = False
    ) -> None:
        check_packages(name, *needs)
        task_class: type[Task[Any, Any]] = _load(task)
        run_verb(task_class(values, rehearsal=dry_run, verbose=verbose), json)

    shared = {"dry_run": DryRun, "json": JsonFile} if dry_run else {"json": JsonFile}
    if estimates:
        shared["verbose"] = Verbose
    option_kinds = option_types(options)
    return command(
        name, options, run, **{key: kind for key, kind in shared.items() if key not in option_kinds}
    )


def function_command(name: str, options: type, function: str) -> Callable[..., None]:
    """Return the function of a verb that is a plain function of its options.

    Args:
        function: `module:function`, loaded when the verb is run.
    """
    return command(name, options, lambda values: _load(function)(values))


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def run_verb(task: Task[Any, Any], json: Path | None) -> None:
    """Check a task, then print its estimate, or run it and print its result."""
    from orchestrator.storage.outputs import check_results, write_result

    check_results(json, **task.outputs)
    task.check()
    if task.rehearsal:
        for words in task.rehearse():
            print_by_topic(words)
        without = f", {json} neither" if json is not None else ""
        print(f"dry run: all checks passed, nothing was written{without}")
        return
    task.announce()
    record = task.run()
    if json is not None:
        write_result(json, record)
    task.show(record)
    if code := task.exit_code(record):
        raise typer.Exit(code)
