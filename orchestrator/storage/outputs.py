"""Where a verb may write, asked before any work. Folders of checkpoints: `attention.io.replacing`; here single files.

A file is replaced if Headfold wrote it: a JSON object, a page or a picture with our mark. Any other is not, by any
option; nor is a link, and nothing is put into the folder of a checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attention.io.files import write_whole
from attention.io.replacing import cannot_write, checkpoint_around, parents_made, resolved, unused
from orchestrator.config.schema import ConfigError
from orchestrator.storage.json_files import write_json

Kind = Literal["json", "page", "picture"]
EXAMPLES = {"json": "result.json", "page": "inspection.html", "picture": "curve.png"}
MARK = "written_by"
SOFTWARE = "headfold"
GENERATOR = f'<meta name="generator" content="{SOFTWARE}">'
HEAD = 4096  # bytes at the start of a page or picture that hold the mark
LARGEST = 2**30  # bytes of a JSON file that is looked into


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence on what is left of the work and how it goes on."""


def check_results(
    json: str | Path | None = None, *, page: str | Path | None = None, folder: str | Path | None = None
) -> None:
    """Raise ConfigError unless a verb can write its result to the file `json` and its page to `page`.

    `folder`: what the verb's --out names; neither file may lie in it, for it is replaced as a whole.
    """
    if json is not None:
        check_file(json, "json", "json")
    if page is not None:
        check_file(page, "page", "out")
    if json is None:
        return
    for other in filter(None, (page, folder)):
        one, two = resolved(json), resolved(other)
        if two in (one, *one.parents) or one in two.parents:
            raise ConfigError(f"json: {str(json)!r} and --out {str(other)!r} are in each other's way; name another")


def check_file(file: str | Path, kind: Kind, key: str) -> Path:
    """The absolute path of a file that may be written: free, empty, or one of this kind that we wrote earlier.

    That it can be written is tried, without a trace. Raises ConfigError, whose message starts with `key`.
    """
    try:
        place = resolved(file)
        if os.path.lexists(place):
            _check_taken(place, kind, key)
        if (around := checkpoint_around(place)) is not None:
            raise ConfigError(f"{key}: {str(file)!r} lies within a checkpoint, {str(around)!r}; name a file outside")
        with parents_made(place, keep=False):
            trial = unused(place)
            trial.touch()
            trial.unlink()
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(str(cannot_write(file, error, key))) from None
    return place


def _check_taken(place: Path, kind: Kind, key: str) -> None:
    status = place.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(f"{key}: {str(place)!r} is a link to {str(place.readlink())!r}; name a file itself")
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{key}: {str(place)!r} is a folder; name a file, e.g. {str(place / EXAMPLES[kind])!r}")
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{key}: {str(place)!r} is not a regular file; name one")
    if status.st_size and not is_ours(place, kind):
        raise ConfigError(
            f"{key}: {str(place)!r} exists, and Headfold did not write it; remove it, or name another file"
        )


def is_ours(file: Path, kind: Kind) -> bool:
    """Whether a file has the mark of what we write of this kind."""
    if kind == "json":
        return bool(read_result(file))
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    if kind == "page":
        return GENERATOR.encode() in head
    return head.startswith(b"\x89PNG") and b"Software\0" + SOFTWARE.encode() in head


def read_result(file: Path) -> dict[str, Any]:
    """The JSON object that `write_result` wrote; empty if the file is anything else, or not there."""
    try:
        if file.stat().st_size > LARGEST:
            return {}
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and record.get(MARK) == SOFTWARE else {}


def write_result(file: str | Path, record: Mapping[str, Any], key: str = "json") -> Path:
    """Write a result as one JSON object with our mark, atomically. Raises ConfigError as `check_file` does."""
    place = check_file(file, "json", key)
    write_json(place, {**record, MARK: SOFTWARE})
    return place


def write_page(file: str | Path, content: str) -> Path:
    """Write a page, atomically. Raises ConfigError as `check_file` does."""
    place = check_file(file, "page", "out")
    write_whole(place, content)
    return place
