"""The table over seeds: means, spread and best rates by hand-computed examples; nothing dropped unsaid."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from orchestrator.reporting import comparison
from orchestrator.reporting.comparison import compare_arms, footnote, mean_and_sd, several_seeds
from orchestrator.reporting.tables import comparison_table, promotion_table
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord

BASE = {"loss": 2.0, "kv_bytes_per_token": 8192}
STEPS = (0, 10, 40)


def trial(
    recipe: str, seed: int | None, losses: list[float | None], *, rate: float = 1e-3, budget: float = 0.25, **more: Any
) -> TrialRecord:
    rungs = [{"step": step, "loss": loss, "tokens": 100 * step} for step, loss in zip(STEPS, losses, strict=False)]
    settings = {"status": records.DONE, "rungs": rungs, "kv_bytes_per_token": int(8192 * budget)}
    name = f"{recipe}-{budget}-{rate}-{seed}"
    return TrialRecord(name, recipe, budget, rate, {}, seed=seed, **{**settings, **more})


def two_rates() -> list[TrialRecord]:
    """At rate 1e-3: 2.9, 3.1, 3.3; at 3e-3: 2.8, 2.9, 3.3. After 10 steps 1e-3 is ahead."""
    low = [(5.0, 4.0, 2.9), (5.2, 4.1, 3.1), (5.4, 4.2, 3.3)]
    high = [(5.0, 4.2, 2.8), (5.2, 4.3, 2.9), (5.4, 4.4, 3.3)]
    return [trial("dha", seed, list(loss)) for seed, loss in enumerate(low)] + [
        trial("dha", seed, list(loss), rate=3e-3) for seed, loss in enumerate(high)
    ]


def test_a_row_by_hand() -> None:
    (row,) = compare_arms(two_rates(), BASE)
    assert row["learning_rate"] == 3e-3
    assert row["loss"] == {"mean": pytest.approx(3.0), "sd": pytest.approx(math.sqrt(0.07)), "n": 3}
    assert row["untrained"] == {"mean": pytest.approx(5.2), "sd": pytest.approx(0.2), "n": 3}
    assert row["loss_increase"] == pytest.approx(1.0)
    assert (row["kv_bytes_per_token"], row["tokens"], row["steps"], row["last"]) == (2048, 4000, 40, True)
    assert [r["learning_rate"] for r in row["rates"]] == [1e-3, 3e-3]
    assert row["rates"][0]["mean"] == pytest.approx(3.1)
    assert row["trial_ids"] == ["dha-0.25-0.003-0", "dha-0.25-0.003-1", "dha-0.25-0.003-2"]


def test_an_arm_is_judged_at_its_best_objective_too() -> None:
    def learning(objective: str, loss: float, rate: float) -> TrialRecord:
        created = trial("dha", 0, [5.0, 4.0, loss], rate=rate)
        return replace(created, choices={"settings": {"recovery.distillation": objective}})

    arm = [learning("none", 3.0, 1e-3), learning("kl", 2.9, 1e-3), learning("none", 2.95, 3e-3)]
    (row,) = compare_arms([*arm, trial("gqa", 0, [5.0, 4.0, 3.5])], BASE)[:1]
    assert (row["learning_rate"], row.get("distillation"), row["loss"]["mean"]) == (1e-3, "kl", 2.9)
    assert [(r["learning_rate"], r.get("distillation"), r["n"]) for r in row["rates"]] == [
        (1e-3, "kl", 1),
        (1e-3, "none", 1),
        (3e-3, "none", 1),
    ]
    assert "1.0e-03 kl" in comparison.cells(row)


def test_a_loss_of_an_unfinished_relaxation_is_marked_and_that_of_a_finished_one_is_not() -> None:
    """The mark is of the trials that the row shows, the count of all."""
    trials = [*two_rates(), *(trial("align", seed, [5.0, 4.0, 3.4]) for seed in (0, 1, 2))]
    trials[0].rungs[-1]["relaxation_remaining"] = 0.4  # at 1e-3: dha is shown at 3e-3
    trials[-1].rungs[-1]["relaxation_remaining"] = 0.06
    trials[-2].rungs[-1]["relaxation_remaining"] = 0.04
    table = comparison_table(compare_arms(trials, BASE))
    losses = {row[0]: row[table.columns.index("loss")] for row in table.rows}
    counts = {row[0]: row[table.columns.index("trials")] for row in table.rows}
    assert losses["dha"] == "3.000 ± 0.265" and losses["align"].endswith("†")
    assert counts == {"dha": "6 (1 relaxation unfinished)", "align": "3 (1 relaxation unfinished)"}
    assert "† relaxation unfinished: heads were fused before" in table.intro


def test_a_promoted_loss_is_marked_alike() -> None:
    finished = {"recipe": "dha", "kv_ratio": 0.25, "loss": 2.5, "trial_id": "t0", "relaxation_remaining": 0.01}
    table = promotion_table([finished, {**finished, "relaxation_remaining": 0.3}])
    assert [row[table.columns.index("best")] for row in table.rows] == ["2.500", "2.500†"]


def test_each_rung_has_its_own_best_rate_and_the_curve_keeps_one() -> None:
    (row,) = compare_arms(two_rates(), BASE)
    assert [(r["step"], r["learning_rate"]) for r in row["rungs"]] == [(0, 1e-3), (10, 1e-3), (40, 3e-3)]
    assert [p["mean"] for p in row["curve"]] == pytest.approx([5.2, 4.3, 3.0])
    assert [p["tokens"] for p in row["curve"]] == [0, 1000, 4000]


@pytest.mark.parametrize(
    ("broken", "counted"),
    [
        ({"status": records.FAILED, "error": "ValueError: no"}, "failed"),
        ({"status": records.FAILED, "error": "trainers.loop.TrainingDiverged: training loss is nan"}, "diverged"),
        ({"status": records.FAILED, "rungs": [{"step": 0, "loss": 5.0}, {"step": 40, "loss": None}]}, "diverged"),
        ({"status": records.STOPPED, "rungs": [{"step": 0, "loss": 5.0}]}, "stopped"),
        ({"status": records.RUNNING, "rungs": []}, "unfinished"),
    ],
)
def test_a_rate_without_all_of_its_seeds_is_not_chosen_but_reported(broken: dict[str, Any], counted: str) -> None:
    trials = two_rates()
    for name, value in broken.items():
        setattr(trials[4], name, value)
    (row,) = compare_arms(trials, BASE)
    assert row["learning_rate"] == 1e-3
    assert row["loss"]["mean"] == pytest.approx(3.1)
    assert row["trials"] == 6
    assert {n: row[n] for n in ("failed", "diverged", "stopped", "unfinished") if row[n]} == {counted: 1}
    assert comparison.counts_text(row) == f"6 (1 {counted})"
    assert row["rates"][1]["n"] == 2


def test_an_arm_of_which_every_rate_lost_a_seed_stays_as_an_empty_row() -> None:
    trials = [*two_rates(), *(trial("align", s, [6.0, 5.0, 4.0]) for s in (0, 1))]
    trials.append(trial("align", 2, [6.0, None, None], status=records.FAILED, error="diverged: not finite"))
    empty = next(row for row in compare_arms(trials, BASE) if row["recipe"] == "align")
    assert empty["learning_rate"] is None and empty["loss"]["mean"] is None and empty["loss_increase"] is None
    assert (empty["trials"], empty["diverged"], empty["seeds"], empty["seeds_asked"]) == (3, 1, 0, 3)
    assert empty["rates"] == [{"learning_rate": 1e-3, "mean": None, "sd": None, "n": 0}]


def test_an_arm_that_was_stopped_early_is_compared_where_it_stopped_and_marked() -> None:
    trials = [*two_rates(), *(trial("gqa", s, [8.0, 6.0 + s], status=records.STOPPED) for s in range(3))]
    rows = compare_arms(trials, BASE)
    gqa = next(row for row in rows if row["recipe"] == "gqa")
    assert (gqa["steps"], gqa["last"], gqa["stopped"]) == (10, False, 3)
    assert gqa["loss"]["mean"] == pytest.approx(7.0)
    assert comparison.cells(gqa)[6] == "10*"
    assert "not comparable" in footnote(rows)
    assert "not comparable" not in footnote(compare_arms(two_rates(), BASE))


def test_seed_zero_counts_and_arms_keep_the_order_they_were_tried_in() -> None:
    trials = [trial("mqa", 0, [5.0], budget=0.125), trial("gqa", 0, [4.0]), trial("mqa", 0, [3.0], budget=0.5)]
    rows = compare_arms(trials, BASE)
    assert [(r["kv_ratio"], r["recipe"]) for r in rows] == [(0.5, "mqa"), (0.25, "gqa"), (0.125, "mqa")]
    assert all(r["loss"]["sd"] is None and r["seeds"] == 1 for r in rows)
    assert not several_seeds(rows)
    assert several_seeds(compare_arms(two_rates(), BASE))
    assert compare_arms([], BASE) == []


def test_what_the_searcher_drew_has_one_seed_and_is_compared_all_the_same() -> None:
    rows = compare_arms([*two_rates(), trial("joint-abc123", 0, [2.9, 2.8, 2.7])], BASE)
    drawn = next(row for row in rows if row["recipe"] == "joint-abc123")
    assert drawn["loss"] == {"mean": 2.7, "sd": None, "n": 1}
    assert (drawn["seeds"], drawn["seeds_asked"]) == (1, 1)
    assert "one seed" in footnote(rows)
    assert "one seed" not in footnote(compare_arms(two_rates(), BASE))


def test_trials_without_a_recorded_seed_are_one_seed() -> None:
    (row,) = compare_arms([trial("gqa", None, [4.0, 3.0, 2.5])], BASE)
    assert row["loss"] == {"mean": 2.5, "sd": None, "n": 1}


def test_spread_of_one_and_of_none() -> None:
    assert mean_and_sd([2.0]) == {"mean": 2.0, "sd": None, "n": 1}
    assert mean_and_sd([]) == {"mean": None, "sd": None, "n": 0}


def test_rows_are_plain_json_and_the_terminal_shows_them() -> None:
    rows = compare_arms(two_rates(), BASE)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    out = Console(width=180, highlight=False)
    with out.capture() as shown:
        out.print(comparison_table(rows).for_terminal())
    text = shown.get()
    for word in ("dha", "25%", "2048", "3.0e-03", "4k", "5.200 ± 0.200", "3.000 ± 0.265", "+1.000"):
        assert word in text


def test_losses_that_no_seed_changes_are_shown_without_a_spread() -> None:
    """A plan that does not depend on the seed: "± 0.000" would read as a precision."""
    rows = compare_arms([trial("headfold", seed, [2.5, 2.4, 2.3 + seed / 10]) for seed in range(3)], BASE)
    out = Console(width=300, record=True)
    out.print(comparison_table(rows).for_terminal())
    shown = out.export_text()
    assert "2.500" in shown and "2.500 ±" not in shown and "2.400 ± 0.100" in shown


def test_what_a_pull_has_left_of_the_distance_is_reported() -> None:
    points = [{"step": 1, "train_loss": 3.0, "distance": 0.5}, {"step": 20, "train_loss": 2.5, "distance": 0.02}]
    pulled = trial("postshare", 0, [3.0, 2.9, 2.8], relaxation=points)
    rows = compare_arms([pulled, trial("gqa", 0, [3.0, 2.9, 2.8])], BASE)
    remaining = {row["recipe"]: comparison.cells(row)[comparison.COMPARISON_COLUMNS.index("left")] for row in rows}
    assert remaining == {"postshare": "0.02", "gqa": "-"}
    assert rows[0]["remaining_distance"] == {"mean": 0.02, "sd": None, "n": 1}
    assert "left: of the squared distance" in footnote(rows) and "left:" not in footnote(rows[1:])
