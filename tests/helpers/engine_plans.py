"""Plans of each kind that engines may support, for tiny models of two layers of four heads."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from attention.conversion.convert import convert
from attention.modeling.composition import reset
from attention.plan import AttentionPlan, Composition, LayerPlan


def together(*maps: tuple[int, ...]) -> tuple[LayerPlan, ...]:
    """Layers whose keys and values have one map."""
    return tuple(LayerPlan(one, one) for one in maps)


def plans(head_dim: int) -> dict[str, AttentionPlan]:
    apart = (LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)))
    kinds = {
        "uniform": together((0, 1, 1, 0), (0, 0, 1, 1)),
        "layers": together((0, 1, 1, 2), (0, 0, 0, 0)),
        "unequal": together((0, 0, 0, 1), (0, 1, 1, 1)),
        "apart": apart,
    }
    created = {name: AttentionPlan(layers, head_dim) for name, layers in kinds.items()}
    settings = Composition(rank=1, static_base=True, window=24)
    return created | {"composed": AttentionPlan(apart, head_dim, composition=settings)}


def converted(model: PreTrainedModel, plan: AttentionPlan) -> PreTrainedModel:
    """A model of the plan; composed heads are composed by random weights, as after a training."""
    created = convert(model, plan)
    reset(created, identity=False, generator=torch.Generator().manual_seed(0))
    return created
