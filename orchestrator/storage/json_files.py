"""Records as JSON files: written whole or not at all, and read back with a clear error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from attention.io.files import write_whole
from orchestrator.config.parsing import ConfigError, shown


def read_json(path: str | Path) -> Any:
    """Return the object in a JSON file: a dictionary, which the caller may declare as a record.

    Raises:
        ConfigError: If it holds no object: it was changed, or cut by a full disk.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not the JSON that was written there: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{path} is not what was written there: expected a dict, got {shown(record)}"
        )
    return record


def read_if_there(path: Path) -> Any:
    """Return the object in a JSON file; an empty one if the file is not there.

    Raises:
        ConfigError: As `read_json`.
    """
    return read_json(path) if path.is_file() else {}


def write_json(path: str | Path, record: Any) -> None:
    """Write JSON so that a reader, or a kill in the middle, never sees half a file."""
    text = json.dumps(finite(record), indent=1, sort_keys=True, allow_nan=False)
    write_whole(path, text + "\n")


def finite(record: Any) -> Any:
    """Return a record with null in place of nan and infinity, which JSON does not have."""
    if isinstance(record, dict):
        return {key: finite(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [finite(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record
