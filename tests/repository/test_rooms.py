"""No circle of imports between files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")


def imports(root: Path, packages: Iterable[str]) -> dict[str, set[str]]:
    """Which module imports which, those inside functions and for type checking included."""
    every = (path for package in packages for path in (root / package).rglob("*.py"))
    found = (path for path in every if path.parent.name != "_code")  # what exports have copies of, run elsewhere
    modules = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in found}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{path}: relative import"
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (whole & modules.keys()) | ({node.module} if whole - modules.keys() else set())
        graph[name] = names & modules.keys() - {name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One circle for each file from which a walk along imports comes back to where it has been."""
    done: set[str] = set()
    found = []

    def walk(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for other in sorted(graph[name]):
                walk(other, [*way, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def test_no_import_circle() -> None:
    graph = imports(REPOSITORY, PACKAGES)
    assert len(graph) > 200
    assert circles(graph) == []


@pytest.mark.parametrize("line", ["from p.a import f", "def g():\n    from p import a"])
def test_a_circle_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    files = {"__init__": "", "a": "import p.b\ndef f(): ...", "b": "from p import c", "c": line, "d": "import p.a"}
    for name, text in files.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert circles(imports(tmp_path, ["p"])) == [["p.a", "p.b", "p.c", "p.a"]]
