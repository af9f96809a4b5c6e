"""Words that users should not have to decipher: in pages, help and messages, a usual word stands instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "SECURITY.md",
    "docs/index.md",
    "docs/quickstart.md",
    "docs/faq.md",
    "docs/glossary.md",
    "docs/python.md",
    "docs/formats.md",
    "docs/families.md",
    "docs/serving.md",
    "docs/evaluation.md",
    "docs/trials.md",
    "docs/resume.md",
    "docs/cluster.md",
    *(f"docs/{name}" for name in ("howto", "clusters", "reference")),
)
"""Pages for users, and folders of them. The reference has the help of all verbs, options and keys."""
CODE = (
    "headfold",
    "attention",
    "search_spaces",
    "trainers",
    "orchestrator/config",
    "orchestrator/conversion",
    "orchestrator/doctor",
    "orchestrator/evaluation",
    "orchestrator/promotion",
    "orchestrator/resources",
    "orchestrator/serving",
    "orchestrator/storage",
    "orchestrator/training",
    "orchestrator/checkpoints.py",
    "orchestrator/main.py",
    "orchestrator/pipeline.py",
)
"""Where the strings of the code are checked."""
COUNTED = "tokens|nats|heads|bytes|steps|operations|sequences|parameters|seconds"
WORDS = {
    r"\bcomes? along\b": "bundled",
    r"\bof the checkpoint's(?= KV\b|$)": "of the KV cache",
    r"\b(?:is|are) told\b": "is reported",
    r"\bin its place\b": "instead",
    r"\bgo(?:es)? on\b": "continues",
    rf"\b(?:{COUNTED}) an? (?:second|sequence|token|parameter|layer|head|step|trial|search|run|node)\b": "per",
}
"""Expressions, and what to say instead."""


def found(text: str) -> list[str]:
    """The words of a text that are on the list, each with what to say instead."""
    return [
        f"{match[0]!r}: say {instead!r}"
        for words, instead in WORDS.items()
        for match in re.finditer(words, text, re.IGNORECASE)
    ]


def files(paths: tuple[str, ...], kind: str) -> list[Path]:
    places = [REPOSITORY / path for path in paths]
    assert all(place.exists() for place in places)
    return [file for place in places for file in (sorted(place.rglob(kind)) if place.is_dir() else [place])]


def strings(code: str) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines, but for docstrings: those that users see are in the reference."""
    tree = ast.parse(code)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("page", files(PAGES, "*.md"), ids=lambda file: file.relative_to(REPOSITORY).as_posix())
def test_pages_for_users_have_usual_words(page: Path) -> None:
    assert found(" ".join(page.read_text(encoding="utf-8").split())) == []


def test_strings_of_the_code_have_usual_words() -> None:
    modules = files(CODE, "*.py")
    assert len(modules) > 100
    lost = {
        f"{module.relative_to(REPOSITORY)}:{line}": words
        for module in modules
        for line, text in strings(module.read_text(encoding="utf-8"))
        if (words := found(text))
    }
    assert lost == {}


def test_words_of_the_list_are_found() -> None:
    text = "It comes along. 64 tokens a second of the checkpoint's KV; a user is told to go on in its place."
    assert len(found(text)) == len(WORDS)
    assert found("64 tokens per second, half of the checkpoint's own KV cache") == []
    code = 'def f():\n    """It goes on."""\n    return f"{f} goes on"\n'
    assert list(strings(code)) == [(3, " goes on")]
