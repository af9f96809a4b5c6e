"""Resolve the name of a checkpoint.

A folder of this machine, or a model of the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention.base.messages import reason

NOT_REACHED = (
    "there is no such folder, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set) "
    "nor has this "
    "machine a copy of it: check the name, or fetch it where there is a network (hf download {})"
)
SOURCE_FILE = "source.json"
"""File next to the copy of a GGUF file, a quantised checkpoint or a model in memory that names
what was copied."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read. The message names the path and what to do."""


def is_folder(source: str | Path) -> bool:
    """Return whether `source` is a checkpoint's folder; False means that it is a name on the hub.

    Raises:
        CheckpointError: Without a request to the hub, for a folder without config.json, a file, and
            a missing path: a name that no hub model can have, or one whose first part is a local
            folder (`models/x` where `models/` exists).
    """
    name = str(source)
    path = Path(source)
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"no checkpoint at {name!r}: the folder has no config.json; give the folder "
                "that contains config.json and the safetensors files"
            )
        return True
    expected = "expected a folder with config.json and safetensors, or a hub name"
    if name and path.exists():
        open_by = (
            "; a GGUF file is opened by convert, inspect, evaluate, export and finetune, but "
            "not here"
        )
        gguf = open_by if path.suffix == ".gguf" else ""
        raise CheckpointError(f"no checkpoint at {name!r}: it is a file; {expected}{gguf}")
    first = name.split("/")[0]
    if not HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"no checkpoint at {name!r}: there is no folder of that name; {expected}"
        )
    if first != name and Path(first).is_dir():
        raise CheckpointError(
            f"no checkpoint at {name!r}: the folder {first!r} is here, and has no "
            f"{name.removeprefix(first + '/')!r}; "
            "for the hub's model of that name, run where there is no such folder"
        )
    return False


def source_note(folder: str | Path) -> dict[str, Any]:
    """Return what a plain copy was made of.

    `source`, `rounded` (names of the types whose rounding is in its weights), and whether it has
    `weights`. Empty for any other checkpoint.
    """
    try:
        record = json.loads((Path(folder) / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and "source" in record else {}


def write_source_note(
    folder: str | Path, source: str | Path, *, weights: bool = True, rounded: Sequence[str] = ()
) -> None:
    """Write what `source_note` returns into a folder."""
    record = {"source": str(source), "weights": weights, "rounded": list(rounded)}
    (Path(folder) / SOURCE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def source_name(model: str | Path) -> str:
    """Return what a model is called in records.

    The source of a plain copy, else the name itself.
    """
    return str(source_note(model).get("source", model))


CONSOLIDATED = "consolidated*.safetensors"
"""The same weights once more, under the names of Mistral's software, which nothing reads here."""
_UNREAD = ["*/*.safetensors", "*/*.json", CONSOLIDATED]
# In folders of a hub repository are other forms of the weights, which nothing reads.


def fetched(source: str | Path, patterns: Sequence[str], what: str) -> Path:
    """Return the local folder of a checkpoint; of a hub name, files are downloaded before.

    Args:
        source: Folder or hub name.
        patterns: Of the names of the files to download.
        what: The files in words.

    Raises:
        CheckpointError: If the hub does not give them.
    """
    if Path(source).is_dir() or is_folder(source):
        return Path(source)
    from huggingface_hub import (
        snapshot_download,  # pyright: ignore[reportUnknownVariableType]  # one argument is a dict
    )

    only = only_cached(source)
    try:
        return Path(
            snapshot_download(
                str(source),
                local_files_only=only,
                allow_patterns=list(patterns),
                ignore_patterns=_UNREAD,
            )
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the {what} of {str(source)!r} cannot be fetched: {reason(error)}"
        ) from None


def only_cached(source: str | Path) -> bool:
    """Whether `source` is a hub name and the hub out of reach, so that only the cache can have it.

    See `is_folder`.
    """
    return not is_folder(source) and not hub_answers()


def hub_answers() -> bool:
    """Whether the hub can be reached.

    One question, where the loaders repeat theirs for most of a minute.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:
        # Offline mode, no network, no name service, a proxy that refuses: all mean no.
        return False
    return True


def check_source(source: object, key: str) -> None:
    """Raise TypeError for what is not the name of a checkpoint, e.g. a loaded model.

    Its `str` is no path.
    """
    if not isinstance(source, (str, Path)):
        raise TypeError(
            f"{key}: expected the path of a checkpoint or a hub name (str or Path), got "
            f"{type(source).__name__}; save a model and its tokenizer with save_pretrained, and "
            f"pass the folder"
        )
