"""The quickstart, word for word: its commands are read out of the page and run as a stranger would run them.

In an environment with Headfold's wheel, far from the checkout. Left out is what the page marks as `sh` in place of
`bash`: the installation, which would load gigabytes, and the search of one's own checkpoint, which takes long.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from clean_environment import CleanEnvironment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"


def commands(kind: str) -> str:
    return "\n".join(re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))


def test_the_page_has_its_commands() -> None:
    verbs = set(re.findall(r"^(?:\w+=\$\()?headfold ([a-z]+)", commands("bash"), re.MULTILINE))
    assert verbs == {"demo", "inspect", "convert", "evaluate", "export", "report", "watch", "init", "search"}
    assert "pip install" in commands("sh")


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
