"""The one style of progress: what is shown to whom, and that the time left is a sound estimate."""

from __future__ import annotations

import io
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from attention.base import progress
from attention.base.progress import show_progress, stage
from attention.base.timing import clock, duration


class Clock:
    """A clock that advances only when a test sets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(progress.time, "monotonic", fake)
    return fake


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(0.2, "1 s"), (42, "42 s"), (900, "15 min"), (3599, "1 h"), (4800, "1 h 20 min")],
)
def test_how_long_something_takes_in_words(seconds: float, message: str) -> None:
    assert duration(seconds) == message


def test_nothing_is_shown_unless_it_is_requested(at: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with stage("fitting layers", 4, "layers") as counter:
        at.now += 60
        counter.step()
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_every_ten_seconds(at: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("convert"), stage("fitting layers", 10, "layers") as counter:
        for _ in range(10):
            at.now += 4
            counter.step()
    assert capsys.readouterr().err.splitlines() == [
        "fitting layers: 3 of 10 layers, 0:28 left",
        "fitting layers: 6 of 10 layers, 0:16 left",
        "fitting layers: 9 of 10 layers, 0:04 left",
    ]


def test_a_log_gets_what_has_changed_and_a_line_every_half_minute(
    at: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress("search"), stage("trials", 10, "rungs") as shown:
        for seconds, done, note in (
            (10, 1, "1 running; best 50% +0.10"),
            (10, 1, "1 running; best 50% +0.10"),  # nothing new
            (10, 2, "1 running; best 50% +0.08"),
            (10, 2, "1 running; best 50% +0.08"),
            (20, 2, "1 running; best 50% +0.08"),
        ):
            at.now += seconds
            shown.to(done, note)
    assert capsys.readouterr().err.splitlines() == [
        "trials: 1 of 10 rungs, 1:30 left; 1 running; best 50% +0.10",
        "trials: 2 of 10 rungs, 2:00 left; best 50% +0.08",
        "trials: 2 of 10 rungs, 1:49 left",
    ]


def test_no_time_left_is_given_before_a_twentieth_is_done(at: Clock) -> None:
    with stage("training", 240, "steps") as shown:
        at.now += 40
        shown.to(2)
        assert str(shown) == "training: 2 of 240 steps, elapsed 0:40"
        shown.to(12)
        assert shown.left == pytest.approx(760)


def test_what_was_done_before_does_not_make_it_seem_faster(at: Clock) -> None:
    with stage("tokenising", 100, "tokens", start=80) as counter:
        assert str(counter) == "tokenising: 80 of 100 tokens"
        at.now += 3
        assert str(counter) == "tokenising: 80 of 100 tokens, elapsed 0:03"
        at.now -= 3
        at.now += 10
        counter.to(90)
        assert counter.left == pytest.approx(10.0)


def test_a_stage_within_another_is_not_shown(at: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("convert"):
        with stage("outer", 2, "layers") as outer:
            with stage("inner", 1, "steps") as inner:
                at.now += 20
                inner.step()
            outer.step()
        with stage("after", 2, "layers") as after:
            at.now += 20
            after.step()
    assert capsys.readouterr().err.splitlines() == [
        "outer: 1 of 2 layers, 0:20 left",
        "after: 1 of 2 layers, 0:20 left",
    ]


def test_a_stage_within_one_that_cannot_be_counted_is_shown(at: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("search"), stage("original model"), stage("calibrating", 2, "sequences") as counter:
        at.now += 20
        counter.step()
    assert capsys.readouterr().err == "calibrating: 1 of 2 sequences, 0:20 left\n"


def test_a_log_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """However long a step takes, and also where nobody has opened a stage."""
    monkeypatch.setattr(progress, "SAY_SECONDS", 1.0)
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.05)
    with show_progress("convert"):
        time.sleep(1.3)
        with stage("calibrating", 4, "layers"):
            time.sleep(1.3)
        with stage("starting Ray"):
            time.sleep(1.3)
    output = capsys.readouterr().err.splitlines()
    for line, words in zip(
        output, ("convert: elapsed 0:0", "calibrating: 0 of 4 layers", "starting Ray: elapsed 0:0"), strict=True
    ):
        assert line.startswith(words)


def test_the_time_left_runs_down_within_a_step_and_never_below_the_steps_to_come(at: Clock) -> None:
    with stage("fitting layers", 4, "layers") as counter:
        at.now += 10
        counter.step()
        assert counter.left == pytest.approx(30.0)
        at.now += 6
        assert counter.left == pytest.approx(24.0)
        at.now += 60
        assert counter.left == pytest.approx(22.5)


def test_what_workers_take_to_start_does_not_count(at: Clock) -> None:
    with stage("training", 11, "steps") as counter:
        at.now += 100
        counter.begin(1)
        at.now += 2
        counter.to(2)
        assert counter.left == pytest.approx(18.0)


def test_threads_may_share_a_stage() -> None:
    with stage("fitting layers", 400, "layers") as counter, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: counter.step(), range(400)))
    assert counter.done == 400


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    with show_progress("convert"), stage("fitting layers", 3, "layers") as counter:
        for _ in range(3):
            counter.step()
    assert "fitting layers: 3 of 3 layers" in screen.getvalue()


@pytest.mark.parametrize(("seconds", "words"), [(-1, "0:00"), (59.6, "1:00"), (3909, "1:05:09")])
def test_clock(seconds: float, words: str) -> None:
    assert clock(seconds) == words


def test_in_a_log_details_of_a_count_wait_for_half_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_SECONDS", 0.0)
    with progress.show_progress("search"), progress.stage("trials", 4, "rungs") as shown:
        for number in range(20):
            shown.to(number // 10, f"fitting: {number} of 20 steps")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trials")]
    assert len(lines) == 2 and "fitting: 0 of 20" in lines[0] and "fitting: 10 of 20" in lines[1]
