"""The documentation builds as a site without a warning, holds every page, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
LOADED = re.compile(r"<(?:link|script|img|iframe)\b[^>]*\b(?:href|src)=[\"']?((?:https?:)?//[^\"'\s>]+)")
MOST_FILES = 23  # of a folder of pages: the site's list of pages is what a reader looks through


def listed(entry: object) -> list[str]:
    """The pages below an entry of mkdocs' nav."""
    if isinstance(entry, str):
        return [entry]
    return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in listed(one)]  # type: ignore[attr-defined]


def test_every_page_is_listed() -> None:
    text = re.sub(r"!!python/\S+", "", (REPOSITORY / "mkdocs.yml").read_text())
    pages = listed(yaml.safe_load(text)["nav"])
    assert sorted(pages) == sorted(file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md"))
    assert len(list(DOCS.glob("*.md"))) <= MOST_FILES


@pytest.mark.extended
def test_the_site_builds_strictly_and_offline(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert LOADED.findall(page.read_text()) == [], page.name
    reference = (tmp_path / "site" / "reference" / "config.html").read_text()
    assert 'href="#datatrain"' in reference and 'id="datatrain"' in reference
    assert "CONTRIBUTING" in (tmp_path / "site" / "howto" / "own-method.html").read_text()
