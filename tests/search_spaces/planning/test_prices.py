"""Prices of groups that are stored with the calibration: read back bit for bit, and computed once."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from search_spaces.costs import GroupCost
from search_spaces.grouping.subsets import exact_partition
from search_spaces.planning.planner import PlanningContext, make_plan
from search_spaces.planning.prices import StoredPrices, prices_of_site
from search_spaces.recipes.catalogue import recipe
from search_spaces.site import Site

FREE = {"together": False, "grouping.equal_sizes": False}


def plan_json(context: PlanningContext, ratio: float, seed: int = 0, **changes: Any) -> str:
    return make_plan(recipe("least_squares", **changes), ratio, context, np.random.default_rng(seed)).to_json()


def site_of(context: PlanningContext, layer: int = 0, side: str = "value") -> Site:
    return Site(layer, (side,), (side,), context.units, context.heads[layer], context.geometry)


@pytest.mark.parametrize("changes", [{}, FREE], ids=["equal", "free"])
def test_the_next_plan_prices_nothing_and_is_the_same(changes: dict[str, Any], make_context, tmp_path: Path) -> None:
    context = make_context("llama", num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    alone = {ratio: plan_json(context, ratio, **changes) for ratio in (0.5, 0.25)}
    stored = replace(context, cache_dir=tmp_path)
    assert plan_json(stored, 0.5, **changes) == alone[0.5]
    priced = contents(tmp_path)
    assert plan_json(stored, 0.5, seed=1, **changes) == alone[0.5]
    assert contents(tmp_path) == priced
    assert plan_json(stored, 0.25, **changes) == alone[0.25]  # larger groups, of which none is known yet
    assert all(content != priced[name] for name, content in contents(tmp_path).items())
    for file in tmp_path.glob("prices-*.safetensors"):
        save_file({size: np.roll(prices, 1) for size, prices in load_file(file).items()}, file)
    assert plan_json(stored, 0.25, **changes) != alone[0.25]  # the stored prices are used


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("prices-*.safetensors")}


def test_a_damaged_file_is_made_anew(make_context, tmp_path: Path) -> None:
    context = replace(make_context("llama"), cache_dir=tmp_path)
    plan = plan_json(context, 0.5, **FREE)
    files = sorted(tmp_path.glob("prices-*.safetensors"))
    assert len(files) == 2 * context.geometry.num_layers
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: len(whole) // 2])
    assert plan_json(context, 0.5, **FREE) == plan
    assert files[0].read_bytes() == whole


def test_prices_that_are_no_prices_are_not_used(tmp_path: Path) -> None:
    cost = GroupCost(lambda members: float(sum(members)))
    cost.stored_prices = StoredPrices(tmp_path / "prices.safetensors")
    cost.stored_prices.add({2: np.array([1.0, np.nan, 1.0]), 3: np.ones(7), 1: np.ones(3)})
    table = cost.table(3)
    assert table[[0b011, 0b101, 0b110, 0b111]].tolist() == [1, 2, 3, 3]
    assert table[[1, 2, 4]].tolist() == [1, 1, 1]  # what is sound is believed
    assert {size: prices.tolist() for size, prices in cost.stored_prices.read().items()} == {
        1: [1] * 3,
        2: [1, 2, 3],
        3: [3],
    }


def test_a_file_is_for_one_model_objective_and_site(make_context, tmp_path: Path) -> None:
    context = make_context("llama")
    usual: dict[str, Any] = {"folder": tmp_path, "objective": "o", "knobs": {}, "site": site_of(context), "digest": "d"}
    others = [
        {"objective": "p"},
        {"knobs": {"a": 1}},
        {"site": site_of(context, layer=1)},
        {"site": site_of(context, side="key")},
        {"site": replace(site_of(context), units=((0, 1), (2, 3)))},
        {"site": replace(site_of(context), similarity=np.eye(4))},
        {"site": replace(site_of(context), fusion_distance=np.eye(4))},
        {"digest": "e"},
    ]
    names = [prices_of_site(**usual | other).file.name for other in ({}, *others)]
    assert len(set(names)) == len(names)
    assert prices_of_site(**usual).file.name == names[0]


def add_sizes(file: Path, sizes: list[int]) -> None:
    for size in sizes:
        StoredPrices(file).add({size: np.full(3, float(size))})


def test_several_processes_add_to_a_file_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "new" / "prices.safetensors"
    fork = get_context("fork")
    processes = [fork.Process(target=add_sizes, args=(file, list(range(n, 60, 3)))) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
        assert process.exitcode == 0
    assert StoredPrices(file).read().keys() == set(range(60))
    assert {path.name for path in file.parent.iterdir()} == {file.name, ".lock"}


def test_cheap_costs_leave_no_files(make_context, tmp_path: Path) -> None:
    context = replace(make_context("llama"), cache_dir=tmp_path)
    make_plan(recipe("least_squares", objective="pairs", similarity="weight"), 0.5, context, np.random.default_rng(0))
    assert not list(tmp_path.glob("prices-*"))
    assert exact_partition(np.ones((4, 4)), 4)[2].score == -2.0
