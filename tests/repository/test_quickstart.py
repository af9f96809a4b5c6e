"""The quickstart and the first lines of the README, word for word: their commands are read out of the pages and run as
a stranger would run them.

In an environment with Headfold's wheel, far from the checkout. Left out are lines that the quickstart marks as `sh`
instead of `bash`: the installation, which would load gigabytes, and the search of a user's checkpoint, which takes
long. In the README's lines the Qwen3 of the examples replaces the one of the hub, and programs that only print their
arguments replace the two servers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from clean_environment import CleanEnvironment

from trainers.text.corpora import LIBRARY

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE, README = REPOSITORY / "docs" / "quickstart.md", REPOSITORY / "README.md"
HUB_NAME = "Qwen/Qwen3-0.6B"
SERVERS = {
    "vllm": 'grep -q "\\"Qwen3ForCausalLM\\"" "$2/config.json" && echo "served: $*"',
    "llama-server": 'test -f "$2" && echo "served: $*"',
}


def blocks(kind: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(kind: str) -> str:
    return "\n".join(blocks(kind))


def first_lines() -> str:
    """The commands of the README that convert and serve a model."""
    return next(block for block in blocks("bash", README) if HUB_NAME in block)


def test_the_page_has_its_commands() -> None:
    verbs = set(re.findall(r"^(?:\w+=\$\()?headfold ([a-z]+)", commands("bash"), re.MULTILINE))
    assert verbs == {"demo", "inspect", "convert", "evaluate", "export", "report", "watch", "init", "search"}
    assert "pip install" in commands("sh")


def test_three_lines_of_the_readme_convert_a_model_and_serve_it_in_two_engines() -> None:
    assert [line.split()[:2] for line in first_lines().splitlines()] == [
        ["headfold", "convert"],
        ["vllm", "serve"],
        ["headfold", "export"],
    ]
    assert all(f"{server} " in first_lines() for server in SERVERS)


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    stranger, place = CleanEnvironment.make(tmp_path), tmp_path / "place"
    place.mkdir()
    script = tmp_path / "quickstart.sh"
    script.write_text(f"set -eux\n{commands('bash')}")
    done = stranger.run("bash", script, cwd=place, minutes=50)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("inspection.html", "half/config.json", "half-gguf", "runs/demo/demo/report.html", "my-model.yaml"):
        assert (place / name).exists(), name
    assert "Headfold not importable" in done.stdout
    assert done.stdout.endswith("dry run: all checks passed, nothing was written\n")


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_the_first_lines_of_the_readme_work(tmp_path: Path) -> None:
    stranger, place = CleanEnvironment.make(tmp_path), tmp_path / "place"
    shutil.copytree(REPOSITORY / "examples" / "prose-code-qwen3", place / HUB_NAME)
    for server, tells in SERVERS.items():
        (stranger.bin / server).write_text(f"#!/bin/sh\n{tells}\n")
        (stranger.bin / server).chmod(0o755)
    texts = [file.read_text(errors="ignore")[:8000] for file in sorted(LIBRARY.glob("*.py"))]
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = stranger.run("bash", "-euxc", first_lines(), cwd=place, minutes=25)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("served: ") == len(SERVERS)
