"""No circle of imports between files, and no public name that stands for two things."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")
ONE_OF_A_KIND = {"FAMILY", "TARGET", "ENGINE"}
"""A module that defines one of these is a family, an export target or an engine; their functions are named alike."""
SHARED_NAMES = {
    "Engine", "Seed", "convert", "evaluate", "export", "load",
}  # fmt: skip
"""Public names that more than one module still defines. The list only shrinks: a new thing gets a unique name."""


def imports(root: Path, packages: Iterable[str]) -> dict[str, set[str]]:
    """Which module imports which, those inside functions and for type checking included."""
    every = (path for package in packages for path in (root / package).rglob("*.py"))
    result = (path for path in every if path.parent.name != "_code")  # what exports have copies of, run elsewhere
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in result
    }
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
    """One circle for each file from which a walk along imports returns to a visited one."""
    done: set[str] = set()
    result = []

    def walk(name: str, way: list[str]) -> None:
        if name in way:
            result.append([*way[way.index(name) :], name])
        elif name not in done:
            for other in sorted(graph[name]):
                walk(other, [*way, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return result


def public_names(module: ast.Module) -> Iterator[str]:
    """Yield the names of classes, functions and constants that a module defines for others.

    A part of an axis, registered by a decorator, is known by the name of the part and not by that of its function.
    """
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not any(".part(" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def definitions(root: Path, packages: Iterable[str]) -> dict[str, set[str]]:
    """Return the modules that define each public name.

    Left out are `logger`, private modules and folders, families, targets and engines, and the programs in `children`,
    which run in the Python of an engine.
    """
    result: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).parts
            if "children" in parts or any(part[0] == "_" and part != "__init__.py" for part in parts):
                continue
            names = {name for name in public_names(ast.parse(path.read_text(encoding="utf-8"))) if name[0] != "_"}
            if not names & ONE_OF_A_KIND:
                for name in names - {"logger"}:
                    result[name].add("/".join(parts))
    return result


def shared(root: Path, packages: Iterable[str]) -> dict[str, list[str]]:
    """Return the public names that more than one module defines, and these modules."""
    return {name: sorted(modules) for name, modules in definitions(root, packages).items() if len(modules) > 1}


def test_no_import_circle() -> None:
    graph = imports(REPOSITORY, PACKAGES)
    assert len(graph) > 200
    assert circles(graph) == []


def test_a_public_name_stands_for_one_thing() -> None:
    assert len(definitions(REPOSITORY, PACKAGES)) > 1000
    names = shared(REPOSITORY, PACKAGES)
    new = {name: modules for name, modules in names.items() if name not in SHARED_NAMES}
    assert new == {}, "rename one of them, or begin it with an underscore if only its module uses it"
    assert set() == SHARED_NAMES - names.keys(), "no longer shared: take them off SHARED_NAMES"


@pytest.mark.parametrize("line", ["from p.a import f", "def g():\n    from p import a"])
def test_a_circle_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    files = {"__init__": "", "a": "import p.b\ndef f(): ...", "b": "from p import c", "c": line, "d": "import p.a"}
    for name, text in files.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert circles(imports(tmp_path, ["p"])) == [["p.a", "p.b", "p.c", "p.a"]]


def test_a_shared_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "p" / "q").mkdir(parents=True)
    files = {
        "a": "class Run: ...\nONE = 1\n_TWO = 2\nlogger = 3",
        "q/b": "@X.part('run')\ndef ONE(): ...\n_TWO = 2\nlogger = 3",
        "q/c": "def Run(): ...\nTHREE: int = 3",
        "q/d": "FAMILY = 1\ndef Run(): ...",
        "q/_e": "def Run(): ...",
    }
    for name, text in files.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert shared(tmp_path, ["p"]) == {"Run": ["p/a.py", "p/q/c.py"]}


def sources(package: str) -> dict[str, str]:
    """Return the text of each module of a package, by its path in the repository."""
    files = (REPOSITORY / package).rglob("*.py")
    return {str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8") for file in files}


def test_records_are_typed() -> None:
    """A dictionary whose keys are known is a TypedDict or a dataclass; the number of others only shrinks."""
    assert sum(text.count("dict[str, Any]") for text in sources("orchestrator").values()) < 80


def test_no_public_function_takes_settings_of_any_kind() -> None:
    loose = re.compile(r"^ *def [a-z]\w*\([^)]*\*\*(settings|options): Any", re.MULTILINE)
    assert [path for package in PACKAGES for path, text in sources(package).items() if loose.search(text)] == []


def test_options_are_declared_in_one_file() -> None:
    """The runner makes the command line from the classes of options; `--version` is of no verb."""
    declaring = [path for path, text in sources("orchestrator").items() if "typer.Option(" in text]
    assert sorted(declaring) == ["orchestrator/config/options.py", "orchestrator/main.py"]
