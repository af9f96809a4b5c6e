"""Steps of a training run, and when one that has lost its machines starts again."""

from __future__ import annotations

from orchestrator.training.run import LOSSES, Failures, add_steps


def test_reports_are_in_steps_of_the_model() -> None:
    report = {"step": 4, "best_step": 2, "loss": 1.5}
    assert add_steps(report, 10) == {"step": 14, "best_step": 12, "loss": 1.5}
    assert add_steps({"step": 4}, 0) == {"step": 4}


def test_it_starts_again_until_it_has_failed_too_often_without_getting_any_further() -> None:
    failures, retried = Failures(), []
    for step in [-1, *[8] * (LOSSES + 1), 16]:
        failures = failures.another(step)
        retried.append(failures.retries_left)
    assert retried == [True, *[True] * LOSSES, False, True]
