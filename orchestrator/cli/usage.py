"""Errors of the command line itself, in one message.

That is an unknown verb or option, a missing or impossible value, or a package that the verb needs
and that is not installed. Typer prints three blocks, without the refused value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attention.base.messages import did_you_mean
from orchestrator.config.parsing import BY_COMMA, NUMBERS
from orchestrator.tasks.packages import install_message, is_missing


def usage_message(error: Any, arguments: Sequence[str]) -> str | None:
    """Return the message for an error of Typer; None for any other error.

    Args:
        arguments: Arguments of the command line.
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
        message = f"no such option {option!r}{did_you_mean(option, options)}"
    elif context is not None and (verb := re.match("No such command '(.*?)'", message)):
        verbs = sorted(context.command.commands)
        message = (
            f"no such verb {verb[1]!r}{did_you_mean(verb[1], verbs)}; there are {', '.join(verbs)}"
        )
    elif message.startswith("Missing option '--model'") and re.match(
        "[^-]", "".join(arguments[1:2])
    ):
        message += f"; write --model {arguments[1]}"
    elif message.startswith("Invalid value") and (parameter := getattr(error, "param", None)):
        message += "".join(f", got {value!r}" for value in _values(parameter.opts, arguments)[-1:])
    if re.match(rf"[Gg]ot unexpected extra argument(s|\(s\))? \({NUMBERS.pattern}\)", message):
        message += f"; {BY_COMMA}"
    verb_name = command.removeprefix("headfold").strip()
    prefix = f"{verb_name}: " if verb_name else ""
    return f"{prefix}{message[:1].lower()}{message[1:]}; see `{command} --help`"


def missing_package(error: BaseException, arguments: Sequence[str]) -> str | None:
    """Return the message for an import of a required package that is not installed.

    Args:
        arguments: Arguments of the command line.

    Returns:
        None for any other error.
    """
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not is_missing(package):
        return None
    verb = _command(error, arguments).removeprefix("headfold").strip()
    return install_message(verb or "headfold", package)


def _command(error: Any, arguments: Sequence[str]) -> str:
    """Return the command of an error without a context, which names the option alone."""
    verb = next((word for word in arguments if not word.startswith("-")), None)
    return f"headfold {verb}" if verb else "headfold"


def _values(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the values of an option as typed."""
    values = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            values.append(value if equals else following)
    return values
