"""Words that readers should not have to decipher: pages, help, messages, docstrings and comments use usual ones."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATED = {"docs/real.md", "docs/gpu.md"}
PAGES = (
    *("README.md", "SECURITY.md", "CONTRIBUTING.md", "examples/README.md"),
    *sorted({page.relative_to(REPOSITORY).as_posix() for page in REPOSITORY.glob("docs/*.md")} - GENERATED),
    *(f"docs/{name}" for name in ("howto", "clusters", "reference")),
)
"""Pages, and folders of them. The reference has the help of all verbs, options and keys; pages that benchmarks write
have strings of their code."""
CODE = ("headfold", "attention", "search_spaces", "trainers", "orchestrator", "benchmarks")
"""Folders whose strings, docstrings and comments are checked."""
PROSE = (*CODE, "examples", "tests")
"""Folders whose docstrings and comments are checked."""
COUNTED = (
    "tokens|tokens/s|nats|heads|bytes|steps|operations|sequences|parameters|seconds|moves?|prompt|calls|events|CPUs"
)
UNITS = "second|sequence|token|parameter|layer|head|step|trial|search|run|node|worker|site|line"
WORDS = {
    r"\bcomes? along\b": "bundled",
    r"\bof the checkpoint's(?= KV\b|$)": "of the KV cache",
    r"\b(?:is|are) told\b": "is reported",
    r"\bin its place\b": "instead",
    r"\bof (?:its|their|one's|your) own\b": "its own, separate",
    r"\bon (?:the|its|their) way\b": "temporary, starting",
    r"\bbesides?\b": "next to, compared with, in addition to",
    r"(?<=\s)held\b(?![- ]out)|\bheld(?= (?!out))": "stored, reserved, supported",
    r"(?<=\s)ended\b|\bended(?= \w)": "finished, stopped, exited",
    r"\bwants\b": "needs",
    r"\blies (?:in|on|at|within|outside)(?= )|\blie beside\b": "is in",
    r"(?:^|\d) so far\b": "elapsed",
    r"\bgo(?:es)? on\b": "continues",
    r"\bin (?:the|their) place of\b": "instead of",
    rf"\b(?:{COUNTED}) an? (?:{UNITS})\b": "per",
}
"""Expressions, and what to say instead."""
PROSE_WORDS = {
    r"\bcomes? along\b": "bundled",
    r"\bt(?:old|ells?)\b": "reported, given, said",
    r"\basked\b": "requested",
    r"\bbeside\b": "next to, with, in addition to",
    r"(?<!instead )\bof (?:its|their|one's|your|his) own\b": "separate, different",
    r"\bheld\b(?![- ]out|:)": "stored, reserved, supported",
    r"\b(?:goes|go) on\b": "continues, resumes",
    r"\bin (?:its|their) place\b|\bin the place of\b": "instead",
    r"\bwhoever\b": "a noun",
    r"\blies?\b(?! -n)": "is in",
    r"\bwants?\b": "needs, requires",
    r"\bon (?:the|its|their) way\b": "temporary, before",
    rf"\b(?:{COUNTED}) an? (?:{UNITS})\b": "per",
}
"""Expressions in docstrings and comments, and what to say instead."""


def found(text: str, expressions: Mapping[str, str] = WORDS) -> list[str]:
    """Return the words of a text that are on the list, each with what to say instead."""
    return [
        f"{match[0]!r}: say {instead!r}"
        for words, instead in expressions.items()
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


def prose(code: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module with their lines, without the code that they quote.

    Comments on consecutive lines are one text.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, _unquoted(node.value.value)
    first, last, words = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 and words:
            yield first, _unquoted(" ".join(words))
            words = []
        last = token.start[0]
        first = first if words else last
        words.append(token.string.lstrip("# "))
    if words:
        yield first, _unquoted(" ".join(words))


def _unquoted(text: str) -> str:
    return re.sub(r"`[^`]*`", "``", " ".join(text.split()))


@pytest.mark.parametrize("page", files(PAGES, "*.md"), ids=lambda file: file.relative_to(REPOSITORY).as_posix())
def test_pages_for_users_have_usual_words(page: Path) -> None:
    assert found(" ".join(page.read_text(encoding="utf-8").split())) == []


def test_the_changes_since_the_last_release_have_usual_words() -> None:
    top = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ", 2)[1]
    assert found(" ".join(top.split())) == []


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


def test_docstrings_and_comments_have_usual_words() -> None:
    unusual = {}
    for module in files(PROSE, "*.py"):
        name, code = module.relative_to(REPOSITORY).as_posix(), module.read_text(encoding="utf-8")
        if module == Path(__file__) or not found(_flat(code), PROSE_WORDS):
            continue
        for line, text in prose(code):
            if words := found(text, PROSE_WORDS):
                unusual[f"{name}:{line}"] = words
    assert unusual == {}


def _flat(code: str) -> str:
    """Return a module as one line, so that no expression is missed where it spans two; parsing all would take long."""
    return re.sub(r"\s+(?:# )?", " ", code)


def test_words_of_the_list_are_found() -> None:
    text = (
        "0:42 so far. It comes along. 64 tokens a second of the checkpoint's KV; a user is told to go on in its place. "
        "A file beside it lies in a folder of its own, on the way; what has ended was held, and wants it in the place "
        "of memory."
    )
    assert len(found(text)) == len(WORDS)
    usual = "64 tokens per second, half of the checkpoint's own KV cache; a held-out loss, held out, as measured so far"
    assert found(usual) == []
    code = 'def f():\n    """It goes on."""\n    return f"{f} goes on"\n'
    assert list(strings(code)) == [(3, " goes on")]


def test_words_in_docstrings_and_comments_are_found() -> None:
    code = (
        'def held(told):\n    """Return `told`.\n\n    A file of its\n    own is held beside it.\n    """\n'
        "    # Whoever asked goes\n    # on his way, 64 tokens a second,\n    x = 1  # and wants it\n"
        '    return "what it tells lies here"\n'
    )
    assert [(line, len(found(text, PROSE_WORDS))) for line, text in prose(code)] == [(2, 3), (7, 5)]
    usual = '"""A held-out loss, `held`, with 64 tokens per second."""\nhold = 1  # a value that is reported\n'
    assert [found(text, PROSE_WORDS) for _, text in prose(usual)] == [[], []]
