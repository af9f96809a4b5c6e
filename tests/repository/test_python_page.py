"""The page of Python functions is a notebook: each cell runs after the one before, and prints what stands under it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from clean_environment import CleanEnvironment

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


@pytest.mark.extended
def test_the_notebook_runs_as_a_notebook(tmp_path: Path) -> None:
    """By a Jupyter kernel with the wheel alone, far from the checkout; cell by cell what the page prints."""
    clean = CleanEnvironment.make(tmp_path)
    done = clean.run("pip", "install", "--quiet", "nbclient", "ipykernel", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = clean.run("python", "-m", "ipykernel", "install", "--sys-prefix", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "work").mkdir()
    notebook = shutil.copy(PAGE.with_suffix(".ipynb"), tmp_path / "work")  # a kernel runs in the folder of its notebook
    done = clean.run("jupyter-execute", "--inplace", notebook, cwd=tmp_path, minutes=12, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    cells = json.loads(Path(notebook).read_text())["cells"]
    printed = [
        "".join(text for out in cell["outputs"] if out.get("name") == "stdout" for text in out["text"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]
    assert printed == [text for _, text in CELLS]
