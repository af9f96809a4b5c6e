"""What the model is called that a checkpoint was made from."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from attention.io.sources import source_name

NAMED = ("base", "base_id", "license")


def base_of(model: str | Path) -> dict[str, str | None]:
    """The name of a model (`base`), the same on the hub if it is there (`base_id`), and the `license` that its own card
    names. Nothing of where it lies on this machine."""
    text = source_name(model)
    folder = Path(text)
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", text)
    base_id = f"{cached[1]}/{cached[2]}" if cached else None
    if base_id is None and not folder.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        base_id = text
    return {"base": base_id or folder.resolve().name, "base_id": base_id, "license": _licence_of(folder / "README.md")}


def _licence_of(card: Path) -> str | None:
    """`license` in the metadata of a card; None where there is none."""
    try:
        front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.DOTALL)
        found = yaml.safe_load(front[1]).get("license") if front else None
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None
    return found if isinstance(found, str) else None
