"""A checkpoint's config.json is read where a checkpoint is opened, and handed down from there."""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")
THEMSELVES = ("attention/checkpoint.py", "attention/io/checkpoint.py")
MOST = 3  # a folder that is just being written, and a tokenizer without a checkpoint


def readers() -> list[str]:
    """Every call of `load_config` in the product, as `file:line`."""
    result = []
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            name = path.relative_to(REPOSITORY).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                called = getattr(node, "func", None)
                if "load_config" in (getattr(called, "id", None), getattr(called, "attr", None)):
                    result.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    return result


def test_few_read_the_config_of_a_checkpoint_themselves() -> None:
    others = [place for place in readers() if place.partition(":")[0] not in THEMSELVES]
    assert len(readers()) > len(others), "the search finds what it looks for"
    assert len(others) <= MOST, others
