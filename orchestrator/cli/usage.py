"""What is wrong with a command line itself, in one message: an unknown verb or option, a missing or impossible value.

Typer tells it in three blocks, without the value that it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attention.base.messages import near

RENAMED = {
    "--stream": "--layerwise",
    "--no-stream": "--no-layerwise",
    "--like": "--architecture",
    "--base": "--original",
}
"""Options of earlier versions, and what they are called now."""
NUMBERS = re.compile("[0-9.%, ]+")
BY_COMMA = "several values of one option are separated by a comma, e.g. --kv-ratio 0.5,0.25"


def explained(error: Any, arguments: Sequence[str]) -> str | None:
    """The message for an error of typer; None for any other error. `arguments`: those of the command line."""
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
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        message = f"no such option {option!r}{near(option, known)}"
        if RENAMED.get(option) in [*known, *(name.replace("--", "--no-", 1) for name in known)]:
            message = f"the option {option} is called {RENAMED[option]} now"
    elif context is not None and (verb := re.match("No such command '(.*?)'", message)):
        known = sorted(context.command.commands)
        message = f"no such verb {verb[1]!r}{near(verb[1], known)}; there are {', '.join(known)}"
    elif (parameter := getattr(error, "param", None)) is not None and message.startswith("Invalid value"):
        message += "".join(f", got {value!r}" for value in _values(parameter.opts, arguments)[-1:])
    if re.match(rf"[Gg]ot unexpected extra argument(s|\(s\))? \({NUMBERS.pattern}\)", message):
        message += f"; {BY_COMMA}"
    where = command.removeprefix("headfold").strip()
    return f"{where}{': ' if where else ''}{message[:1].lower()}{message[1:]}; see `{command} --help`"


def _command(error: Any, arguments: Sequence[str]) -> str:
    """The command that an error without a context is of: the parser's own errors know the option alone."""
    verb = next((word for word in arguments if not word.startswith("-")), None)
    return f"headfold {verb}" if verb else "headfold"


def _values(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The values that an option is given, as they were typed."""
    values = []
    for here, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = here.partition("=")
        if name in names:
            values.append(value if equals else following)
    return values
