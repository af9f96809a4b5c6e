"""Bad inputs of every verb: refused with a message that helps, and nothing of the folder around them is lost.

The rows are in `bad_inputs`, one `Bad(name, command line, parts of the message)` each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Bad
from bad_input_folder import digest, fresh_copy, make_folder, run_in
from bad_inputs import BY_VERB, CASES
from typer.main import get_command

from orchestrator.main import app

TOLD_AT_ONCE = ("no --out: ", "estimate: ", "text: none was named")  # by convert, before it reads weights or texts
SLOW = re.compile(r"\w+: elapsed \d+:\d\d")  # after ten seconds, on a busy machine
LONG = ("a task that nobody knows",)  # is looked for in the harness's thousands of files; test_tasks.py does so too
VERBS = get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of the cases' folders."""
    return tmp_path_factory.mktemp("bad") / "folder"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, home: Path, tiny_model: Any) -> Path:
    folder = tmp_path_factory.mktemp("template")
    make_folder(folder, home, tiny_model)
    return folder


@pytest.mark.parametrize(
    "bad",
    [pytest.param(bad, id=bad.what, marks=[pytest.mark.extended] * (bad.what in LONG)) for bad in CASES],
)
def test_a_bad_input_is_refused_and_nothing_is_lost(
    bad: Bad,
    template: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if bad.without_gpu and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for name in ("HOME", "XDG_CACHE_HOME", "HEADFOLD_CACHE", "HEADFOLD_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # as in a process of the command's own
    for name in ("HEADFOLD_TRACEBACK", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    folder = fresh_copy(template, home)
    if bad.prepare is not None:
        bad.prepare(folder)
    before = digest(folder)
    ran = run_in(folder, bad.arguments)
    after = digest(folder)
    assert ran.code == bad.code, ran.err
    for word in bad.said:
        assert word.lower() in ran.err.lower(), ran.err
    assert "Traceback" not in ran.err
    before_it, result, _ = ran.err.partition("headfold: ")
    assert result, "no message"
    others = [line for line in before_it.splitlines() if not (line.startswith(TOLD_AT_ONCE) or SLOW.fullmatch(line))]
    assert others == [], "the message must stand alone"
    assert {name: after.get(name) for name in before} == before
    new = [name for name in after if name not in before]
    assert all(bad.leaves is not None and f"{name}/".startswith(f"{bad.leaves}/") for name in new), new


def test_every_verb_has_bad_inputs() -> None:
    names = [bad.what for bad in CASES]
    assert len(names) == len(set(names)) >= 80
    assert set(VERBS) == set(BY_VERB) - {"any verb"}
    assert all(bad.verb == verb for verb, cases in BY_VERB.items() if verb in VERBS for bad in cases)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_says_what_every_option_is(verb: str, tmp_path: Path) -> None:
    ran = run_in(tmp_path, [verb, "--help"])
    assert ran.code == 0, ran.err
    for parameter in VERBS[verb].params:
        assert len(parameter.help or "") > 5, f"{verb}: {parameter.name} has no help"
        assert all(name in ran.out for name in parameter.opts if name.startswith("--"))
