"""Records of measurements in parts: a JSON file with a record for each finished part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from attention.io.files import write_whole

FORMAT = 1
Status = Literal["done", "skipped", "failed"]


class PartRecord(TypedDict):
    """A finished part.

    `reason`: why it was skipped or has failed, or did so when it was measured again; `rows`: of its table; `notes`: on
    how it was measured.
    """

    status: Status
    reason: str
    seconds: float
    date: str
    commit: str
    rows: list[dict[str, Any]]
    notes: NotRequired[list[str]]


class RecordsError(ValueError):
    """Records that cannot be continued. The message says what to do."""


@dataclass
class Records:
    """The file. `card`: what was measured (its `device`), and versions."""

    file: Path
    card: dict[str, str]
    parts: dict[str, PartRecord]

    @classmethod
    def open(cls, file: Path, card: Mapping[str, str]) -> Records:
        """The records of a card, new or continued. Raises RecordsError for those of another one."""
        if not file.exists():
            return cls(file, dict(card), {})
        records = cls.read(file)
        if records.card.get("device") != card.get("device"):
            raise RecordsError(
                f"{file} has the records of {records.card.get('device')!r}, and this is {card.get('device')!r}; "
                "name another with --records FILE or --folder FOLDER (make gpu: RECORDS=FILE), or remove it"
            )
        records.card = dict(card)
        return records

    @classmethod
    def read(cls, file: Path) -> Records:
        """Raises RecordsError for what is none of ours."""
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']}, expected {FORMAT}")
            return cls(file, record["card"], record["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise RecordsError(f"{file} is no file of records ({error}); remove it, or name another") from None

    def add(self, name: str, part: PartRecord) -> None:
        """Write a finished part into the file."""
        self.parts[name] = part
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "card": self.card, "parts": self.parts}, indent=1)
        write_whole(self.file, text + "\n")

    def is_done(self, name: str) -> bool:
        return name in self.parts and self.parts[name]["status"] == "done"


def sections(
    records: Records, titles: Mapping[str, str], about: Mapping[str, str], body: Callable[[PartRecord], str]
) -> str:
    """Return the machine that was measured, and a section for each part, as Markdown.

    Args:
        records: Of the page.
        titles: Of all parts, in their order.
        about: What stands above the numbers of a part.
        body: The numbers of a finished part.
    """
    facts = "; ".join(f"{name} {value}" for name, value in records.card.items() if name != "device")
    done = sum(part["status"] == "done" for part in records.parts.values())
    parts = [f"Measured on **{records.card['device']}** ({facts}): {done} of {len(titles)} parts.\n"]
    for name, title in titles.items():
        part = records.parts.get(name)
        above = f"{about[name]}\n\n" if name in about else ""
        parts.append(f"## {title}\n\n{above}{'Not measured yet.' if part is None else body(part)}\n")
    return "\n".join(parts)


def ended(part: PartRecord, when: str) -> str:
    """Return when a part finished, and why it has no numbers if it has none."""
    if part["status"] == "done":
        again = f" **Failed** when it was measured again: {part['reason'].replace('|', '/')}"
        return when + (again if part["reason"] else "")
    word = "Skipped" if part["status"] == "skipped" else "**Failed**"
    return f"{word}: {part['reason'].replace('|', '/')} ({when})"
