"""Which KV heads a plan may give a layer, and what the GPUs of a tensor-parallel engine refuse of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.tensor_parallel import fits_ranks
from search_spaces.planning.rank_counts import layer_counts, rank_refusal
from search_spaces.recipes.catalogue import recipe
from search_spaces.recipes.engine_form import EngineForm
from search_spaces.recipes.recipe import Recipe
from search_spaces.space.joint_space import JointSpace


@pytest.fixture(scope="module")
def geometry(demo_dir: Path) -> HeadGeometry:
    """Counts of the demo checkpoint: 8 KV heads in each of 4 layers."""
    return geometry_of(AutoConfig.from_pretrained(demo_dir))


def test_worked_examples(geometry: HeadGeometry) -> None:
    assert layer_counts(recipe("gqa"), 0.5, geometry) == (4,)
    assert layer_counts(recipe("gqa"), 0.4, geometry) == (3,), "the largest below the ratio"
    assert layer_counts(recipe("headfold_layers"), 0.5, geometry) == (1, 2, 4, 8)
    every = recipe("headfold_layers", settings={"allocation.counts": "all"})
    assert layer_counts(every, 0.5, geometry) == tuple(range(1, 9))
    wide: Recipe = recipe("least_squares", width=2)
    assert layer_counts(wide, 0.5, geometry) == (2,), "two heads of twice the width"


def test_what_gpus_cannot_divide_is_refused_with_what_they_can(geometry: HeadGeometry) -> None:
    assert rank_refusal(recipe("gqa"), 0.5, geometry, 8) is None
    assert rank_refusal(recipe("headfold_layers"), 0.5, geometry, 2) is None
    message = rank_refusal(recipe("gqa"), 0.4, geometry, 2) or ""
    assert "3 KV heads cannot be divided among 2 GPUs" in message and "2 or 4 KV heads can" in message
    every = recipe("headfold_layers", settings={"allocation.counts": "all"})
    message = rank_refusal(every, 0.5, geometry, 4) or ""
    assert "3, 5, 6, 7 KV heads" in message and "allocation.counts" in message


def test_a_space_draws_only_what_the_gpus_can_divide(demo_dir: Path, geometry: HeadGeometry) -> None:
    engine = EngineForm.of("vllm", AutoConfig.from_pretrained(demo_dir), geometry)
    ratios = (0.75, 0.5, 0.375, 0.25)

    def drawn(ranks: int) -> list[bool]:
        space = JointSpace(ratios, geometry, engine=replace(engine, ranks=ranks))
        generator = np.random.default_rng(0)
        points = [space.to_recipe(space.sample(generator)) for _ in range(40)]
        return [all(fits_ranks(n, 2) for n in layer_counts(*point, geometry)) for point in points]

    assert all(drawn(2))
    assert not all(drawn(1)), "without GPUs to divide among, other counts are drawn too"
