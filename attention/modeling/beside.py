"""A second model that shares unchanged weights with an existing one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from attention.families import family_of
from attention.modeling.grouped import attach
from attention.modeling.model_classes import plan_of


def beside_original(model: PreTrainedModel, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that `make` builds, on `model`'s device.

    Outside of attention, parameters that `model` has under the same name and in the same shape
    share its memory; all others have new memory, which is not filled.

    Neither model may be trained while the other is of use.
    """
    with no_init_weights(), init_empty_weights(include_buffers=False):
        new = make()
    modules = list(family_of(new.config).attention_modules(new))
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    theirs = dict(model.named_parameters(remove_duplicate=False))
    for name, outline in list(new.named_parameters(remove_duplicate=False)):
        original = theirs.get(name)
        if original is None or id(outline) in inside or original.shape != outline.shape:
            data = torch.empty_like(outline, device=model.device)
        else:
            data = original.detach()
        path, _, last = name.rpartition(".")
        setattr(new.get_submodule(path), last, nn.Parameter(data))
    new.tie_weights()  # until then each pair of tied matrices is separate
    for module, layer in zip(modules, plan_of(new).layers, strict=True):
        if hasattr(module, "head_maps"):
            attach(module, layer)  # the maps again: they were on the device of the projections
    nn.Module.to(new, model.device)
    return new


def copy_common(source: nn.Module, target: nn.Module, *, but: tuple[str, ...] = ()) -> None:
    """Copy into `target` what `source` has under the same name and in the same shape.

    Args:
        but: Endings of names that are left as they are.
    """
    theirs = target.state_dict()
    common = {
        name: tensor
        for name, tensor in source.state_dict().items()
        if name in theirs and tensor.shape == theirs[name].shape and not name.endswith(but)
    }
    target.load_state_dict(common, strict=False)
