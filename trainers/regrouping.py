"""Which heads of a group DHA fuses first, measured anew before each stage of 2x, 4x, 8x (paper 000, App. B.2).

The paper begins every fusion process with steps under the language-model loss alone, and groups by the distances of the
mixes that these lead to. **Decided here:** the final groups are those of the search phase, since the plan of a trial is
known before it is trained; what is grouped anew at every stage is which of their heads fuse first. The model of these
steps is thrown away, as that of the search phase is.

Legend: S heads that a model stores in a layer, p of them in one final group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations

from torch import Tensor
from transformers import PreTrainedModel

from attention.modeling.modeling import plan_of
from attention.plan import AttentionPlan, LayerPlan
from trainers.engine import Engine
from trainers.loop import train
from trainers.losses import objective
from trainers.relaxations.base import Groups, coarser_groups, is_coarser, lifted
from trainers.relaxations.lagrangian import install
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.stream import BatchStream


def next_stage(
    model: PreTrainedModel, spec: RelaxationSpec, stage: int, settings: TrainSettings, stream: BatchStream
) -> AttentionPlan:
    """The plan of a stage before the last: the stored heads of every final group in pairs of least distance.

    Trains a copy of `model` for `spec.regroup_steps` steps on `stream`, each head free to mix with all of its final
    group. With a process group all workers call together.
    """
    goal = AttentionPlan.from_json(spec.plans[-1])
    if not is_coarser(plan_of(model), goal):
        model = lifted(model)
    steps = spec.regroup_steps
    relaxation = install(model, goal, steps=steps, **spec.knobs)  # of these, rate and per_dimension matter here
    with closing(Engine(relaxation.model, settings, steps, relaxation.parameter_groups())) as engine:
        train(engine, stream, steps=steps, loss_fn=objective())
        distances = {side: relaxation.distances(side) for side in ("k", "v")}
    return paired_plan(plan_of(model), goal, distances["k"], distances["v"])


def paired_plan(
    now: AttentionPlan, goal: AttentionPlan, keys: Sequence[Tensor | None], values: Sequence[Tensor | None]
) -> AttentionPlan:
    """`now` with the stored heads of every group of `goal` in pairs. `keys`, `values`: a layer's distances `[S, S]`, of
    which those within groups of `goal` are read; None where nothing is to be fused."""
    layers = []
    for index, (own, final) in enumerate(zip(now.layers, goal.layers, strict=True)):
        sides: list[list[tuple[int, ...]]] = []
        for name, found in (("key", keys[index]), ("value", values[index])):
            before, after = getattr(own, f"{name}_map"), getattr(final, f"{name}_map")
            groups = coarser_groups(before, after, f"layer {index}, {name}_map")
            pieces = [piece for group in groups for piece in _within(found, group)]
            heads = getattr(own, f"{name}_groups")
            sides.append([tuple(h for stored in piece for h in heads[stored]) for piece in pieces])
        layers.append(LayerPlan.from_groups(sides[0], sides[1], now.num_heads))
    return replace(goal, layers=tuple(layers))


def _within(distance: Tensor | None, group: Sequence[int]) -> Groups:
    """The stored heads of one final group in pairs."""
    if distance is None or len(group) < 3:  # nothing to fuse, or nothing to choose
        return (tuple(group),)
    own = distance[list(group)][:, list(group)].tolist()
    return tuple(tuple(group[i] for i in pair) for pair in pairs(own))


def pairs(distance: Sequence[Sequence[float]]) -> Groups:
    """Heads 0 .. p-1 in pairs of small total distance, one head left alone where p is odd.

    The closest first, then two pairs at a time exchange a member while that lowers the total: exact for four heads.
    """
    count = len(distance)
    open_heads, found = set(range(count)), []
    for i, j in sorted(combinations(range(count), 2), key=lambda p: (distance[p[0]][p[1]], p)):
        if {i, j} <= open_heads:
            open_heads -= {i, j}
            found.append((i, j))
    found += [(i,) for i in open_heads]

    def total(some: Groups) -> float:
        return sum(distance[pair[0]][pair[1]] for pair in some if len(pair) == 2)

    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(found)), 2):
            (first, *rest), other = found[a], found[b]
            for turned in (other, other[::-1]):
                # The first head of a with one of b, what is left of both together
                new = tuple(sorted((first, turned[0]))), tuple(sorted((*rest, *turned[1:])))
                if new[1] and total(new) < total((found[a], found[b])) - 1e-12:
                    found[a], found[b] = new
                    improved = True
                    break
    return tuple(sorted(found))
