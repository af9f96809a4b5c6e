"""Measuring increases of the loss on the workers of a cluster: a Ray task a layer, before the trials that rest on them.

A layer's points need nothing of another layer, so the tasks are as many as layers. Each writes its points into the file
that trials read (`search_spaces.planning.curves`); what is there already is not measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from orchestrator.conversion.steps import planning_context
from orchestrator.search.candidates import Candidate
from orchestrator.search.trial import TrialContext, shared_parts
from search_spaces.planning.curves import DECIDES
from search_spaces.planning.planning import measure_curves
from search_spaces.recipes.recipes import AXES

SEVERAL = 4
"""Workers from which on their start is worth it."""


CurveTask = tuple[Candidate, int]
"""A candidate, and the layer of which the loss increases are measured that its plan rests on."""


def curve_tasks(candidates: Iterable[Candidate], layers: int) -> list[CurveTask]:
    """A task a layer for each set of curves that the candidates need, candidates that share one taken once.

    Curves do not depend on the KV ratio, but on the seed and on how heads are grouped and fused.
    """
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        recipe = candidate.recipe
        if candidate.plan is not None or "measure" not in AXES["allocation"].get(recipe.allocation).needs:
            continue
        axes = (*DECIDES, "allocation", "refinement")  # what no refinement fits is measured without a fit
        choices = tuple((axis, getattr(recipe, axis), tuple(recipe.knobs(axis).items())) for axis in axes)
        first.setdefault((choices, recipe.together, recipe.by, candidate.seed), candidate)
    return [(candidate, layer) for candidate in first.values() for layer in range(layers)]


def measure_layer(task: CurveTask, context: TrialContext) -> int:
    """Measure in this process; returns the number of points of the layer."""
    (candidate, layer), (model, calibration, tokens, *_) = task, shared_parts(*context.shared)
    planning = planning_context(model, calibration, tokens, context.calibration_cache)
    generator = np.random.default_rng(candidate.seed)
    return measure_curves(candidate.recipe, candidate.kv_ratio, planning, generator, [layer])


def measure_on_workers(tasks: Sequence[CurveTask], context: TrialContext, cpus: float, gpus: float) -> None:
    """Run the tasks as Ray tasks, as many at a time as the cluster has room for, and tell how far they are.

    A layer that cannot be measured is left to the trials, which say why.
    """
    if not tasks:
        return
    print(f"increases of the loss: {len(tasks)} layers to measure", flush=True)
    remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=1)(_measured)
    waiting = [remote.remote(task, context, max(1, int(cpus))) for task in tasks]
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        try:
            ray.get(done)
        except RayError as error:
            print(f"increases of the loss: {str(error).strip().splitlines()[-1]}", flush=True)
        print(f"increases of the loss: {len(tasks) - len(waiting)} of {len(tasks)} layers done", flush=True)


def _measured(task: CurveTask, context: TrialContext, threads: int) -> int:
    torch.set_num_threads(threads)
    return measure_layer(task, context)
