"""Headfold's own model types: a family's stock model with the head counts and maps of a plan.

One config class and one model class a family, `headfold_<family>`, registered with AutoConfig and
AutoModelForCausalLM on import. Shapes are final inside the constructor, as ZeRO-3 and meta-device
loading need.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from attention.families import (
    FUSED_PROJECTIONS,
    Family,
    families,
    family_of,
    geometry_of,
    window_of,
)
from attention.geometry import HeadGeometry
from attention.modeling.composition import attach_composition, reset_missing
from attention.modeling.composition.composing import HeadComposition
from attention.modeling.grouped import ATTENTION_NAME, attach, make_uneven
from attention.modeling.shared_heads import share, sharing_layers
from attention.modeling.shared_weights import SharedProjection
from attention.plan import AttentionPlan, LayerPlan, PlanError

TYPE_PREFIX = "headfold_"
MAP_NAMES = ("key_map", "value_map")
"""Buffers of an attention module that repeat its layer's plan; weights may lack them."""


def check_fits(plan: AttentionPlan, geometry: HeadGeometry) -> None:
    """Raise PlanError unless the plan has the geometry's layers, query heads and head dim.

    A plan may leave out the layers that it does not change.
    """
    for name, got, expected in (
        ("layers", plan.num_layers, geometry.num_layers),
        ("query heads per layer", plan.num_heads, geometry.num_heads),
        ("head_dim", plan.head_dim, geometry.head_dim),
        ("other_layers", plan.other_layers or geometry.other_layers, geometry.other_layers),
    ):
        if got != expected:
            raise PlanError(
                f"the plan has {got} {name}, the checkpoint ({geometry.family}) has {expected}"
            )
    if geometry.value_norm and plan.is_wide:
        raise PlanError(
            f"values of this {geometry.family} pass a norm after their projection, which wider "
            f"heads would change: expected key_width and value_width 1, got "
            f"{max(layer.widths for layer in plan.layers)}; choose a recipe with width=1"
        )
    if geometry.qk_norm and any(layer.key_width > 1 for layer in plan.layers):
        raise PlanError(
            f"queries and keys of this {geometry.family} pass a norm after their projection, which "
            f"wider keys would change: only values may be wide, got key_width "
            f"{max(layer.key_width for layer in plan.layers)}"
        )


class HeadfoldMixin:
    """Add what the model class of every family needs.

    Projections of the plan's shapes, maps, and uneven caches.
    """

    family: Family
    _keys_to_ignore_on_load_missing = tuple(rf"\.{name}$" for name in MAP_NAMES)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        plan = plan_of_config(config)
        geometry = self.family.geometry(config)
        check_fits(plan, geometry)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        modules = self.family.attention_modules(self)  # type: ignore[arg-type]
        for index, (module, layer) in enumerate(zip(modules, plan.layers, strict=True)):
            separate = self.family.separate if index in sharing_layers(plan) else None
            (separate or self.family.reshape)(module, geometry, layer)
            attach(module, layer)
            if plan.composition is not None:
                composition = HeadComposition(
                    plan.num_heads,
                    geometry.hidden_size,
                    plan.composition,
                    plan.composition.window_of(index),
                )
                attach_composition(module, composition)
        share(self, plan)  # type: ignore[arg-type]
        self.plan = plan
        # Any other implementation would ignore the maps.
        self.config._attn_implementation = ATTENTION_NAME  # type: ignore[attr-defined]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, SharedProjection):
            module.reset_parameters()

    def initialize_weights(self) -> None:
        """Set maps and composition that the checkpoint lacks. Called after the weights are read."""
        super().initialize_weights()  # type: ignore[misc]
        set_missing_maps(self)  # type: ignore[arg-type]
        reset_missing(self)  # type: ignore[arg-type]

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Set an attention function of Headfold, as `transformers` does.

        Raises:
            ValueError: For any other: it would ignore the maps of the heads.
        """
        if not str(attn_implementation).startswith(ATTENTION_NAME):
            raise ValueError(
                f"attn_implementation: expected {ATTENTION_NAME!r}, which reads the head maps of "
                f"this model, got {attn_implementation!r}; other implementations read what "
                "`headfold export --target gqa` writes"
            )
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> Cache:
        return make_uneven(super()._prepare_static_cache(*args, **kwargs))  # type: ignore[misc]

    def _get_static_cache_init_shape(self) -> None:
        # Head counts differ between keys and values: let each layer take its own at first use.
        return None


@cache
def headfold_classes(family_name: str) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
    """Return the Headfold config and model class of a family."""
    family = families()[family_name]
    stem = family.model_class.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    module_name = {"__module__": __name__}
    config_class = type(
        f"Headfold{stem}Config",
        (family.config_class,),
        {"model_type": TYPE_PREFIX + family_name, **module_name},
    )
    model_class = type(
        f"Headfold{stem}ForCausalLM",
        (HeadfoldMixin, family.model_class),
        {
            "config_class": config_class,
            "family": family,
            "_supports_attention_backend": True,
            **module_name,
        },
    )
    globals()[config_class.__name__] = (
        config_class  # so that pickle, as used between processes, finds them by name
    )
    globals()[model_class.__name__] = model_class
    return config_class, model_class


def register() -> None:
    """Make transformers know every Headfold model type, and how its stock weights are read."""
    for name in families():
        config_class, model_class = headfold_classes(name)
        AutoConfig.register(TYPE_PREFIX + name, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
        if (stock := get_checkpoint_conversion_mapping(name)) is not None:
            register_checkpoint_conversion_mapping(TYPE_PREFIX + name, stock, overwrite=True)


def headfold_config(config: PretrainedConfig, plan: AttentionPlan) -> PretrainedConfig:
    """Return the config of `config`'s model with `plan`.

    Raises:
        PlanError: If the plan does not fit the checkpoint.
    """
    geometry = geometry_of(config)
    check_fits(plan, geometry)
    plan = replace(plan, other_layers=geometry.other_layers)
    if plan.composition is not None and (window := window_of(config)):
        raise PlanError(
            f"layers of this {family_of(config).name} keep a window of {window} tokens, and "
            f"composition (dcmha) needs "
            "the cache of all; choose a recipe without composition"
        )
    make: Any = headfold_classes(family_of(config).name)[0]
    return make(**family_fields(config), attention_plan=plan.to_dict())


def family_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that its family's stock and Headfold forms have in common."""
    of_one_form = ("model_type", "architectures", "attention_plan", "transformers_version")
    of_one_form += ("auto_map",)  # names files of code that are only in the folder of the source
    return {name: value for name, value in config.to_dict().items() if name not in of_one_form}


