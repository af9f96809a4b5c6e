"""Messages about mistakes that every package uses.

Names that were nearly right, and what a library below had to say, whole.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

_LONGEST = 800
"""Characters of what a library says; a longer text loses its middle."""


def did_you_mean(word: Any, allowed: Iterable[Any]) -> str:
    """Return ` (did you mean gqa?)` if `word` is nearly an allowed name, else nothing."""
    names = {str(name).lower(): str(name) for name in allowed}
    close = get_close_matches(word.lower(), names, n=1) if isinstance(word, str) else []
    return f" (did you mean {names[close[0]]}?)" if close else ""


def one_of(what: str, allowed: Iterable[Any], value: Any) -> str:
    """Return the error message for a choice that does not exist."""
    names = list(allowed)
    return f"{what} must be one of {names}, got {reprlib.repr(value)}{did_you_mean(value, names)}"


def reason(error: BaseException, hide: Callable[[str], str] = str) -> str:
    """Return the message of a library's error in one line.

    All of its lines are joined, since the first is often only an introduction. The type is added to
    an error that has no message, or only a key (KeyError).

    Args:
        error: What the library raised.
        hide: Takes secrets out of the text, before a long text is cut.
    """
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return cut(hide(text))


def cut(text: str) -> str:
    """Return `text` without its middle if it is long.

    The cause of an error is usually at the start or the end.
    """
    return (
        text
        if len(text) <= _LONGEST
        else f"{text[: _LONGEST * 5 // 8]} ... {text[-_LONGEST // 4 :]}"
    )
