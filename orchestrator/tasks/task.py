"""The base of all tasks: options in, a record out."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

OptionsT = TypeVar("OptionsT")
RecordT = TypeVar("RecordT", bound=Mapping[str, Any])


class Task(ABC, Generic[OptionsT, RecordT]):
    """One run of a verb. The command line and the Python functions run the same tasks.

    Attributes:
        options: The options of the verb.
        rehearsal: Whether it is only checked and estimated, without reading weights.
        verbose: Whether its estimate lists the parts of its memory.
    """

    def __init__(
        self, options: OptionsT, *, rehearsal: bool = False, verbose: bool = False
    ) -> None:
        self.options = options
        self.rehearsal = rehearsal
        self.verbose = verbose

    @property
    def outputs(self) -> Mapping[str, str | Path | None]:
        """The outputs: a `folder` or a `page`.

        `orchestrator.storage.outputs.check_results` takes it.
        """
        return {}

    @abstractmethod
    def check(self) -> None:
        """Check everything that can be checked before texts and weights are read.

        A second call does nothing.

        Raises:
            ValueError: For mistakes that a user can correct, with a message that says how.
        """

    def announce(self) -> None:
        """Print the estimate, and refuse a run that does not fit this machine."""

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        """Read the texts, and return the estimate as text; nothing is written."""
        return []

    @abstractmethod
    def run(self) -> RecordT:
        """Run the task."""

    @abstractmethod
    def show(self, record: RecordT) -> None:
        """Print a record."""

    def exit_code(self, record: RecordT) -> int:
        """Return the exit code of the process, once the record is printed and written.

        Raises:
            ValueError: For a result that requires an action of the user.
        """
        return 0


def print_by_topic(words: Mapping[str, str]) -> None:
    """Print the effects or the estimate of a verb, one line per topic."""
    for topic, text in words.items():
        print(f"{topic}: {text}")


def advise_text(*sources: str | None) -> None:
    """Print on stderr which text is used if none was named."""
    if not any(sources):
        print(
            "text: none was named, so the built-in text is used (Python's help topics and "
            "standard library); give text similar to your users' with --data",
            file=sys.stderr,
            flush=True,
        )


def require(*checked: object) -> None:
    """Evaluate properties, which check their values."""
