"""The page of Python functions is a notebook: each cell runs after the one before, and prints what stands under it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
CELLS = re.findall(r"^```python\n(.*?)^```\n+^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.extended
def test_every_cell_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # as the command sets it; else DeepSpeed prints a warning on import
    assert len(CELLS) == PAGE.read_text().count("```python") > 5
    names: dict[str, Any] = {}
    for number, (code, printed) in enumerate(CELLS, start=1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"cell {number} of {PAGE.name}", "exec"), names)
        assert out.getvalue() == printed, f"cell {number}"
