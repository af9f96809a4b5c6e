"""Records of trials: the front, the best at each budget, atomic files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import write_journal

from orchestrator.reporting.tables import trial_table
from orchestrator.search.callbacks import progress_note
from orchestrator.storage import records
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.records import TrialRecord, best_per_budget, front, ranked


def record(name: str, budget: float, loss: float, status: str = records.DONE, recipe: str = "headfold") -> TrialRecord:
    return TrialRecord(
        trial_id=name,
        recipe=recipe,
        kv_ratio=budget,
        learning_rate=1e-3,
        choices={},
        status=status,
        rungs=[{"step": 0, "loss": loss}],
        kv_bytes_per_token=int(8192 * budget),
    )


def test_the_front_leaves_out_what_another_trial_beats_in_both() -> None:
    trials = [
        record("a", 0.5, 2.3),
        record("b", 0.5, 2.4),
        record("c", 0.25, 2.5),
        record("d", 0.75, 2.35),
        record("e", 1.0, 2.2),
        record("f", 0.125, 2.1, status=records.FAILED),
    ]
    assert [t.trial_id for t in front(trials)] == ["c", "a", "e"]


def test_what_a_trial_cost_is_its_conversion_and_its_training() -> None:
    trial = record("a", 0.5, 2.3)
    trial.parameters, trial.seconds = 10, {"plan": 2.0, "refine": 1.0}
    trial.conversion_cost = {"optimizer_steps": 480, "tokens": 50, "flops": 7.0, "seconds": 3.0}
    trial.rungs[0]["seconds"] = 3.5  # of the phases, which are counted already
    assert (trial.cost["seconds"], trial.cost["flops"]) == (3.0, 7.0)
    trial.rungs += [{"step": step, "loss": 2.2, "seconds": step / 2, "tokens": 4 * step} for step in (4, 12)]
    assert (trial.cost["seconds"], trial.cost["flops"]) == (9.0, 7.0 + 6 * 10 * 48)
    assert (trial.cost["optimizer_steps"], trial.cost["steps"], trial.cost["fit_tokens"]) == (480, 12, 50)


def test_with_decode_time_the_front_has_what_is_fastest_too() -> None:
    trials = [record("a", 0.5, 2.3), record("b", 0.5, 2.4), record("c", 0.5, 2.5), record("d", 0.25, 2.6)]
    for trial, seconds in zip(trials, (0.04, 0.03, 0.03, 0.05), strict=True):
        trial.decode_seconds_per_token = seconds
    assert [t.trial_id for t in front(trials)] == ["d", "a", "b"]
    assert [t.trial_id for t in front(trials, timed=False)] == ["d", "a"]


def trained(name: str, *losses: float, **more: object) -> TrialRecord:
    """A trial at half of the cache with these losses at steps 0, 8, 16, ..."""
    trial = record(name, 0.5, losses[0])
    trial.rungs = [{"step": 8 * i, "loss": loss, "kl": loss / 10} for i, loss in enumerate(losses)]
    trial.rungs[0] |= more
    return trial


def test_a_trial_is_worth_its_best_measured_step() -> None:
    """Training may harm a conversion: what is shipped then is the untrained one, and so is what all tables say."""
    harmed, helped = trained("a", 2.233, 2.248, 2.245), trained("b", 2.3, 2.25, 2.24)
    assert (harmed.loss, harmed.best["step"], harmed.best["kl"], harmed.last_loss) == (2.233, 0, 0.2233, 2.245)
    assert (helped.loss, helped.best["step"], helped.last_loss) == (2.24, 16, 2.24)
    assert [t.trial_id for t in front([harmed, helped])] == ["a"]
    assert [t.trial_id for t in ranked([helped, harmed])[0.5]] == ["a", "b"]


def test_what_no_training_starts_from_is_not_a_trials_best_step() -> None:
    relaxed = trained("a", 2.2, 2.6, 2.5, pooled=True)
    assert (relaxed.loss, relaxed.best["step"]) == (2.5, 16)
    relaxed.rungs[-1] |= {"collapsed_loss": 2.4, "relaxation_steps": 7}
    assert relaxed.best == {"step": 7, "loss": 2.4}
    assert trained("b", 2.2, pooled=True).loss == 2.2


def test_a_diverged_trial_is_worth_nothing_despite_earlier_results() -> None:
    assert trained("a", 2.2, math.nan).loss == math.inf
    assert trained("a", 2.2, math.nan).best["loss"] == 2.2


@pytest.mark.parametrize(
    ("last", "history", "remaining"),
    [
        ({"relaxation_remaining": 0.19}, [], 0.19),
        ({"relaxation_remaining": 0.0}, [{"mean_mask": 1.0}], 0.0),
        ({}, [{"mean_mask": 1.0}, {"mean_mask": 0.9}], 0.9),  # of a search before it was reported
        ({}, [{"distance": 1e-3}], 1e-3),
        ({}, [], None),
    ],
)
def test_an_unfinished_relaxation_is_labelled(
    last: dict[str, float], history: list[dict[str, float]], remaining: float | None
) -> None:
    trial = trained("a", 2.2, 2.1)
    trial.rungs[-1] |= last
    trial.relaxation = history
    unfinished = remaining is not None and remaining > 0.05
    assert (trial.relaxation_remaining, trial.relaxation_unfinished) == (remaining, unfinished)
    table = trial_table([trial], {"loss": 2.0})
    state = table.rows[0][table.columns.index("state")]
    assert state == ("done, relaxation unfinished" if unfinished else "done")
    assert (
        any(f"headfold · 50% ({remaining:.0%} left)" in note for note in table.notes) if unfinished else not table.notes
    )


def test_the_table_has_the_best_step_and_the_last() -> None:
    table = trial_table([trained("a", 2.233, 2.248, 2.245)], {"loss": 2.219})
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["loss"], row["loss increase"], row["at step"], row["last"]) == ("2.233", "+0.014", "0", "2.245")
    assert (row["steps"], row["KL"]) == ("16", "0.223")


@given(st.lists(st.tuples(st.sampled_from([0.125, 0.25, 0.5, 1.0]), st.integers(0, 6)), max_size=12))
def test_the_front_is_what_nobody_dominates(pairs: list[tuple[float, int]]) -> None:
    trials = [record(f"{i:02}", budget, 2 + loss / 4) for i, (budget, loss) in enumerate(pairs)]
    chosen = {(t.kv_ratio, t.loss) for t in front(trials)}
    for t in trials:
        beaten = any(
            o.kv_ratio <= t.kv_ratio and o.loss <= t.loss and (o.kv_ratio, o.loss) != (t.kv_ratio, t.loss)
            for o in trials
        )
        assert ((t.kv_ratio, t.loss) in chosen) != beaten


def test_the_best_of_each_budget_ignores_failed_and_diverged_trials() -> None:
    trials = [
        record("a", 0.25, 2.5),
        record("b", 0.25, 2.4, status=records.FAILED),
        record("c", 0.25, math.nan),
        record("d", 0.5, 2.3, status=records.STOPPED),
        record("e", 0.5, 2.2, status=records.RUNNING),
    ]
    assert {b: t.trial_id for b, t in best_per_budget(trials).items()} == {0.5: "d", 0.25: "a"}
    assert list(ranked(trials)) == [0.5, 0.25]


def test_a_repeated_step_replaces_the_earlier_one() -> None:
    one = record("a", 0.25, 2.5)
    one.add({"step": 4, "loss": 2.4})
    one.add({"step": 4, "loss": 2.3})
    one.add({"step": 0, "loss": 2.6})
    assert [(r["step"], r["loss"]) for r in one.rungs] == [(0, 2.6), (4, 2.3)]


def test_a_report_hands_over_its_relaxation_and_its_similarity() -> None:
    one = record("a", 0.25, 2.5)
    history = [{"step": 2, "train_loss": 3.0, "fusion_loss": 0.5, "own_share": 0.9, "multiplier": 10.0}]
    one.add({"step": 0, "loss": 2.5, "similarity": {"means": {"key_raw": 0.25}}})
    one.add({"step": 8, "loss": 2.4, "relaxation_history": history, "relaxation": "lagrangian"})
    one.add({"step": 16, "loss": 2.3})
    assert one.relaxation == history
    assert one.similarity == {"means": {"key_raw": 0.25}}


def test_records_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    trials = [record("a", 0.25, 2.5), record("b", 0.5, 2.4)]
    write_journal(tmp_path, trials)
    result = load_trials(tmp_path)
    assert [(t.trial_id, t.kv_ratio, t.loss, t.status, t.kv_bytes_per_token) for t in result] == [
        (t.trial_id, t.kv_ratio, t.loss, t.status, t.kv_bytes_per_token) for t in trials
    ]
    assert load_trials(tmp_path / "none") == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert read_json(file) == {"a": 1}


def test_probes_are_no_candidates_for_anything() -> None:
    """However low their loss: their plans may be unfinished, and nobody trains them."""
    probe = record("p", 0.5, 2.0)
    probe.probe = True
    trials = [record("a", 0.5, 2.4), probe]
    assert not probe.usable
    assert [t.trial_id for t in records.without_probes(trials)] == ["a"]
    assert [t.trial_id for t in front(trials)] == ["a"]
    assert best_per_budget(trials)[0.5].trial_id == "a"


def test_the_progress_line_reports_trials_that_wait_at_their_rung() -> None:
    trials = [record("a", 0.5, 2.5, status=records.WAITING)]
    assert "0 running, 0 stopped, 1 waiting" in progress_note(trials, 2, 2.0)