def plan_of(model: PreTrainedModel) -> AttentionPlan:
    """Return the plan of a model; of a stock checkpoint its own grouping (identity for MHA)."""
    return plan_of_config(model.config)


def plan_of_config(config: PretrainedConfig) -> AttentionPlan:
    """Return the plan of the models that a config describes.

    Raises:
        PlanError: For one of ours that has lost it.
    """
    record = getattr(config, "attention_plan", None)
    if record is not None:
        return AttentionPlan.from_dict(record)
    if config.model_type.startswith(TYPE_PREFIX):
        raise PlanError(
            f"a config of model type {config.model_type} needs its attention_plan, which is not "
            f"there"
        )
    if has_foreign_counts(config):
        counts = [layer.num_key_value_heads for layer in config.per_layer_config]
        geometry = geometry_of(with_kv_heads(config, max(counts)))
    else:
        geometry = geometry_of(config)
        counts = [geometry.num_kv_heads] * geometry.num_layers
    maps = [replace(geometry, num_kv_heads=count).kv_map for count in counts]
    return AttentionPlan(
        tuple(LayerPlan(one, one) for one in maps),
        geometry.head_dim,
        other_layers=geometry.other_layers,
    )


def has_foreign_counts(config: PretrainedConfig) -> bool:
    """Whether a config has settings per layer that its family's own classes do not read."""
    return getattr(config, "is_heterogeneous", False) and not family_of(config).reads_layer_config


def with_kv_heads(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """Return the config with `count` KV heads in every layer."""
    plain: Any = copy.deepcopy(config)
    plain.per_layer_config = None
    plain.num_key_value_heads = count
    return plain


def one_form(config: PretrainedConfig) -> PretrainedConfig:
    """Return Headfold's config of a stock one whose layers have their own numbers of KV heads.

    Any other is returned as it is.

    Raises:
        ValueError: For a family whose layers cannot be read so.
    """
    if not has_foreign_counts(config):
        return config
    family = family_of(config)
    if family.plain_config(with_kv_heads(config, 1), 1) is None:
        raise ValueError(
            f"a {family.name} with a number of KV heads per layer (per_layer_config) is not read, "
            f"since it has no groups; give the checkpoint that it was made from"
        )
    plan = plan_of_config(config)
    plain: Any = with_kv_heads(config, max(layer.key_heads for layer in plan.layers))
    if hasattr(plain, "auto_map"):  # the code in the folder, which Headfold does not need
        del plain.auto_map
    if len({layer.key_heads for layer in plan.layers}) == 1:
        return plain
    converted = headfold_config(plain, plan)
    if family.separate is not None:
        setattr(converted, FUSED_PROJECTIONS, True)
    converted.name_or_path = config.name_or_path
    return converted


@torch.no_grad()
def set_missing_maps(model: PreTrainedModel) -> None:
    """Set the map buffers of a model that no checkpoint has filled, from its config."""
    modules: list[nn.Module] = list(family_of(model.config).attention_modules(model))
    for module, layer in zip(modules, plan_of(model).layers, strict=True):
        for name in MAP_NAMES:
            stored = getattr(module, name, None)  # none yet while the stock model is built
            if stored is not None and not getattr(stored, "_is_hf_initialized", False):
                stored.copy_(torch.tensor(getattr(layer, name)))


def check_maps(model: PreTrainedModel) -> None:
    """Raise PlanError if the map buffers of a loaded model are not those of its config."""
    modules: list[nn.Module] = list(family_of(model.config).attention_modules(model))
    for index, (module, layer) in enumerate(zip(modules, plan_of(model).layers, strict=True)):
        for name in MAP_NAMES:
            stored = tuple(getattr(module, name).tolist())
            expected = getattr(layer, name)
            if stored != expected:
                raise PlanError(
                    f"layer {index}: {name} in the weights is {stored}, in the config {expected}"
                )


register()
