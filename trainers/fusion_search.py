"""DHA's search phase: how far apart the coefficients of any two heads come to lie under the language-model loss alone.

Paper 000 (Chen 2024), section 4.3 and App. B.2. Legend: L layers, H query heads.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from attention.modeling.modeling import plan_of
from attention.plan import LayerPlan
from trainers.engine import Engine
from trainers.loop import train
from trainers.losses import objective
from trainers.relaxations.axis import RELAXATION
from trainers.relaxations.base import lifted
from trainers.settings import TrainSettings
from trainers.text.stream import BatchStream

STEPS = 240


@dataclass(frozen=True)
class FusionDistances:
    """L_head of Eq. 7 between all heads of each layer with one group of all heads: `key`, `value` `[L, H, H]`,
    symmetric, zero on the diagonal; the smaller, the easier to fuse. Plain tensors, for grouping and allocation."""

    key: Tensor
    value: Tensor


def search_distances(
    model: PreTrainedModel,
    sequences: Tensor,
    settings: TrainSettings,
    *,
    steps: int = STEPS,
    rate: float = 1e-2,
    seed: int = 0,
) -> FusionDistances:
    """Train a copy of `model`, lifted, with every head free to mix all heads of its layer, and compare the mixes.

    `sequences [N, T]`: training text; `rate`: of the coefficients; All weights
    train, as while fusing; the copy is thrown away, and fusing starts from the checkpoint again. Whether it should is
    **silent** in the paper, as is the search phase's learning rate. With a process group all workers call together.
    Raises ValueError for a model with one head a layer.
    """
    settings = settings.model_copy(update={"tuning": "full"})
    plan = plan_of(model)
    single = LayerPlan((0,) * plan.num_heads, (0,) * plan.num_heads)
    goal = replace(plan.unshared, layers=(single,) * plan.num_layers)
    lagrangian = RELAXATION.get("lagrangian")
    relaxation = lagrangian(lifted(model), goal, steps=steps, **{**lagrangian.settings(), "rate": rate})
    with closing(Engine(relaxation.model, settings, steps, relaxation.parameter_groups())) as engine:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        stream = BatchStream(sequences, settings.batch_size, rank=rank, world_size=world_size, seed=seed)
        train(engine, stream, steps=steps, loss_fn=objective())
        found = {side: relaxation.distances(side) for side in ("k", "v")}
    key, value = (torch.stack([d for d in found[side] if d is not None]) for side in ("k", "v"))
    return FusionDistances(key, value)
