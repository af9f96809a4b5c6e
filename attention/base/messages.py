"""What every package says of a mistake: names that were nearly right, and what a library below had to say, whole."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

_LONGEST = 800
"""Characters of what a library says; a longer text loses its middle."""


def near(word: Any, allowed: Iterable[Any]) -> str:
    """` (did you mean gqa?)` for a name that was nearly right, else nothing."""
    names = {str(name).lower(): str(name) for name in allowed}
    close = get_close_matches(word.lower(), names, n=1) if isinstance(word, str) else []
    return f" (did you mean {names[close[0]]}?)" if close else ""


def one_of(what: str, allowed: Iterable[Any], given: Any) -> str:
    """The message for a choice that does not exist."""
    names = list(allowed)
    return f"{what} must be one of {names}, got {reprlib.repr(given)}{near(given, names)}"


def reason(error: BaseException, hide: Callable[[str], str] = str) -> str:
    """What a library's error says, in one line: all of its lines, since the first is often only an introduction.

    An error that says nothing but a key (KeyError) or nothing at all is told with its type. `hide` takes secrets out of
    the text, before a long one is cut in two.
    """
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return cut(hide(text))


def cut(text: str) -> str:
    """A text without the middle of a long one: what went wrong is told at its start or its end."""
    return (
        text
        if len(text) <= _LONGEST
        else f"{text[: _LONGEST * 5 // 8]} ... {text[-_LONGEST // 4 :]}"
    )
