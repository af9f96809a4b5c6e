"""Measure how far DHA's mixes of heads diverge under the language-model loss alone.

The search phase (sec. 4.3 and App. B.2) groups heads by these distances. The paper begins every
fusion process, of 2x, 4x and 8x, with such steps and groups anew. **Decided here:** the final
groups are those of the search phase, since the plan of a trial is known before it is trained; what
is grouped anew at every stage is which of their heads fuse first. The model of these steps is
thrown away, and fusing starts from the checkpoint again; whether it should is **silent** in the
paper, as is the search phase's learning rate.

Legend: L layers, H query heads, S heads that a model stores in a layer, p of them in one final
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from attention.base.progress import stage
from attention.conversion.relaxation_knobs import rate_of
from attention.io.precision import DTYPES, cast_weights
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan
from trainers.engine import TrainEngine
from trainers.loop import LossFunction, train_model
from trainers.losses import objective
from trainers.relaxations.base import (
    RELAXATION_TRAINING,
    HeadGroups,
    coarser_groups,
    is_coarser,
    lifted,
)
from trainers.relaxations.lagrangian import Lagrangian
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream
from trainers.text.token_sets import TokenSequences

_STEPS = 240


def search_distances(
    model: PreTrainedModel,
    sequences: Tensor | TokenSequences,
    settings: TrainSettings,
    *,
    steps: int = _STEPS,
    rate: float = 1e-2,
    seed: int = 0,
    loss_fn: LossFunction | None = None,
) -> dict[str, Tensor]:
    """L_head of Eq. 7 between all heads of each layer with one group of all heads.

    "key" and "value" `[L, H, H]`, symmetric, zero on the diagonal; the smaller, the easier to fuse.

    Trains all weights of a copy of `model`, lifted, with every head free to mix all heads of its
    layer. `sequences [N, T]`: training text; `rate`: of the coefficients; `loss_fn`: language
    modelling by default. With a process group all workers call together.

    Raises:
        ValueError: For a model with one head a layer.
    """
    settings = settings.model_copy(update={"tuning": "full"})
    plan = plan_of(model)
    single = LayerPlan((0,) * plan.num_heads, (0,) * plan.num_heads)
    goal = replace(plan.unshared, layers=(single,) * plan.num_layers)

    def stream() -> BatchStream:
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        return BatchStream(
            sequences, settings.batch_size, rank=rank, world_size=world_size, seed=seed
        )

    copy = lifted(model)
    cast_weights(copy, DTYPES[settings.dtype])
    distances = _distances(
        _lagrangian(copy, goal, steps, rate=rate),
        settings,
        steps,
        stream,
        loss_fn or objective(),
    )
    return {
        side: torch.stack([d for d in layers if d is not None])
        for side, layers in distances.items()
    }


def _lagrangian(
    model: PreTrainedModel, goal: AttentionPlan, steps: int, **knobs: Any
) -> Lagrangian:
    part = RELAXATION_TRAINING.get("lagrangian")
    return part(model, goal, steps=steps, **part.settings(knobs))


def _distances(
    relaxation: Lagrangian,
    settings: TrainSettings,
    steps: int,
    stream: Callable[[], BatchStream],
    loss_fn: LossFunction,
) -> dict[str, list[Tensor | None]]:
    """Return the distances of "key" and "value" in every layer after some steps.

    `stream` is called when there is a process group.
    """
    with closing(
        TrainEngine(relaxation.model, settings, steps, relaxation.parameter_groups())
    ) as engine:
        with stage("training", steps, "steps") as progress, torch.random.fork_rng():
            train_model(
                engine,
                stream(),
                steps=steps,
                loss_fn=loss_fn,
                on_step=lambda step, _: progress.to(step),
            )
        return {name: relaxation.distances(side) for name, side in (("key", "k"), ("value", "v"))}


# ---- which heads of a group are fused first ---------------------------------------------------


def next_stage(
    model: PreTrainedModel,
    spec: RelaxationSpec,
    settings: TrainSettings,
    stream: BatchStream,
    loss_fn: LossFunction,
) -> AttentionPlan:
    """Return the plan of a stage before the last.

    The stored heads of every final group in pairs of least distance, after `spec.regroup_steps`
    steps of a copy of `model` on `stream` with `loss_fn`. With a process group all workers call
    together.
    """
    goal = AttentionPlan.from_json(spec.plans[-1])
    if not is_coarser(plan_of(model), goal):
        model = lifted(model)
    steps = spec.regroup_steps
    knobs = spec.knobs
    # Of the fusion that these steps come before.
    rate = rate_of("lagrangian", knobs["rate"], spec.steps)
    relaxation = _lagrangian(model, goal, steps, rate=rate, per_dimension=knobs["per_dimension"])
    distances = _distances(relaxation, settings, steps, lambda: stream, loss_fn)
    return paired_plan(plan_of(model), goal, distances["key"], distances["value"])


def paired_plan(
    now: AttentionPlan,
    goal: AttentionPlan,
    keys: Sequence[Tensor | None],
    values: Sequence[Tensor | None],
) -> AttentionPlan:
    """Return the plan `now` with the stored heads of every group of `goal` in pairs.

    `keys`, `values`: a layer's distances `[S, S]`, of which those within groups of `goal` are read;
    None where nothing is to be fused.
    """
    layers = []
    for index, (layer, final) in enumerate(zip(now.layers, goal.layers, strict=True)):
        sides: list[list[tuple[int, ...]]] = []
        for name, distance in (("key", keys[index]), ("value", values[index])):
            before = getattr(layer, f"{name}_map")
            after = getattr(final, f"{name}_map")
            groups = coarser_groups(before, after, f"layer {index}, {name}_map")
            pieces = [piece for group in groups for piece in _within(distance, group)]
            heads = getattr(layer, f"{name}_groups")
            sides.append([tuple(h for stored in piece for h in heads[stored]) for piece in pieces])
        layers.append(LayerPlan.from_groups(sides[0], sides[1], now.num_heads))
    return replace(goal, layers=tuple(layers))


def _within(distance: Tensor | None, group: Sequence[int]) -> HeadGroups:
    """Return the stored heads of one final group in pairs."""
    if distance is None or len(group) < 3:  # only one result is possible
        return (tuple(group),)
    inside = distance[list(group)][:, list(group)].tolist()
    return tuple(tuple(group[i] for i in pair) for pair in pairs(inside))


def pairs(distance: Sequence[Sequence[float]]) -> HeadGroups:
    """Heads 0 .. p-1 in pairs of small total distance, one head left alone where p is odd.

    The closest first, then two pairs at a time exchange a member while that lowers the total: exact
    for four heads.
    """
    count = len(distance)
    open_heads = set(range(count))
    paired = []
    for i, j in sorted(combinations(range(count), 2), key=lambda p: (distance[p[0]][p[1]], p)):
        if {i, j} <= open_heads:
            open_heads -= {i, j}
            paired.append((i, j))
    paired += [(i,) for i in open_heads]

    def total(some: HeadGroups) -> float:
        return sum(distance[pair[0]][pair[1]] for pair in some if len(pair) == 2)

    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(paired)), 2):
            (first, *rest) = paired[a]
            other = paired[b]
            for turned in (other, other[::-1]):
                # The first head of a with one of b, then the remaining heads of both together
                new = tuple(sorted((first, turned[0]))), tuple(sorted((*rest, *turned[1:])))
                if new[1] and total(new) < total((paired[a], paired[b])) - 1e-12:
                    paired[a], paired[b] = new
                    improved = True
                    break
    return tuple(sorted(paired))
