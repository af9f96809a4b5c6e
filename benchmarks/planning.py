"""Planning one wide layer: grouping its value heads by estimates of the cost, against the cost itself; and its keys.

    python -m benchmarks planning [--quick | --wide]
    python -m benchmarks fit-decay [--quick]

32 heads of 32 by default. With --wide 32 heads of 128, in groups of any size only: the rival alone takes 2.1 GB and
minutes to most of an hour.

Moments and heads are made, not measured: spectra that fall as a power, moments of heads that differ in scale and in
directions, value heads in families of uneven size that share a part of what they read. Keys and queries are the same
heads again, which is enough to time them.

`fit-decay` is about quality: what planning's short fits of a layer say of the longer ones that refinement makes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.stats import gmean
from torch import Tensor
from transformers import LlamaConfig

from attention.calibration.moments import LayerStatistics, packed, unpacked
from attention.conversion.fusion.costs import Cost, KeyCost, ValueCost
from attention.conversion.fusion.estimates import LEADING, LeadingValueCost, PooledValueCost
from attention.families import geometry_of
from attention.heads import LayerHeads
from benchmarks.report import Row, Scale, benchmark
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.tasks.convert import Convert
from search_spaces.costs import GroupCost
from search_spaces.grouping.estimated import by_estimates
from search_spaces.grouping.merge_anneal import merge_anneal
from search_spaces.grouping.problem import Grouping, GroupingProblem
from search_spaces.planning.context import PlanningContext
from search_spaces.planning.loss_increases import FIT_DECAY
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import recipe

Result = TypeVar("Result")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FAMILIES, SHARED, TOPICS = 8, 0.7, 256
SHARE = 3 / 16  # of all outputs are the leading combinations at 32 heads of 128, and so at the other shapes


@benchmark("planning", devices=("cpu",))
def planning(scale: Scale) -> Iterator[Row]:
    """Grouping the heads of a wide layer by estimates of the cost, against the cost itself."""
    heads, dim = scale.pick((12, 4), (32, 128) if scale.wide else (32, 32))
    layer, statistics = made_layer(heads, dim)
    once = "prepared and searched, one core, once each"
    keys = timed(lambda: of_keys(layer, statistics))[1]
    yield Row(f"{heads} key heads of {dim} into {heads // 4} groups", keys, None, "s", once)
    whole = group_cost(ValueCost(layer, statistics))
    prepared = None
    for equal_sizes in (False,) if scale.wide else (False, True):
        kind = f"{heads} value heads of {dim} into {heads // 4} groups{' of one size' if equal_sizes else ''}"
        quick, seconds = timed(lambda equal_sizes=equal_sizes: by_ladder(layer, statistics, equal_sizes))
        if not equal_sizes:
            note = "keys and values apart, groups of any size, one core"
            yield Row(f"a layer of {heads} heads of {dim}", keys + seconds, None, "s", note)
        if prepared is None:
            prepared = timed(lambda: whole.cost((0, 1)))[1]
        problem = GroupingProblem(heads, heads // 4, objective=whole.afresh())
        slow, long = timed(
            lambda problem=problem, equal_sizes=equal_sizes: merge_anneal(
                problem, np.random.default_rng(0), equal_sizes=equal_sizes
            )
        )
        yield Row(kind, seconds, prepared + long, "s", once)
        ours, rival = (-whole.score(grouping.partition) for grouping in (quick, slow))
        yield Row(f"{kind}: exact cost", ours, rival, "squared error", "1 or more: no worse")


def of_keys(layer: LayerHeads, statistics: LayerStatistics) -> Grouping:
    """Groups of any size of keys that are rotated as Llama's."""
    heads, dim, width = layer.k.shape
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim,
    }
    cost = group_cost(KeyCost(layer, statistics, geometry_of(LlamaConfig(**sizes))))
    problem = GroupingProblem(heads, heads // 4, objective=cost)
    return merge_anneal(problem, np.random.default_rng(0), equal_sizes=False)


def by_ladder(layer: LayerHeads, statistics: LayerStatistics, equal_sizes: bool) -> Grouping:
    """Group as the objective `least_squares` does for wide layers, with the same share of leading combinations."""
    heads, _, width = layer.v.shape
    pooled = PooledValueCost(layer, statistics)
    leading = LeadingValueCost(pooled, statistics, min(LEADING, int(SHARE * width)))
    rungs = [group_cost(each) for each in (pooled, leading)]
    cost = GroupCost(rungs[-1].cost, estimates=[lambda rung=rung: rung for rung in rungs])
    problem = GroupingProblem(heads, heads // 4, objective=cost)
    return by_estimates(problem, np.random.default_rng(0), equal_sizes=equal_sizes)


def group_cost(cost: Cost) -> GroupCost:
    return GroupCost(cost.cost, lambda groups: cost.costs(groups).numpy())


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Processor time: what other processes do hardly changes it."""
    started = time.process_time()
    return work(), time.process_time() - started


def made_layer(heads: int, dim: int, seed: int = 0) -> tuple[LayerHeads, LayerStatistics]:
    """Return one layer of `heads` heads of `dim`, as wide as both make it; keys and queries are its values again."""
    draw = torch.Generator().manual_seed(seed)
    width = heads * dim
    place = torch.arange(width)
    spectrum = (1.0 / (place + 8)).sqrt()  # of the inputs
    scale = (1.0 / (1 + place[:dim])).sqrt()[:, None]  # of a head's outputs
    bases = torch.randn(FAMILIES, dim, width, generator=draw)
    family = (torch.rand(heads, generator=draw).square() * FAMILIES).long()
    rows = SHARED**0.5 * bases[family] + (1 - SHARED) ** 0.5 * torch.randn(heads, dim, width, generator=draw)
    mixed = torch.linalg.qr(torch.randn(heads, dim, dim, generator=draw))[0]
    v = mixed @ (scale * rows) / width**0.5
    o = torch.randn(heads, width, dim, generator=draw) / width**0.5
    moments = packed_moments(spectrum, heads, draw)
    statistics = LayerStatistics(1, torch.zeros(width + 1, 1), moments, torch.zeros(heads, 1, 1), torch.zeros(0))
    statistics = replace(statistics, input_moment=unpacked(statistics.pooled_moment()).double())
    return LayerHeads(v, v, v, o), statistics


def packed_moments(spectrum: Tensor, heads: int, draw: torch.Generator) -> Tensor:
    """`[H, e (e + 1) / 2]`: every head passes some inputs better than others, and sees some topics more."""
    width, topics = len(spectrum), min(TOPICS, len(spectrum) // 4)
    factors = spectrum[:, None] * torch.randn(width, topics, generator=draw)
    damped, mean = torch.rand(width, generator=draw), 0.2 * spectrum * torch.randn(width, generator=draw)
    moments = torch.empty(heads, (width + 1) * (width + 2) // 2)
    for moment in moments:
        passed = spectrum.square() * torch.exp(-3 * torch.rand((), generator=draw) * damped)
        weights = torch.randn(topics, generator=draw).exp() / topics
        square = torch.zeros(width + 1, width + 1)
        square[:-1, :-1] = passed.diag() + (factors * weights) @ factors.T + torch.outer(mean, mean)
        square[-1, :-1] = square[:-1, -1] = mean
        square[-1, -1] = 1.0
        moment.copy_(packed(square[None])[0])
    return moments


@benchmark("fit-decay", devices=())  # by its name alone: minutes of fits
def fit_decay(scale: Scale) -> Iterator[Row]:
    """Loss increases foreseen from short local fits, against those after refinement's own number of steps."""
    whole = scale.pick(8, 480)
    sizes: dict[str, Any] = {
        "calibration_data": "stdlib",
        "calibration_tokens": scale.pick(1024, 16_384),
        "eval_tokens": 1024,
        "sequence_length": 256,
    }
    for name in scale.pick(["prose-code-qwen3"], ["stdlib-llama", "prose-code-qwen3"]):
        with tempfile.TemporaryDirectory() as cache:
            where: dict[str, Any] = {"model": EXAMPLES / name, "cache_dir": cache, "device": "cpu"}
            store = MemoryStore(Convert(ConvertOptions(recipe="headfold", kv_ratio=0.5, **where, **sizes)).request)
            increases = estimated_increases(store.context, whole, whole)
            for steps in scale.pick([4], [60, 120, 240]):
                foreseen = estimated_increases(store.context, steps, whole)
                powers = FIT_DECAY + np.log(foreseen / increases) / np.log(whole / steps)
                note = f"power {np.median(powers):.2f} ({powers.min():.2f} to {powers.max():.2f})"
                row = f"{name}: {whole} steps from {steps}"
                yield Row(row, float(gmean(foreseen)), float(gmean(increases)), "nats", note)


def estimated_increases(context: PlanningContext, fit_steps: int, refined_steps: int) -> np.ndarray:
    """Loss increase in nats per token of each layer with fewer key heads alone, by layer and number of heads: estimated
    after `fit_steps` of local fit, for a refinement of `refined_steps`."""
    chosen = recipe("headfold", **{"allocation.fit_steps": fit_steps, "refinement.fit_steps": refined_steps})
    context.curves.clear()
    make_plan(chosen, 0.5, context, np.random.default_rng(0))
    (points,) = context.curves.values()
    return np.array([points[place].increase for place in sorted(points) if "/key/" in place])
