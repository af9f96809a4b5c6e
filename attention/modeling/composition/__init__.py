"""The composition of heads (`attention.modeling.composition.composing`) in a model.

Its modules found, initialised, and given what they need within attention.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from attention.modeling.composition.composed_cache import composed_layer
from attention.modeling.composition.composing import (
    Compose,
    DynamicWeights,
    HeadComposition,
    QueryKeyNorm,
)
from attention.modeling.growing_cache import cache_in

OWNERS = (DynamicWeights, Compose, QueryKeyNorm)
"""The modules that own parameters of a composition, each with a `reset` for these."""


def compositions(model: nn.Module) -> list[HeadComposition]:
    """Return the composition of every layer of a model, in order; empty without."""
    return [module for module in model.modules() if isinstance(module, HeadComposition)]


def reset(model: nn.Module, *, identity: bool, generator: torch.Generator | None = None) -> None:
    """Initialise the composition parameters of every layer.

    Args:
        model: The model.
        identity: Whether composition starts as an exact identity, for retrofits, and not as in the
            paper.
        generator: For the random numbers.
    """

    def afresh(module: nn.Module) -> None:
        if isinstance(module, OWNERS):
            module.reset(identity=identity, generator=generator)

    model.apply(afresh)


def reset_missing(model: nn.Module) -> None:
    """Initialise, as in the paper, composition that transformers did not find in a checkpoint.

    It would stay uninitialised memory.
    """
    for module in (part for composition in compositions(model) for part in composition.modules()):
        parameters = list(module.parameters(recurse=False))
        if isinstance(module, OWNERS) and not all(
            getattr(p, "_is_hf_initialized", False) for p in parameters
        ):
            module.reset()


# ---- in an attention module -------------------------------------------------------------------


def attach_composition(module: nn.Module, composition: HeadComposition) -> None:
    """Give an attention module its composition, and its attention function the module's input."""
    module.composition = composition
    module.register_forward_pre_hook(_pass_input, with_kwargs=True)


def _pass_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Pass the attention input and the cache layer on through keywords of the attention function.

    Nothing is stored on the module, so recomputing a layer (gradient checkpointing) runs as the
    first time did.
    """
    x = args[0] if args else kwargs["hidden_states"]
    cache = cache_in(kwargs)
    layer = None if cache is None else composed_layer(cache, cast(int, module.layer_idx))
    return args, {**kwargs, "composed_input": x, "composed_layer": layer}
