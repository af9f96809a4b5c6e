"""References of README, CONTRIBUTING and docs/ exist: files, links, make targets, verbs, options, config keys."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from orchestrator.config.schema import parse_config
from orchestrator.main import app

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").glob("*.md")],
)
VERBS = get_command(app).commands  # type: ignore[attr-defined]
TOP = ["attention", "search_spaces", "trainers", "orchestrator", "tests", "docs", "configs", "examples", "benchmarks"]
CODE = ["attention", "search_spaces", "trainers", "orchestrator", "examples", "benchmarks"]
# Files that the reader of a page creates.
MADE_BY_READER = {"attention/conversion/fusion/strongest.py", "search_spaces/grouping/strided.py"}
page = pytest.mark.parametrize("page", PAGES, ids=lambda file: file.relative_to(REPOSITORY).as_posix())


def missing_paths(text: str, folder: Path) -> list[str]:
    """Repository paths and relative links in a page that lead nowhere."""
    paths = re.findall(rf"(?<![\w/.-])((?:{'|'.join(TOP)})/[\w./-]*\w/?)", text)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [p for p in paths if p not in MADE_BY_READER and not (REPOSITORY / p).exists()]
    return missing + [link for link in links if not (folder / link).exists()]


def missing_targets(text: str) -> list[str]:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    return [name for name in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE) if name not in targets]


def missing_verbs(text: str) -> list[str]:
    """Verbs and their options, in commands and in the table of verbs."""
    missing = []
    calls = re.findall(r"(?:headfold|orchestrator/main\.py) ([a-z]+)\b((?:[^`\n\\&;]|\\\n)*)", text)
    calls += re.findall(r"^\| `([a-z]+) ([^`]*)` \|", text, re.MULTILINE)
    for verb, rest in calls:
        if verb not in VERBS:
            missing.append(verb)
            continue
        known = {option for parameter in VERBS[verb].params for option in (*parameter.opts, *parameter.secondary_opts)}
        missing += [f"{verb} {option}" for option in re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest) if option not in known]
    return missing


def unquoted_brackets(text: str) -> list[str]:
    """Words of commands with a bracket outside of quotes: zsh takes them for patterns ("no matches found")."""
    calls = re.findall(r"(?:headfold|orchestrator/main\.py) [a-z]+\b((?:[^`\n\\]|\\\n)*)", text)
    bare = [re.sub(r"'[^']*'|\"[^\"]*\"", "", call) for call in calls]
    return [word for call in bare for word in re.findall(r"\S*\w=?\[\S*|\S*=\{\S*", call)]


@page
def test_paths_exist(page: Path) -> None:
    assert missing_paths(page.read_text(), page.parent) == []


@page
def test_make_targets_exist(page: Path) -> None:
    assert missing_targets(page.read_text()) == []


@page
def test_verbs_and_options_exist(page: Path) -> None:
    assert missing_verbs(page.read_text()) == []


@page
def test_brackets_in_commands_are_quoted(page: Path) -> None:
    assert unquoted_brackets(page.read_text()) == []


def test_brackets_are_quoted_in_commands_of_configs_and_messages() -> None:
    configs = [*(REPOSITORY / "configs").rglob("*.yaml"), *(REPOSITORY / "deploy").rglob("*.yaml")]
    code = [file for folder in CODE for file in (REPOSITORY / folder).rglob("*.py")]
    assert len(configs) > 5 and len(code) > 100
    missing = {str(file): unquoted_brackets(file.read_text()) for file in [*configs, *code]}
    assert {name: words for name, words in missing.items() if words} == {}


@page
def test_configs_on_the_page_are_accepted(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        parse_config(yaml.safe_load(block), where=page.name)


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    assert missing_paths("see `attention/nothing.py` and [this](gone.md)", tmp_path) == [
        "attention/nothing.py",
        "gone.md",
    ]
    assert missing_targets("run `make dinner`\nmake nothing now") == ["dinner", "nothing"]
    text = "`headfold search a.yaml b=[1] 'c=[2]'` [3]\n$ headfold demo \\\n  d={e: 1} \"f={g: 1}\"\n"
    assert unquoted_brackets(text) == ["b=[1]", "d={e:"]
    text = "`headfold fly`\n| `export DIR --wings 2` | x |\npython orchestrator/main.py search a.yaml \\\n  --gone\n"
    assert sorted(missing_verbs(text)) == ["export --wings", "fly", "search --gone"]


def test_makefile_lists_every_target() -> None:
    listed = subprocess.run(
        ["make", "--silent", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert phony and set(phony[1].split()) == set(re.findall(r"make ([a-z-]+)", listed))


def test_diagram_and_its_source_tell_the_same() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    mermaid = re.search(r"```mermaid\n(.*?)```", text, re.DOTALL)
    drawing = (REPOSITORY / "docs" / "images" / "architecture.svg").read_text()
    assert mermaid
    for words in re.findall(r"-- ([^>]+?) -->|\[([^\]\[(]+)\]|subgraph (\w+)|\(\[(.+?)\]\)", mermaid[1]):
        assert next(filter(None, words)) in drawing
