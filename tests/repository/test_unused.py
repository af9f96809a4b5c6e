"""No public function, class or constant of the packages is used by tests alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")
BESIDE = ("examples", "benchmarks", "docs")
OF_A_CONTRACT = {"FAMILY", "TARGET", "ENGINE"}
"""Found by their name in every module of their folder."""
OTHER_PROCESSES = {"children", "_code"}
"""Folders of programs that run in the Python of an engine, or are copied into exports."""

Module = tuple[str, ast.Module]


def parsed(root: Path, folders: tuple[str, ...]) -> Iterator[Module]:
    """Yield every module below the folders of `root` by its dotted name."""
    for folder in folders:
        for path in (root / folder).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def defined(module: ast.Module) -> set[str]:
    """Return the public names that a module defines. One with a decorator is registered, and found by that."""
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if all("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def used(name: str, module: ast.Module, modules: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the module and name of all that a module uses: of itself, and of `modules`.

    That is `from module import name`, `module.name`, and the text `module:name` or the end of it. A definition that
    names itself does not use itself.
    """
    aliases: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield str(node.module), alias.name
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            where, _, what = node.value.partition(":")
            yield from ((each, what) for each in modules if f".{each}".endswith(f".{where.removeprefix('.')}"))
    for statement in module.body:
        own = statement.name if isinstance(statement, ast.FunctionDef | ast.ClassDef) else None
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if (module_name := aliases.get(owner, owner)) in modules:
                    yield module_name, node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id != own:
                yield name, node.id


def unused(root: Path) -> set[str]:
    """Return `module.name` of all public names that neither the packages nor the scripts and pages use."""
    modules = dict(parsed(root, PACKAGES))
    uses = {use for name, module in modules.items() for use in used(name, module, modules)}
    uses |= {use for name, module in parsed(root, BESIDE) for use in used(name, module, modules)}
    return {
        f"{name}.{each}"
        for name, module in modules.items()
        if OTHER_PROCESSES.isdisjoint(name.split("."))
        for each in defined(module) - OF_A_CONTRACT
        if (name, each) not in uses
    }


def test_every_public_name_is_used_outside_of_tests() -> None:
    assert unused(REPOSITORY) == set(), "remove them with their tests"


def test_what_is_unused_is_found(tmp_path: Path) -> None:
    files = {
        "attention/a.py": "def f(): f()\nclass C: ...\ndef g(): ...\nX = 1\ndef _p(): ...\nY = X\nTARGET = 1",
        "attention/b.py": "from attention import a\nfrom attention.a import C\nprint(a.g, 'attention.b:named')\n"
        "def named(): ...\n@register\ndef part(): ...\n@dataclass\nclass D: ...",
        "examples/e.py": "import attention.a\nprint(attention.a.Z)",
        "attention/children/c.py": "def main(): ...",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert unused(tmp_path) == {"attention.a.f", "attention.a.Y", "attention.b.D"}
