"""What all tasks have in common: options in, a record out."""

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
        options: What was asked for.
        rehearsal: Whether it is only checked and estimated, for which no weights are read.
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
        """Where it writes: a `folder` or a `page`.

        `orchestrator.storage.outputs.check_results` takes it.
        """
        return {}

    @abstractmethod
    def check(self) -> None:
        """Check all that can be checked before texts and weights are read.

        A second call does nothing.

        Raises:
            ValueError: For what a user can mend, with a message that says how.
        """

    def announce(self) -> None:
        """Say what it will take, and refuse what does not fit this machine."""

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        """Read the texts, and return in words what it would take; nothing is written."""
        return []

    @abstractmethod
    def run(self) -> RecordT:
        """Carry it out."""

    @abstractmethod
    def show(self, record: RecordT) -> None:
        """Print a record."""

    def exit_code(self, record: RecordT) -> int:
        """Return the exit code of the process, once the record is printed and written.

        Raises:
            ValueError: For a result that a user has to act on.
        """
        return 0


def print_by_topic(words: Mapping[str, str]) -> None:
    """Print what a verb would do or take, a line for each thing that it is about."""
    for topic, text in words.items():
        print(f"{topic}: {text}")


def advise_text(*sources: str | None) -> None:
    """Say on stderr what text is taken where none was named."""
    if not any(sources):
        print(
            "text: none was named, so the built-in one is taken (Python's help topics and "
            "standard library); give text like that of your users with --data",
            file=sys.stderr,
            flush=True,
        )


def require(*checked: object) -> None:
    """Do nothing with properties that check what they return.

    To name them here is to have them checked.
    """
