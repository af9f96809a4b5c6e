"""What is wrong with a command line itself, in one message.

That is an unknown verb or option, a missing or impossible value, or a package that the verb needs
and this Python does not have. Typer takes three blocks, without the value that it refuses.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from attention.base.messages import near
from orchestrator.storage.shipped import shipped

NUMBERS = re.compile("[0-9.%, ]+")
TRAINING_PACKAGES = ("ray", "deepspeed")
SEARCH_PACKAGES = (*TRAINING_PACKAGES, "mlflow")
BY_COMMA = "several values of one option are separated by a comma, e.g. --kv-ratio 0.5,0.25"


def usage_message(error: Any, arguments: Sequence[str]) -> str | None:
    """Return the message for an error of Typer; None for any other error.

    Args:
        arguments: Those of the command line.
    """
    if not hasattr(error, "format_message"):
        return None
    command = _command(error, arguments)
    if (context := getattr(error, "ctx", None)) is not None:
        command = context.command_path
    message = error.format_message().rstrip(".").replace(": Input should", ": it must")
    option = getattr(error, "option_name", None)
    if option and message.endswith("requires an argument"):
        message = f"option {option!r} needs a value after it"
    elif context is not None and option and message.startswith("No such"):
        names = [name for parameter in context.command.params for name in parameter.opts]
        options = [name for name in names if name.startswith("--")]
        message = f"no such option {option!r}{near(option, options)}"
    elif context is not None and (verb := re.match("No such command '(.*?)'", message)):
        verbs = sorted(context.command.commands)
        message = f"no such verb {verb[1]!r}{near(verb[1], verbs)}; there are {', '.join(verbs)}"
    elif message.startswith("Invalid value") and (parameter := getattr(error, "param", None)):
        message += "".join(f", got {value!r}" for value in _values(parameter.opts, arguments)[-1:])
    if re.match(rf"[Gg]ot unexpected extra argument(s|\(s\))? \({NUMBERS.pattern}\)", message):
        message += f"; {BY_COMMA}"
    verb_name = command.removeprefix("headfold").strip()
    prefix = f"{verb_name}: " if verb_name else ""
    return f"{prefix}{message[:1].lower()}{message[1:]}; see `{command} --help`"


class MissingPackageError(ValueError):
    """A package that a verb needs is not installed.

    The message names both, and how to install it.
    """


def check_packages(verb: str, *packages: str) -> None:
    """Raise MissingPackageError unless the packages are installed.

    They are those that only processes started by the verb import.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingPackageError(_missing(verb, package))


def missing_package(error: BaseException, arguments: Sequence[str]) -> str | None:
    """Return the message for an import of a required package that is not installed.

    Args:
        arguments: Those of the command line.

    Returns:
        None for any other error.
    """
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in _requirements() or find_spec(package) is not None:
        return None
    verb = _command(error, arguments).removeprefix("headfold").strip()
    return _missing(verb or "headfold", package)


def _missing(verb: str, package: str) -> str:
    required = _requirements()
    missing = [text for name, text in required.items() if not _is_installed(name)]
    if not missing:
        missing = [required.get(package, package)]
    return (
        f"{verb} needs the package {package}, which is not installed; install all that is missing "
        f"here: pip install {shlex.join(missing)}"
    )


def _requirements() -> dict[str, str]:
    """Return what Headfold requires, extras apart: the requirement of each package."""
    try:
        lines = metadata.requires("headfold") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        project = tomllib.loads(shipped("pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = project["dependencies"]
    texts = [line for line in lines if "extra ==" not in line]
    return {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower(): text for text in texts}


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _command(error: Any, arguments: Sequence[str]) -> str:
    """Return the command of an error without a context, which names the option alone."""
    verb = next((word for word in arguments if not word.startswith("-")), None)
    return f"headfold {verb}" if verb else "headfold"


def _values(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the values of an option, as they were typed."""
    values = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            values.append(value if equals else following)
    return values
