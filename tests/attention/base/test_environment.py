"""Environment variables that hold for a part of a program."""

from __future__ import annotations

import os
import threading

import pytest

from attention.base.environment import environment_variable

NAME = "HEADFOLD_TEST_VARIABLE"


@pytest.mark.parametrize("before", [None, "earlier"])
def test_is_set_for_the_body_and_restored_where_it_fails(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with pytest.raises(ValueError, match="the body"), environment_variable(NAME, "within"):
        assert os.environ[NAME] == "within"
        with environment_variable(NAME, "deeper"):
            assert os.environ[NAME] == "deeper"
        assert os.environ[NAME] == "within"
        raise ValueError("the body")
    assert os.environ.get(NAME) == before


def test_one_thread_at_a_time() -> None:
    """Otherwise one of two would restore what the other has set."""
    inside = threading.Event()

    def enter() -> None:
        with environment_variable(NAME, "second"):
            inside.set()

    thread = threading.Thread(target=enter)
    with environment_variable(NAME, "first"):
        thread.start()
        assert not inside.wait(0.2)
        assert os.environ[NAME] == "first"
    thread.join(60)
    assert inside.is_set()
    assert NAME not in os.environ
