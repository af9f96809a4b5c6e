"""One iteration of the walk on the cheap score against one on the loss of the whole model (AsymGQA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import lift
from attention.families import geometry_of
from benchmarks.models import DEMO, llama, random_model, tokens
from benchmarks.report import Row, Scale, benchmark, medians
from search_spaces.grouping.steps import Walk
from search_spaces.planning.context import PlanningContext
from search_spaces.recipes.catalogue import AXES, recipe
from search_spaces.site import Site, plan_of_sites


@benchmark("walk", devices=("cpu",))
def walk(scale: Scale) -> Iterator[Row]:
    """A walk's iteration: layer-output score against full-model score, at growing depth."""
    for layers in scale.pick((1,), (4, 8, 16)):
        model = random_model(llama(layers, DEMO))
        sequences = tokens(*scale.pick((2, 16), (8, 256)))
        statistics = calibrate(model, sequences, sample_tokens=sequences.numel())
        geometry = geometry_of(model.config)
        context = PlanningContext(geometry, lift(model), statistics, model, sequences)
        site = _site(context, layers // 2)
        works = {name: _iterations(site, name) for name in ("layer", "model")}
        works["prepare"] = lambda site=site: AXES["objective"].get("layer")(site)
        times = medians(works, scale.pick(1, 3), repeat={"layer": scale.pick(2, 10)})
        note = f"{sequences.numel()} tokens for both; keys of 8 heads into 4 groups; the first 40 iterations"
        yield Row(f"iteration, {layers} layers", 1e3 * times["layer"], 1e3 * times["model"], "ms", note)
        note = "once for all iterations at a site; its rival is one evaluation of the model"
        yield Row(f"preparing the score, {layers} layers", 1e3 * times["prepare"], 1e3 * times["model"], "ms", note)


def _site(context: PlanningContext, layer: int) -> Site:
    """The keys of one layer, with a random similarity to guide the walk."""
    heads = context.geometry.num_heads
    vectors = np.random.default_rng(0).normal(size=(heads, heads))
    site = Site(
        layer, ("key",), ("key",), context.units, context.heads[layer], context.geometry, similarity=vectors + vectors.T
    )
    return replace(
        site,
        statistics=context.calibration.layers[layer] if context.calibration else None,
        model=context.model,
        plan_with=lambda partition: plan_of_sites({(layer, "key"): partition}, context.geometry),
        measure=partial(context.loss_of, recipe("asymgqa")),
    )


def _iterations(site: Site, objective: str) -> Callable[[], object]:
    """A function that takes one walk one iteration further: propose, score, decide."""
    score = AXES["objective"].get(objective)(site).score
    count = len(site.units)
    going = Walk(count, count // 2, np.random.default_rng(1))
    similarity = site.need_similarity("the walk")
    return lambda: going.tell(score(going.propose_next(similarity)))
