"""The cache folder: the variables that name it, in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.base.cache import cache_folder


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/headfold"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/headfold"),
        ({"XDG_CACHE_HOME": "xdg", "HEADFOLD_CACHE": "own"}, "own"),
        ({"HEADFOLD_CACHE": "~/own"}, "home/own"),
    ],
)
def test_the_first_variable_that_is_set_names_it(
    variables: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADFOLD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value if value.startswith("~") else str(tmp_path / value))
    assert cache_folder() == tmp_path / expected
