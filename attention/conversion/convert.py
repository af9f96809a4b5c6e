"""Plan and heads → model.

Read the heads, align, fuse, write them into a model of the plan's shapes.

Legend: H query heads, G^K / G^V kept key / value heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from attention.axes import ALIGNMENT, FUSION, Part
from attention.base.progress import stage
from attention.calibration.store import Calibration, layer_statistics
from attention.families import family_of, geometry_of
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.modeling import mlp
from attention.modeling.beside import beside_original, copy_common
from attention.modeling.composition import reset
from attention.modeling.model_classes import check_fits, headfold_config, plan_of
from attention.plan import AttentionPlan, PlanError


def read_layers(model: PreTrainedModel) -> list[LayerHeads]:
    """Return the heads of every layer as stored (G^K and G^V heads), in float32."""
    family = family_of(model.config)
    geometry = geometry_of(model.config)
    return [
        family.read(module, geometry).to(torch.float32)
        for module in family.attention_modules(model)
    ]


def lift(model: PreTrainedModel) -> list[LayerHeads]:
    """Return the heads of every layer with one key and one value head per query head, in float32.

    This is the lift to multi-head attention of DHA, App. D.
    """
    return list(LiftedHeads(model))


class LiftedHeads(Sequence[LayerHeads]):
    """The heads that `lift` returns, one layer at a time as they are indexed.

    In float32 the heads of all layers are most of a model. The last one is remembered; the model
    must not change.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._family = family_of(model.config)
        self._geometry = geometry_of(model.config)
        self._modules = list(self._family.attention_modules(model))
        self._plan = plan_of(model)
        self._last: tuple[int, LayerHeads] | None = None

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, layer: Any) -> Any:
        layer = range(len(self))[layer]  # IndexError, and what a negative one means
        if self._last is None or self._last[0] != layer:
            self._last = None  # before the next one is made
            plan = self._plan.layers[layer]
            stored = self._family.read(self._modules[layer], self._geometry).to(torch.float32)
            self._last = layer, stored.expand(plan.key_map, plan.value_map)
        return self._last[1]


def build(
    config: PretrainedConfig, plan: AttentionPlan, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return a Headfold model of the plan's shapes with fresh weights.

    `config` is the checkpoint's.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(headfold_config(config, plan), dtype=dtype)


def assemble(
    model: PreTrainedModel, plan: AttentionPlan, heads: Iterable[LayerHeads], *, share: bool = False
) -> PreTrainedModel:
    """Build a Headfold model with `heads` in its attention and `model`'s weights everywhere else.

    The new model has the dtype, device and training mode of `model`, which does not change.

    Args:
        model: The original.
        plan: The plan of the new model.
        heads: Heads of each layer, as many as the plan keeps.
        share: Whether the other weights are `model`'s own memory, for a result that is measured or
            written and never trained.
    """
    if share and not (
        plan.is_shared or plan.mlp_shares or plan_of(model).is_shared or plan_of(model).mlp_shares
    ):
        new = beside_original(model, lambda: build(model.config, plan, model.dtype))
    else:
        new = build(model.config, plan, model.dtype)
    # Fixed, so that a conversion is reproducible; what the source has of composition is copied over
    # it.
    reset(new, identity=True, generator=torch.Generator().manual_seed(0))
    nn.Module.to(new, model.device)
    copy_common(model, new, but=(".key_map", ".value_map"))
    family = family_of(new.config)
    modules = family.attention_modules(new)
    with stage("fusing heads", len(modules), "layers") as progress:
        for module, layer in zip(modules, heads, strict=True):
            family.write(module, layer.to(model.device))
            progress.step()
    if plan.mlp_shares or plan_of(model).mlp_shares:
        mlp.copy(model, new)
    if model.generation_config is not None:
        new.generation_config = model.generation_config
    return new.train(model.training)


def unshare(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model with every layer owning its weights.

    The given one if nothing is shared.
    """
    plan = plan_of(model)
    return assemble(model, plan.unshared, read_layers(model)) if plan.is_shared else model


def check_start(old: AttentionPlan, new: AttentionPlan) -> None:
    """Raise PlanError for what a conversion cannot start from, or would break.

    It cannot start from wide heads, and does no more to composition than add it as an identity.
    """
    if old.is_wide:
        raise PlanError(
            "the heads of this model are wider than its checkpoint's, and are not converted again; "
            "convert the checkpoint that it was made from"
        )
    if old.composition is not None and new.composition != old.composition:
        raise PlanError(
            f"the model composes its heads ({old.composition}); its plan must keep that "
            f"composition, got "
            f"{new.composition}"
        )
    if old.composition is None and new.composition is not None and new.composition.qk_norm:
        raise PlanError(
            "composition with qk_norm has no identity to start from: converting a trained model "
            "with it would destroy "
            "it; set qk_norm=False, or train from scratch with attention.conversion.convert.build"
        )


def convert(
    model: PreTrainedModel,
    plan: AttentionPlan,
    *,
    alignment: str = "none",
    fusion: str = "mean",
    calibration: Calibration | None = None,
    alignment_settings: Mapping[str, Any] | None = None,
    fusion_settings: Mapping[str, Any] | None = None,
    share: bool = False,
) -> PreTrainedModel:
    """Return a new model that carries out `plan`; `model` does not change.

    Args:
        model: The model to convert.
        plan: Which heads share keys and values.
        alignment: Name of a part of the axis.
        fusion: Name of a part of the axis.
        calibration: Statistics of `model`, for parts that need them.
        alignment_settings: Knobs of the alignment.
        fusion_settings: Knobs of the fusion.
        share: As in `assemble`.

    Raises:
        ValueError: For an unknown name or setting, and for a part that needs a calibration when
            none is given.
        PlanError: If the plan does not fit.
    """
    geometry = geometry_of(model.config)
    check_fits(plan, geometry)
    check_start(plan_of(model), plan)
    align = ALIGNMENT.get(alignment)
    fuse = FUSION.get(fusion)
    align_knobs = align.settings(alignment_settings)
    fuse_knobs = fuse.settings(fusion_settings)
    for part in (align, fuse):
        if "statistics" in part.needs and calibration is None:
            raise ValueError(
                f"{part.axis}={part.name} needs a calibration; pass calibration=calibrate(model, "
                f"tokens)"
            )
    if calibration is not None and len(calibration.layers) != plan.num_layers:
        raise ValueError(
            f"the calibration has {len(calibration.layers)} layers, the plan {plan.num_layers}"
        )
    aligned = through(align, LiftedHeads(model), plan, calibration, geometry, align_knobs)
    return assemble(
        model, plan, through(fuse, aligned, plan, calibration, geometry, fuse_knobs), share=share
    )


def through(
    part: Part,
    heads: Iterable[LayerHeads],
    plan: AttentionPlan,
    calibration: Calibration | None,
    geometry: HeadGeometry,
    knobs: Mapping[str, Any],
) -> Iterator[LayerHeads]:
    """Yield what a part of alignment or fusion makes of the lifted heads, layer by layer."""
    for index, (layer_heads, layer) in enumerate(zip(heads, plan.layers, strict=True)):
        statistics = layer_statistics(calibration, index, layer_heads)
        yield part(layer_heads, layer, statistics, geometry.layer(index), **knobs)
