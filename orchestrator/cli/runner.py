"""How a verb is run: options, check, estimate, work, result, in the same way for all."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer.models import ParameterInfo

from orchestrator.cli.usage import check_packages
from orchestrator.config.options import DryRun, JsonFile, Typed, option_types

if TYPE_CHECKING:
    from orchestrator.tasks.task import Task


def command(name: str, options: type, run: Callable[..., None], **more: Any) -> Callable[..., None]:
    """Return the function that Typer makes a verb of: it calls `run` with an object of `options`.

    Args:
        name: What the verb is called.
        options: The class of its options, whose docstring is its help.
        run: Takes the options, and what is in `more` by name.
        more: Annotations of options that belong to the runner: `dry_run`, `json`.
    """

    def verb(**values: Any) -> None:
        own = {key: values.pop(key) for key in more}
        run(options(**values), **own)

    defaults = {field.name: field.default for field in fields(options)}
    parameters = [
        _parameter(key, kind, defaults[key]) for key, kind in option_types(options).items()
    ]
    for key, kind in more.items():
        parameters.append(_parameter(key, kind, False if key == "dry_run" else None))
    verb.__name__, verb.__doc__ = name, options.__doc__
    verb.__signature__ = inspect.Signature([each for each in parameters if each])  # type: ignore[attr-defined]
    return verb


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter | None:
    """Return the parameter of an option as Typer reads it; None for one for Python alone."""
    kind, *extras = get_args(annotation) if get_args(annotation) else (annotation,)
    described = next((extra for extra in extras if isinstance(extra, ParameterInfo)), None)
    if described is None:
        return None
    kind = next((extra.annotation for extra in extras if isinstance(extra, Typed)), kind)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, described],
    )


def task_command(
    name: str, options: type, task: str, *, needs: Sequence[str] = ()
) -> Callable[..., None]:
    """Return the function of a verb whose work is a task, which is loaded when the verb is run.

    An option of the runner that the verb has of its own, such as a dry run of an upload, is the
    task's affair.

    Args:
        task: `module:Class`.
        needs: Packages that only processes started by the verb import.
    """

    def run(values: Any, *, dry_run: bool = False, json: Path | None = None) -> None:
        check_packages(name, *needs)
        module, _, class_name = task.partition(":")
        task_class: type[Task[Any, Any]] = getattr(importlib.import_module(module), class_name)
        run_verb(task_class(values, rehearsal=dry_run), json)

    own = option_types(options)
    shared = {"dry_run": DryRun, "json": JsonFile}
    return command(
        name, options, run, **{key: kind for key, kind in shared.items() if key not in own}
    )


def run_verb(task: Task[Any, Any], json: Path | None) -> None:
    """Check a task, then say what it would take, or carry it out and print its result."""
    from orchestrator.storage.outputs import check_results

    check_results(json, **task.outputs)
    task.check()
    if task.rehearsal:
        for words in task.rehearse():
            tell(words)
        rehearsed({})
        return
    task.announce()
    record = task.run()
    task.show(record)
    finish(record, json)


def tell(words: Mapping[str, str]) -> None:
    """Print what a verb would do or take, a line for each thing that it is about."""
    for name, value in words.items():
        print(f"{name}: {value}")


def rehearsed(words: Mapping[str, str]) -> None:
    """Print what a verb would do, and that it was a dry run."""
    tell(words)
    print("dry run: all checks passed, nothing was written")


def finish(record: Mapping[str, Any], file: Path | None) -> None:
    """Write a verb's result where `--json` asks for it."""
    if file is not None:
        from orchestrator.storage.outputs import write_result

        write_result(file, record)
