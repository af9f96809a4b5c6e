"""Agreement of the cheap score with the loss of the whole model: in ranks, and in the end of a walk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attention.base import progress
from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert, lift
from attention.families import geometry_of
from attention.modeling.losses import language_loss
from search_spaces.planning.agreement import Agreement, agreement, random_swaps
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.recipes.catalogue import recipe
from trainers.text.data import load_sequences


def test_swaps_are_one_exchange_from_neighbours() -> None:
    rng = np.random.default_rng(0)
    start = [{0, 1, 2, 3}, {4, 5, 6, 7}]
    result = random_swaps(8, 2, 100, rng)
    assert len(set(result)) == 16
    for partition in result:
        assert sorted(len(set(partition[0]) & group) for group in start) == [1, 3]
    assert len(random_swaps(8, 4, 100, rng)) == 12  # two ways for each of six pairs of pairs
    assert len(random_swaps(8, 2, 5, rng)) == 5


def test_ranks_agree_or_not() -> None:
    moves = tuple(((h,),) for h in range(4))
    assert Agreement(0, "key", moves, (-4.0, -3.0, -2.0, -1.0), (-8.0, -6.0, -5.0, -0.1)).spearman == pytest.approx(1)
    assert Agreement(0, "key", moves, (-4.0, -3.0, -2.0, -1.0), (1.0, 0.5, 0.4, 0.2)).spearman == pytest.approx(-1)
    assert Agreement(0, "key", moves, (-1.0,) * 4, (1.0, 0.5, 0.4, 0.2)).spearman is None


def test_every_site_is_measured_both_ways(
    demo_context, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the demo checkpoint the cheap ranks of keys follow the full ones; the moves are scored as anywhere else."""
    context = replace(demo_context, sequences=demo_context.sequences[:1], _trials={})
    monkeypatch.setattr(progress, "SAY_SECONDS", 0)
    with progress.show_progress("convert"):
        result = agreement(context, np.random.default_rng(0), moves=8, tokens=512)
    assert [(a.layer, a.side) for a in result] == [(layer, side) for layer in range(4) for side in ("key", "value")]
    output = capsys.readouterr().err.splitlines()
    steps = list(dict.fromkeys(line.split(",")[0] for line in output))  # a long step is reported repeatedly
    if steps[0].endswith(" 0 of 64 moves"):  # reported where the first move takes long, as on a busy machine
        del steps[0]
    assert steps == [f"scoring moves both ways: {n} of 64 moves" for n in range(1, 65)]
    keys = [a.spearman for a in result if a.side == "key"]
    assert np.mean(keys) > 0.3  # type: ignore[arg-type]
    pooled = recipe("gqa")
    from search_spaces.site import plan_of_sites

    first = result[0]
    plan = plan_of_sites({(0, "key"): first.moves[0]}, context.geometry)
    assert first.full[0] == pytest.approx(-context.increases_of(pooled, [(0, plan)], tokens=512)[0])
    assert first.to_dict()["moves"] == 8


def test_nothing_to_swap_is_reported(make_context) -> None:
    with pytest.raises(ValueError, match="leave nothing to swap"):
        agreement(make_context("llama", num_key_value_heads=2), np.random.default_rng(0))
    three = replace(
        make_context("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24), calibration=None
    )
    with pytest.raises(ValueError, match="calibrate"):  # of three heads two groups can be changed
        agreement(three, np.random.default_rng(0))
    with pytest.raises(ValueError, match="calibrate"):
        agreement(replace(make_context("llama"), calibration=None), np.random.default_rng(0))


@pytest.mark.extended
def test_a_thousand_cheap_iterations_beat_ten_of_the_papers(demo_model, demo_tokenizer) -> None:
    """The walk at 50 % KV from one seed: by the layer's output it may try a hundred times as often as by the loss of
    the whole model, and ends far lower on held-out tokens."""
    tokens = load_sequences("stdlib", demo_tokenizer, split="calibration", tokens=4096, sequence_length=256)
    held_out = load_sequences("stdlib", demo_tokenizer, split="eval", tokens=8192, sequence_length=256)
    calibration = calibrate(demo_model, tokens)
    geometry = geometry_of(demo_model.config)
    context = PlanningContext(geometry, lift(demo_model), calibration, demo_model, tokens[:4])
    walk = recipe("asymgqa")
    cheap = walk.with_changes(**{"grouping.iterations": 1000, "objective.tokens": 1024, "objective.length": 256})
    full = walk.with_changes(objective="model", **{"grouping.iterations": 10})
    loss = {}
    for name, chosen in (("cheap", cheap), ("full", full)):
        plan = make_plan(chosen, 0.5, context, np.random.default_rng(0))
        loss[name] = language_loss(convert(demo_model, plan), held_out)
    assert loss["cheap"] <= loss["full"] - 0.15, loss
