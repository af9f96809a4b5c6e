"""The command line: `headfold VERB`, or `python -m orchestrator.main VERB`.

Its verbs are tasks and functions of their options (`orchestrator.tasks`). A mistake of the user
ends with one message and exit code 2, a failure of the work with 1, an interruption with 130.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from attention.base.memory import collect_seldom
from orchestrator.cli import help_panels, runner, usage
from orchestrator.config import options
from orchestrator.tasks.packages import TRAINING_PACKAGES

_REPOSITORY = Path(__file__).resolve().parent.parent
_USER_ERROR = 2
_FAILURE = 1
_INTERRUPTED = 130
_PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")

app = typer.Typer(
    name="headfold",
    help=(
        "Search, train and ship attention-head sharing: a smaller KV cache for a pretrained "
        "transformer."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

GOES_ON = {
    "search": "to continue a search that had begun, run the same command with --resume",
    "train": "run the same command to continue",
    "finetune": "run the same command to continue",
    "promote": "run the same command to continue",
    "demo": "to continue, run the same command with --resume",
}


def _version(requested: bool) -> None:
    """Print the version and end.

    In a checkout that is not installed it is that of pyproject.toml.
    """
    if not requested:
        return
    from importlib import metadata

    try:
        version = metadata.version("headfold")
    except metadata.PackageNotFoundError:
        import tomllib

        project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
        version = project["project"]["version"]
    print(f"headfold {version}")
    raise typer.Exit


@app.callback()
def _general(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and end.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb, which now says what an interruption leaves.

    Typer would end with its exit code and not a word.
    """

    @functools.wraps(verb)
    def called(**values: Any) -> None:
        from attention.base.progress import show_progress

        works = verb.__name__ not in ("ui", "watch")  # which show something until they are stopped
        try:
            with show_progress(verb.__name__) if works else contextlib.nullcontext():
                verb(**values)
        except KeyboardInterrupt as stop:
            out, left = values.get("out"), "nothing was written"
            if out is not None and os.path.lexists(out):
                left = f"{out} is whole, as it was before or finished"
            _fail(f"interrupted; {str(stop) or GOES_ON.get(verb.__name__, left)}", _INTERRUPTED)

    return called


_TASKS = "orchestrator.tasks"

_VERBS = {
    verb.__name__: verb
    for verb in (
        runner.function_command("demo", options.DemoOptions, f"{_TASKS}.demo:demo"),
        runner.function_command("init", options.InitOptions, f"{_TASKS}.init:init"),
        runner.task_command(
            "doctor", options.DoctorOptions, f"{_TASKS}.doctor:Doctor", dry_run=False
        ),
        runner.task_command(
            "search", options.SearchOptions, f"{_TASKS}.search:Search", estimates=True
        ),
        runner.task_command(
            "recipes", options.RecipesOptions, f"{_TASKS}.recipes:Recipes", dry_run=False
        ),
        runner.task_command(
            "convert", options.ConvertOptions, f"{_TASKS}.convert:Convert", estimates=True
        ),
        runner.task_command(
            "estimate",
            options.EstimateOptions,
            f"{_TASKS}.estimate:Estimation",
            dry_run=False,
            estimates=True,
        ),
        runner.task_command(
            "train",
            options.TrainOptions,
            f"{_TASKS}.train:Train",
            needs=TRAINING_PACKAGES,
            estimates=True,
        ),
        runner.task_command(
            "finetune",
            options.FinetuneOptions,
            f"{_TASKS}.finetune:Finetune",
            needs=TRAINING_PACKAGES,
            estimates=True,
        ),
        runner.task_command("evaluate", options.EvaluateOptions, f"{_TASKS}.evaluate:Evaluate"),
        runner.function_command("watch", options.WatchOptions, f"{_TASKS}.report:watch_progress"),
        runner.function_command("ui", options.UIOptions, f"{_TASKS}.report:serve_tracking"),
        runner.task_command("promote", options.PromoteOptions, f"{_TASKS}.promote:Promote"),
        runner.task_command("export", options.ExportOptions, f"{_TASKS}.export:Export"),
        runner.task_command("inspect", options.InspectOptions, f"{_TASKS}.inspect:Inspect"),
        runner.task_command(
            "report", options.ReportOptions, f"{_TASKS}.report:SearchReport", dry_run=False
        ),
    )
}

for name in (name for group in help_panels.GROUPS.values() for name in group):
    app.command(name, rich_help_panel=help_panels.group_of(name), epilog=help_panels.epilog(name))(
        _interruptible(_VERBS[name])
    )


def _fail(message: str, code: int) -> NoReturn:
    from orchestrator.tracking.errors import redact

    print(f"headfold: {redact(message)}", file=sys.stderr)
    sys.exit(code)


def _quiet() -> None:
    """Silence libraries that print on import and while loading; verbs print what matters."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A training is half a dozen small processes; on two cores Ray finds that worth a warning each
    # time.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "PYTHON worker processes have been started")
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # else DeepSpeed, imported by transformers, warns on import


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command, with these arguments or those of the process.

    User errors are ValueErrors, here and in all packages below.
    """
    collect_seldom()
    _quiet()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(app(args=words, prog_name="headfold", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        _fail("interrupted", _INTERRUPTED)
    except Exception as error:
        if not words and (show := getattr(error, "show", None)):  # the list of verbs
            show()
            sys.exit(_USER_ERROR)
        if message := usage.usage_message(error, words) or usage.missing_package(error, words):
            _fail(message, _USER_ERROR)
        if os.environ.get("HEADFOLD_TRACEBACK"):
            raise
        if _mistake(error):
            _fail(str(error), _USER_ERROR)
        _fail(
            f"{type(error).__name__}: {error} (set HEADFOLD_TRACEBACK=1 for the traceback)",
            _FAILURE,
        )


def _mistake(error: Exception) -> bool:
    """Return whether our own code raised a ValueError.

    All packages report errors that a user can correct in this way. An error that a library raises
    is a bug of ours.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        isinstance(error, ValueError)
        and trace is not None
        and _ours(trace.tb_frame.f_code.co_filename)
    )


def _ours(file: str) -> bool:
    path = Path(file).resolve()
    return any((_REPOSITORY / name) in path.parents for name in _PACKAGES)


if __name__ == "__main__":
    run()
