"""Base classes of all relaxations.

Projections that hold the original heads, learned numbers, and the protocol.

A relaxation is a model that computes what the checkpoint computes, in which stand-ins take the
place of projections. A stand-in builds its weight anew in each forward pass from the original heads
and a few learned numbers. Training drives these to where fewer heads do the same; `collapse` takes
them.

Legend: L layers, S source heads that a projection holds, d head dim, D model dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.axes import Axis
from attention.conversion.convert import assemble, lift, read_layers, unshare
from attention.families import family_of, geometry_of
from attention.heads import LayerHeads, group_means
from attention.modeling.grouped import attach
from attention.modeling.model_classes import check_fits, plan_of
from attention.plan import AttentionPlan, LayerPlan, PlanError
from attention.plan_parts import groups_of
from trainers.loop import ParameterGroup

RELAXATION_TRAINING = Axis("relaxation", "trainers.relaxations")
HeadGroups = tuple[tuple[int, ...], ...]


class Learned(nn.Module):
    """One learned tensor, read by calling the module.

    ZeRO 3 gathers parameters around a call and nowhere else.
    """

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self) -> Tensor:
        return self.value.clone()


class HeadProjection(nn.Linear):
    """A linear projection that knows its heads: weight `[S·d, D]`, bias `[S·d]` or None.

    Subclasses mix them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        heads, self.head_dim, in_features = weight.shape
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        super().__init__(in_features, heads * self.head_dim, bias=bias is not None, **like)
        with torch.no_grad():
            self.weight.copy_(weight.flatten(0, 1))
            if bias is not None:
                self.bias.copy_(bias.flatten())

    def mixed(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight `[S, d, D]` and bias `[S, d]` that this pass computes with."""
        return self.source()

    def collapsed(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return one head per group, instead of the present heads, in float32.

        `weight` and `bias` are as `source` gives them.
        """
        raise NotImplementedError

    def source(self) -> tuple[Tensor, Tensor | None]:
        """Return the stored heads, `[S, d, D]` and `[S, d]`.

        Inside the module's own call only, as ZeRO 3 has it.
        """
        bias = None if self.bias is None else self.bias.unflatten(0, (-1, self.head_dim))
        return self.weight.unflatten(0, (-1, self.head_dim)), bias

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.mixed()
        return F.linear(input, weight.flatten(0, 1), None if bias is None else bias.flatten())


class Relaxation(nn.Module, ABC):
    """The protocol.

    Sits in the relaxed model as its child `relaxation`, so that what it learns is saved with it.

    `stop_early`: end the stage as soon as `finished` says so.

    Attributes:
        last_penalty: Of the last step, as it was added to the loss.

    Args:
        stand_ins: Of each layer, by side ("k" or "v"), those that belong to its attention module.
    """

    stop_early = False

    def __init__(
        self,
        model: PreTrainedModel,
        plan: AttentionPlan,
        stand_ins: Sequence[Mapping[str, HeadProjection]] = (),
    ) -> None:
        super().__init__()
        self.plan = plan
        # In a tuple of mappings, and the model in one: neither becomes a child.
        self.stand_ins = tuple(stand_ins)
        self._model = (model,)
        self.last_penalty: Tensor | float = 0.0
        self.train(model.training)
        model.relaxation = self  # type: ignore[assignment]

    @property
    def model(self) -> PreTrainedModel:
        """The relaxed model. At step 0 it computes what the original does."""
        return self._model[0]

    def begin(self, step: int) -> None:
        """Prepare the forward passes of step `step` (0 is the first). Called on every worker."""

    @abstractmethod
    def penalty(self, step: int) -> Tensor:
        """Return what is added to the loss of step `step`; a scalar.

        All workers call it together.
        """

    @abstractmethod
    def finished(self) -> bool:
        """Whether collapsing would now change as little as the method requires.

        The same on all workers.
        """

    @abstractmethod
    def remaining(self) -> float:
        """Return the share of the relaxation that remains.

        1 at step 0, at most `UNFINISHED` where it has finished. The change by collapsing grows with
        it. All workers call it together.
        """

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Numbers to follow while training. All workers call it together."""

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the parameters with separate rates; all others train at the model's."""

    @torch.no_grad()
    def collapse(self) -> list[LayerHeads]:
        """Return the heads of every layer, float32, in the order of the plan's groups.

        For whole weights: with ZeRO 3 load the gathered weights into a second relaxed model and
        collapse that.
        """
        layers = read_layers(self.model)
        old = plan_of(self.model)
        for index, sides in enumerate(self.stand_ins):
            for side, projection in sides.items():
                heads = layers[index]
                if side == "k":  # a norm's weights of each head's own have no stand-in: their mean
                    maps = old.layers[index].key_map, self.plan.layers[index].key_map
                    groups = coarser_groups(*maps, f"layer {index}, key_map")
                    heads = heads.changed(
                        ["k_norm"], lambda rows, groups=groups: group_means(rows, groups)
                    )
                rows, bias = projection.collapsed(
                    getattr(heads, side), getattr(heads, f"{side}_bias")
                )
                bias = None if bias is None else bias.float()
                layers[index] = replace(heads, **{side: rows.float(), f"{side}_bias": bias})
        return layers

    def collapsed_model(self) -> PreTrainedModel:
        """Return the plain converted model."""
        return assemble(self.model, self.plan, self.collapse())


# ---- making room in a model -------------------------------------------------------------------


def coarser_groups(old: Sequence[int], new: Sequence[int], where: str) -> HeadGroups:
    """Return the kept heads of the map `old` that each kept head of `new` consists of.

    (0,1,2,2), (0,0,1,1) -> ((0,1), (2,)).

    Raises:
        PlanError: If `new` would split a head of `old`.
    """
    owner: dict[int, int] = {}
    for source, target in zip(old, new, strict=True):
        if owner.setdefault(source, target) != target:
            raise PlanError(
                f"{where}: query heads that share a head now ({source}) must share it in the new "
                f"plan too, got "
                f"{tuple(old)} -> {tuple(new)}; lift the model to one head a query head first"
            )
    return groups_of([owner[source] for source in range(len(owner))])


def is_coarser(old: AttentionPlan, new: AttentionPlan) -> bool:
    """Whether every group of `new` is made of whole groups of `old`."""
    try:
        for a, b in zip(old.layers, new.layers, strict=True):
            coarser_groups(a.key_map, b.key_map, "")
            coarser_groups(a.value_map, b.value_map, "")
    except ValueError:
        return False
    return True


def lifted(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with one key and one value head per query head; logits are unchanged."""
    plan = plan_of(model)
    mha = replace(plan, layers=(LayerPlan.identity(plan.num_heads),) * plan.num_layers)
    return assemble(model, mha, lift(model))


def open_projections(
    model: PreTrainedModel, plan: AttentionPlan
) -> tuple[PreTrainedModel, AttentionPlan]:
    """Return a copy of the model with separate q, k and v `HeadProjection`s, and its plan.

    It is the same function.

    Raises:
        PlanError: If `plan` does not fit the model.
    """
    check_fits(plan, geometry_of(model.config))
    model = unshare(model)
    old = plan_of(model)
    if old.num_heads < 2:
        raise PlanError("a model with one query head has no heads to fuse or to share")
    # Families with a fused projection only take it apart for fewer key and value heads, some only
    # for unequal ones: pretend, then put all back.
    unequal = LayerPlan((0,) * old.num_heads, (0, *(1,) * (old.num_heads - 1)))
    layers = read_layers(model)
    first = [heads.expand((0,), (0, 0)) for heads in layers]
    new = assemble(model, replace(old, layers=(unequal,) * old.num_layers), first)
    family = family_of(new.config)
    geometry = geometry_of(model.config)
    for module, heads, layer in zip(family.attention_modules(new), layers, old.layers, strict=True):
        heads = heads.to(new.device, new.dtype)
        for name in ("q", "k", "v"):
            rows = getattr(heads, name)
            bias = getattr(heads, f"{name}_bias")
            setattr(module, f"{name}_proj", HeadProjection(rows, bias).train(new.training))
        if family.key_norm is not None:
            family.key_norm(module, geometry, layer)
            family.write(module, heads)
        attach(module, layer)
    new.config.attention_plan = old.to_dict()  # in place: the layers hold the same config
    new.plan = old  # type: ignore[assignment]
    return new, old


StandIn = TypeVar("StandIn", bound=HeadProjection)


def replace_projections(
    model: PreTrainedModel,
    old: AttentionPlan,
    new: AttentionPlan,
    make: Callable[[HeadProjection, HeadGroups], StandIn],
) -> list[dict[str, StandIn]]:
    """Replace every k and v projection whose heads `new` fuses by `make(projection, groups)`.

    Args:
        model: One that `open_projections` returned.
        old: The model's plan.
        new: The plan to reach.
        make: Makes a replacement.

    Returns:
        The replacements by side, for each layer.

    Raises:
        PlanError: If `new` fuses nothing, or splits a head of `old`.
    """
    replaced: list[dict[str, StandIn]] = []
    for index, module in enumerate(family_of(model.config).attention_modules(model)):
        replaced.append({})
        for side, name in (("k", "key_map"), ("v", "value_map")):
            maps = getattr(old.layers[index], name), getattr(new.layers[index], name)
            groups = coarser_groups(*maps, f"layer {index}, {name}")
            if any(len(group) > 1 for group in groups):
                replaced[-1][side] = make(getattr(module, f"{side}_proj"), groups)
                setattr(module, f"{side}_proj", replaced[-1][side])
    if not any(replaced):
        raise PlanError("the plan fuses nothing: it has as many key and value heads as the model")
    return replaced
