"""The single files that a verb writes, checked before any work.

`attention.io.replacing` has the folders of checkpoints. A file is replaced if Headfold wrote it: a
JSON object, a page or a picture with our mark. Any other is not, by any option; nor is a link, and
nothing is put into the folder of a checkpoint.
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
_EXAMPLES = {"json": "result.json", "page": "inspection.html", "picture": "curve.png"}
_MARK = "written_by"
SOFTWARE = "headfold"
GENERATOR = f'<meta name="generator" content="{SOFTWARE}">'
_HEAD_BYTES = 4096  # of a page or picture, which contain the mark
_MAX_JSON_BYTES = 2**30  # of a file that is read to look for the mark


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence on the saved work and how to resume it."""


def check_results(
    json: str | Path | None = None,
    *,
    page: str | Path | None = None,
    folder: str | Path | None = None,
) -> None:
    """Check that a verb can write its result to the file `json` and its page to `page`.

    Args:
        folder: The verb's --out; neither file may be inside it, since it is replaced as a whole.

    Raises:
        ConfigError: If it cannot.
    """
    if json is not None:
        check_file(json, "json", "json")
    if page is not None:
        check_file(page, "page", "out")
    if json is None:
        return
    for other in filter(None, (page, folder)):
        file, output = resolved(json), resolved(other)
        if output in (file, *file.parents) or file in output.parents:
            raise ConfigError(
                f"json: {str(json)!r} and --out {str(other)!r} are in each other's way; name "
                "another"
            )


def check_file(file: str | Path, kind: Kind, key: str) -> Path:
    """Return the absolute path of a file that may be written.

    It is free, empty, or one of this kind that we wrote earlier. Writing is tried, without a trace.

    Raises:
        ConfigError: If it may not; the message starts with `key`.
    """
    try:
        path = resolved(file)
        if os.path.lexists(path):
            _check_existing(path, kind, key)
        if (around := checkpoint_around(path)) is not None:
            raise ConfigError(
                f"{key}: {str(file)!r} is within a checkpoint, {str(around)!r}; name a file outside"
            )
        with parents_made(path, keep=False):
            trial = unused(path)
            trial.touch()
            trial.unlink()
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(str(cannot_write(file, error, key))) from None
    return path


def _check_existing(path: Path, kind: Kind, key: str) -> None:
    status = path.lstat()
    name = f"{key}: {str(path)!r}"
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(f"{name} is a link to {str(path.readlink())!r}; name a file itself")
    if stat.S_ISDIR(status.st_mode):
        example = str(path / _EXAMPLES[kind])
        raise ConfigError(f"{name} is a folder; name a file, e.g. {example!r}")
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{name} is not a regular file; name one")
    if status.st_size and not _has_mark(path, kind):
        raise ConfigError(
            f"{name} exists, and Headfold did not write it; remove it, or name another file"
        )


def _has_mark(file: Path, kind: Kind) -> bool:
    """Return whether a file has the mark of what we write of this kind."""
    if kind == "json":
        return bool(read_result(file))
    with file.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if kind == "page":
        return GENERATOR.encode() in head
    return head.startswith(b"\x89PNG") and b"Software\0" + SOFTWARE.encode() in head


def read_result(file: Path) -> dict[str, Any]:
    """Return the JSON object that `write_result` wrote; empty if the file is anything else."""
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            return {}
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and record.get(_MARK) == SOFTWARE else {}


def write_result(file: str | Path, record: Mapping[str, Any], key: str = "json") -> Path:
    """Write a result as one JSON object with our mark, atomically, and return its path.

    Raises:
        ConfigError: As `check_file` does.
    """
    path = check_file(file, "json", key)
    write_json(path, {**record, _MARK: SOFTWARE})
    return path


def write_page(file: str | Path, content: str) -> Path:
    """Write a page, atomically, and return its path.

    Raises:
        ConfigError: As `check_file` does.
    """
    path = check_file(file, "page", "out")
    write_whole(path, content)
    return path
