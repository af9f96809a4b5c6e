"""Citations: every part and recipe cites papers that docs/methods.md has the title of, each by a unique key."""

from __future__ import annotations

import re
from pathlib import Path

from attention import axes as conversion_axes
from attention.axes import Axis
from orchestrator.search.schedulers.problem import SCHEDULERS
from orchestrator.search.searchers.problem import SEARCHERS
from search_spaces import axes as search_axes
from search_spaces.recipes.catalogue import RECIPES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "methods.md").read_text()
ENTRIES = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", PAGE.partition("## Bibliography")[2], re.MULTILINE)[
    1:
]
CITED = re.compile(r"[A-Z]\w+(?: and [A-Z]\w+)? (?:19|20)\d\d")
ANONYMOUS = re.compile(r"\bpaper 0\d\d\b", re.IGNORECASE)
AMBIGUOUS = re.compile(r"Chen 2024(?! \((?:DHA|AsymGQA)\))")


def sources() -> dict[str, str]:
    """Citations of each named recipe and each part of every axis, by name."""
    result = {**vars(conversion_axes), **vars(search_axes), "searchers": SEARCHERS, "schedulers": SCHEDULERS}
    axes = {axis.name: axis for axis in result.values() if isinstance(axis, Axis)}
    parts = {f"{part.axis}={part.name}": part.source for axis in axes.values() for part in axis}
    return parts | {name: recipe.source for name, recipe in RECIPES.items()}


def test_the_bibliography_has_each_paper_once() -> None:
    keys, titles, places = zip(*ENTRIES, strict=True)
    numbers = [place for place in places if place.startswith("arXiv")]
    assert all(re.fullmatch(r"arXiv \d{4}\.\d{5}", number) for number in numbers)
    assert len(set(keys)) == len(set(titles)) == len(ENTRIES) > 20
    assert len(set(numbers)) == len(numbers) > 10


def test_what_parts_and_recipes_cite_is_in_the_bibliography() -> None:
    keys = " ".join(key for key, _, _ in ENTRIES)
    cited = {name: CITED.findall(source) for name, source in sources().items()}
    assert sum(map(len, cited.values())) > 30
    assert {name: lost for name, result in cited.items() if (lost := [key for key in result if key not in keys])} == {}


def test_citations_name_one_paper() -> None:
    rooms = (
        "attention",
        "search_spaces",
        "trainers",
        "orchestrator",
        "benchmarks",
        "configs",
        "docs",
        "examples",
        "tests",
    )
    files = [*REPOSITORY.glob("*.md"), *(file for room in rooms for file in (REPOSITORY / room).rglob("*.*"))]
    readable = [file for file in files if file.suffix in (".py", ".md", ".yaml", ".json") and file.is_file()]
    texts = {str(file): file.read_text() for file in readable if file != Path(__file__).resolve()}
    assert len(texts) > 300
    assert {name for name, text in texts.items() if ANONYMOUS.search(text) or AMBIGUOUS.search(text)} == set()
