"""Pictures of arms, relaxations and similarities: what is drawn, and where."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from attention.base.text import compact
from orchestrator.reporting.comparison import compare_arms
from orchestrator.reporting.figures import comparison, drawing, measured, search
from orchestrator.reporting.figures.increases import IncreaseAxis
from orchestrator.storage import records
from orchestrator.storage.records import TrialRecord

BASE = {"loss": 2.0, "kv_bytes_per_token": 8192}


def trial(recipe: str, seed: int, losses: dict[int, float], budget: float = 0.25, **more: Any) -> TrialRecord:
    rungs = [{"step": step, "loss": loss, "tokens": 100 * step} for step, loss in losses.items()]
    settings = {"status": records.DONE, "rungs": rungs, "kv_bytes_per_token": int(8192 * budget)}
    return TrialRecord(f"{recipe}{budget}{seed}", recipe, budget, 1e-3, {}, seed=seed, **{**settings, **more})


def two_arms(gqa_loss: float = 3.0) -> list[TrialRecord]:
    trials = []
    for seed in range(3):
        for budget in (0.5, 0.25):
            trials.append(trial("gqa", seed, {0: 7.0, 10: 5.0, 40: gqa_loss + 0.1 * seed}, budget))
            trials.append(trial("dha", seed, {0: 7.0, 40: 2.6 + 0.1 * seed}, budget))
    return trials


def lines(axes: Any, style: str) -> list[tuple[list[float], list[float]]]:
    return [
        (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for line in axes.get_lines()
        if line.get_linestyle() == style and len(line.get_xdata())
    ]


def test_loss_over_bytes_has_a_line_an_arm_with_bars_over_seeds() -> None:
    figure = comparison.bytes_figure(compare_arms(two_arms(), BASE), BASE)
    (axes,) = figure.axes
    drawn = lines(axes, "-")
    assert [y for _, y in drawn] == [
        pytest.approx([1.1, 1.1]),
        pytest.approx([0.7, 0.7]),
    ]  # increases, 2,048 then 4,096
    assert all(abs(x[0] / 2048 - 1) < 0.1 and abs(x[1] / 4096 - 1) < 0.1 for x, _ in drawn)
    assert drawn[0][0] != drawn[1][0]  # apart from each other
    bars = [segment for created in axes.collections for segment in created.get_segments()]
    assert sorted(float(bar[1][1] - bar[0][1]) for bar in bars) == pytest.approx([0.2] * 4)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2,048", "4,096"]
    assert [entry.get_text() for entry in figure.legends[0].get_texts()] == ["gqa", "dha"]


def test_bytes_are_those_on_each_gpu_of_a_search_for_several() -> None:
    original = BASE | {"kv_bytes_per_token_per_gpu": 4096}
    sizes = {0.5: 2048, 0.25: 2048}  # no fewer than one head on each of two GPUs
    trials = [trial("gqa", 0, {0: 3.0}, ratio, kv_bytes_per_token_per_gpu=size) for ratio, size in sizes.items()]
    promoted = [{"loss": 2.05, "kv_bytes_per_token": 4096, "recipe": "gqa", "trial_id": trials[0].trial_id}]
    front = search.front_figure(trials, original, promoted)
    arms = comparison.bytes_figure(compare_arms(trials, original), original)
    for figure, shown in ((front, {2048, 4096}), (arms, {2048})):
        (axes,) = (axes for axes in figure.axes if axes.get_xlabel())
        assert axes.get_xlabel().endswith("on each GPU")
        assert {round(tick) for tick in axes.get_xticks()} == shown


def test_an_arm_below_the_original_model_has_a_place_too() -> None:
    figure = comparison.bytes_figure(compare_arms(two_arms(gqa_loss=1.5), BASE), BASE)
    (axes,) = figure.axes
    assert lines(axes, "-")[0][1] == pytest.approx([-0.4, -0.4])
    assert axes.get_ylim()[0] < -0.4
    assert "original model" in [entry.get_text() for entry in figure.legends[0].get_texts()]
    ticks = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()), strict=True))
    assert ticks[0.0] == "0" and ticks[-0.2] == "-0.2" and ticks[0.5] == "+0.5"


def test_an_arm_that_stopped_early_is_hollow_and_labelled() -> None:
    trials = [*two_arms(), *(trial("mqa", s, {0: 9.0, 10: 8.0}, status=records.STOPPED) for s in range(3))]
    figure = comparison.bytes_figure(compare_arms(trials, BASE), BASE)
    hollow = [
        line for line in figure.axes[0].get_lines() if line.get_markerfacecolor() == "white" and len(line.get_xdata())
    ]
    assert [line.get_ydata()[0] for line in hollow] == pytest.approx([6.0])
    assert "hollow: stopped earlier" in [entry.get_text() for entry in figure.legends[0].get_texts()]


def test_loss_over_tokens_draws_the_gap_of_a_relaxation_dashed() -> None:
    figure = comparison.tokens_figure(compare_arms(two_arms(), BASE), BASE)
    whole = figure.axes[0]
    assert ([0, 1000, 4000], pytest.approx([7.0, 5.0, 3.1])) in lines(whole, "-")
    dashed = [d for d in lines(whole, "--") if len(d[0]) == 2 and d[1][0] == 7.0]
    assert dashed == [([0, 4000], pytest.approx([7.0, 2.7]))]
    assert len(figure.axes) == 4  # two budgets, each whole and from close by
    low, high = figure.axes[1].get_ylim()
    assert low < 2.0 and 3.2 < high < 5.0
    band = whole.collections[0].get_paths()[0].vertices
    assert np.isclose(band[:, 1].min(), 3.0) and np.isclose(band[:, 1].max(), 7.0)


def test_of_the_searchers_own_candidates_only_the_best_is_drawn() -> None:
    trials = [
        trial(f"joint-{name}", 0, {0: 5.0, 40: loss}) for name, loss in (("aaa", 3.0), ("bbb", 2.5), ("ccc", 2.8))
    ]
    figure = comparison.bytes_figure(compare_arms(trials, BASE), BASE)
    assert [y for _, y in lines(figure.axes[0], "-")] == [pytest.approx([0.5])]


HISTORIES = {
    "dha": (
        [
            {"step": s, "train_loss": 3.0, "fusion_loss": 0.1 / s, "own_share": 1 / s, "multiplier": 10.0}
            for s in (1, 2)
        ],
        ["own share ω of a head", "fusion loss", "multiplier λ"],
    ),
    "align": (
        [
            {
                "step": s,
                "train_loss": 3.0,
                "mean_mask": 1 / s,
                "mean_mask_layer_0": 0.9 / s,
                "mean_mask_layer_1": 1.1 / s,
                "target": 0.9 / s,
                "masks_open": 0.5,
            }
            for s in (1, 2)
        ],
        ["mean mask (thin: layers; dashed: target)", "share of masks open"],
    ),
    "postshare": (
        [{"step": s, "train_loss": 3.0, "distance": 1 / s} for s in (1, 2)],
        ["distance of the pairs, 1 at the start"],
    ),
}


@pytest.mark.parametrize("recipe", HISTORIES)
def test_each_kind_of_relaxation_has_its_panels(recipe: str) -> None:
    history, titles = HISTORIES[recipe]
    relaxed = trial(recipe, 0, {0: 5.0, 40: 3.0}, relaxation=history)
    figure = measured.relaxation_figure([relaxed, trial("gqa", 0, {0: 7.0})])
    assert figure is not None
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left").splitlines()[-1] for axes in shown] == titles
    assert shown[0].get_title(loc="left").startswith(recipe)
    x, y = lines(shown[0], "-")[0]
    assert x == [1, 2] and y == pytest.approx([1, 0.5])
    if recipe == "align":
        assert lines(shown[0], "--") == [([1, 2], pytest.approx([0.9, 0.45]))]


def test_arms_with_different_relaxations_stand_below_each_other() -> None:
    trials = [trial(name, 0, {0: 5.0}, relaxation=history) for name, (history, _) in HISTORIES.items()]
    figure = measured.relaxation_figure(trials)
    assert figure is not None and len(figure.axes) == 9
    assert sum(axes.get_visible() for axes in figure.axes) == 6


def test_a_figure_of_many_relaxations_stays_small() -> None:
    """A page has a limit, and a search of hundreds of trials ends with one."""
    points = [{"step": s, "mean_mask": 1.0, "target": 1.0} for s in range(80)]
    history = [point | {f"mean_mask_layer_{n}": 0.5 for n in range(32)} for point in points]
    trials = [trial("align", n, {0: 5.0, 40: 3.0 + n}, relaxation=history) for n in range(300)]
    figure = measured.relaxation_figure(trials)
    assert figure is not None
    assert sum(len(axes.lines) for axes in figure.axes) < 1000
    assert len(drawing.svg(figure, "relaxations")) < 2_000_000


@pytest.mark.parametrize("recipe", ["gqa", "dha", "headfold", "align", "asymgqa"])
def test_each_point_of_the_front_has_its_values(recipe: str) -> None:
    """Whatever its marker, hollow or not, alone or one of several."""
    trials = [
        trial(recipe, n, {0: 7.0, 40: 2.5 + n} if n else {0: 7.0}, ratio) for n, ratio in enumerate((0.5, 0.25, 0.125))
    ]
    promoted = [
        {"loss": 2.1 + n / 10, "kv_bytes_per_token": 2048 + n, "recipe": recipe, "name": f"best {n}"} for n in (0, 1)
    ]
    text = drawing.svg(search.front_figure(trials, BASE, promoted), "front")
    values = re.findall(r'data-value="([^"]*)"', text)
    assert sum(value.startswith("promoted: ") for value in values) == 2
    assert sum(value.startswith(trials[0].name.split(" ")[0]) for value in values) >= 3


def test_no_picture_of_what_was_not_measured() -> None:
    assert measured.relaxation_figure([trial("gqa", 0, {0: 7.0})]) is None
    assert measured.similarity_figure([trial("gqa", 0, {0: 7.0}), trial("x", 0, {}, similarity={"means": {}})]) is None


def test_similarity_goes_from_raw_to_aligned_on_either_side() -> None:
    means = {"key_raw": 0.2, "key_aligned": 0.4, "value_raw": 0.0, "value_aligned": 0.5}
    trials = [trial("gqa", seed, {0: 7.0}, similarity={"means": means}) for seed in (0, 1)]
    trials.append(trial("dha", 0, {0: 7.0}, 0.5, similarity={"means": {"key_raw": 0.1, "key_aligned": 0.3}}))
    figure = measured.similarity_figure(trials)
    assert figure is not None
    keys, values = figure.axes
    assert [label.get_text() for label in keys.get_yticklabels()] == ["dha 50%", "gqa 25%"]
    spans = {
        side: [x for x, y in lines(axes, "-") if len(x) == 2 and x != [0, 0] and y != [0, 1]]
        for side, axes in (("keys", keys), ("values", values))
    }
    assert [0.1, 0.3] in spans["keys"] and [0.2, 0.4] in spans["keys"]
    assert [0.0, 0.5] in spans["values"]
    assert [0.1, 0.3] not in spans["values"]  # dha shares no value heads


@pytest.mark.parametrize(
    ("count", "message"), [(0, "0"), (950, "950"), (409_600, "410k"), (1_500_000, "1.5M"), (2e9, "2G")]
)
def test_counts_in_short(count: float, message: str) -> None:
    assert compact(count) == message


def test_what_is_no_increase_has_a_separate_place_and_its_number() -> None:
    trials = [trial("gqa", 0, {0: 7.0, 40: 2.4}), trial("dha", 0, {0: 3.0, 40: 1.99}, 0.5)]
    promoted = [{"loss": 2.05, "kv_bytes_per_token": 2048, "recipe": "gqa"}]
    figure = search.front_figure(trials, BASE, promoted)
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    marks = [marks.get_offsets() for marks in axes.collections]
    marks += [line.get_xydata() for line in axes.lines if line.get_linestyle() == "None"]
    drawn = {tuple(map(float, place)) for places in marks for place in places}
    band = max(float(point[1]) for point in axes.patches[0].get_corners())
    at = {x: y for x, y in drawn if y < band}
    assert set(at) == {4096.0, 8192.0}  # the trial that is below the original model, and the original model
    assert sorted(y for x, y in drawn if x == 2048) == pytest.approx([0.05, 0.4])
    assert {"-0.010", "+0.050"} <= {text.get_text() for text in axes.texts}
    ticks = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()), strict=True))
    assert ticks[at[8192.0]] == "0 or less" and ticks[0.1] == "+0.1"


@pytest.mark.parametrize("increases", [[], [0.0, -1.0], [1e-9], [5.0], [float("inf"), 0.2]])
def test_an_axis_of_increases_has_a_place_for_all_of_them(increases: list[float]) -> None:
    figure = search.rungs_figure([trial("gqa", i, {0: 2 + x}) for i, x in enumerate(increases)], BASE)
    low, high = figure.axes[0].get_ylim()
    axis = IncreaseAxis(increases)
    assert 0 < low < axis.floor < high
    assert all(low < axis.at(x) < high for x in increases if np.isfinite(x))
    assert [axis.is_none(x) for x in increases] == [x < 1e-4 for x in increases]


def test_a_picture_takes_the_colours_of_its_page() -> None:
    drawn = drawing.svg(search.front_figure([trial("gqa", 0, {0: 7.0})], BASE), "what it shows")
    assert 'role="img" aria-label="what it shows"' in drawn
    assert "var(--series-0)" in drawn and "var(--ink)" in drawn
    assert not [light for light, _ in drawing.THEME.values() if light.lower() in drawn.lower()]
