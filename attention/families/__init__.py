"""Checkpoint families: where each keeps its heads. One small file each, found by itself.

A family file defines `FAMILY`, a `Family`. Everything else in Headfold speaks `HeadGeometry` and
`LayerHeads`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from attention.base.messages import one_of, reason
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads
from attention.plan import LayerPlan

FUSED_PROJECTIONS = "fused_projections"
"""Field of a Headfold config whose weights were read from a stock folder with a count per layer.

Layers with as many key heads as value heads then have the family's fused projection.
"""


def _q_norm(module: Any, queries: Tensor) -> Tensor:
    return module.q_norm(queries)


def _whole(_: Any) -> float | None:
    return 1.0


def no_residual_scale(_: Any) -> float | None:
    """Return None: `Family.residual_scale` with a norm between output projection and stream."""
    return None


def _no_modules(_: PreTrainedModel) -> Sequence[nn.Module]:
    return ()


@dataclass(frozen=True)
class Family:
    """How one architecture keeps its heads.

    Its logits must be what `get_output_embeddings()` returns, scaled or capped at most as
    `attention.modeling.predictions` knows.

    `attention_modules(model)`: the attention module of each layer, in order.
    `other_attention_modules(model)`: those of `HeadGeometry.other_layers`. `read(module,
    geometry)`: its heads as stored (num_kv_heads keys and values), same dtype, no copy promised.
    `reshape(module, geometry, plan)`: put projections of the plan's shapes (uninitialised) into a
    fresh stock module; where the stock forward cannot take unequal counts, change its class to one
    that can. An identity plan changes nothing, so that the converted model is bit-equal.
    `write(module, heads)`: copy heads into projections of matching shapes. `plain_config(config,
    kv_heads)`: the config of the same family with `kv_heads` KV heads, or None if it has none.
    `separate(module, geometry, plan)`: for families that fuse their projections, `reshape` that
    makes them separate for an identity plan too, as layers that share weights need them.
    `query_norm(module, queries)`: queries `[N, H, d]` after the norm that follows the projection,
    where there is one. `key_norm(module, geometry, plan)`: a fresh norm for the plan's key heads,
    where weights of the norm are each head's own (`LayerHeads.k_norm`). `reshape` has done it.
    `residual_scale(config)`: what the output projection is multiplied by when it is added to the
    residual stream; None where a norm is in between.

    Attributes:
        pads_queries: As in `HeadGeometry`.
        reads_layer_config: Its stock classes and `geometry` read `per_layer_config` of the config.
    """

    name: str
    config_class: type[PretrainedConfig]
    model_class: type[PreTrainedModel]
    geometry: Callable[[Any], HeadGeometry]
    attention_modules: Callable[[PreTrainedModel], Sequence[nn.Module]]
    read: Callable[[nn.Module, HeadGeometry], LayerHeads]
    reshape: Callable[[nn.Module, HeadGeometry, LayerPlan], None]
    write: Callable[[nn.Module, LayerHeads], None]
    plain_config: Callable[[Any, int], PretrainedConfig | None]
    query_norm: Callable[[Any, Tensor], Tensor] = _q_norm
    separate: Callable[[nn.Module, HeadGeometry, LayerPlan], None] | None = None
    key_norm: Callable[[Any, HeadGeometry, LayerPlan], None] | None = None
    other_attention_modules: Callable[[PreTrainedModel], Sequence[nn.Module]] = _no_modules
    residual_scale: Callable[[Any], float | None] = _whole
    pads_queries: bool = True
    reads_layer_config: bool = False


@cache
def families() -> dict[str, Family]:
    """All families by model type.

    A module whose name starts with an underscore is a helper, not a family.
    """
    by_type = {}
    for info in pkgutil.walk_packages(__path__, f"{__name__}."):
        if not info.ispkg and not info.name.rpartition(".")[2].startswith("_"):
            family = importlib.import_module(info.name).FAMILY
            by_type[family.name] = family
    return by_type


def family_of(config: Any) -> Family:
    """Return the family of a config, its Headfold form included.

    Raises:
        ValueError: Naming the supported ones.
    """
    model_type = str(getattr(config, "model_type", None)).removeprefix("headfold_")
    if model_type not in families():
        if (text := getattr(config, "text_config", None)) is not None:
            raise ValueError(_multimodal(model_type, getattr(text, "model_type", None)))
        if getattr(config, "kv_lora_rank", None):
            raise ValueError(
                f"a {model_type} caches one latent vector per token (multi-head latent attention, "
                f"MLA) and has no KV "
                "heads to share; Headfold converts models with key and value heads"
            )
        # A name that is nearly one of them is another architecture and no misspelling.
        names = sorted(families())
        raise ValueError(
            f"model type must be one of {names}, got {model_type!r}; see CONTRIBUTING.md for how "
            f"to add a family"
        )
    return families()[model_type]


def _multimodal(model_type: str, text_type: Any) -> str:
    """Return the message for a multimodal checkpoint."""
    message = f"a {model_type} is multimodal, and its language model, a {text_type},"
    if text_type not in families():
        return f"{message} is of no supported type; supported are {', '.join(sorted(families()))}"
    name = families()[text_type].model_class.__name__
    return (
        f"{message} is what can be converted. Save it alone in transformers: "
        f"whole = AutoModelForImageTextToText.from_pretrained(SOURCE); text = "
        f"{name}(whole.config.text_config); "
        "text.model, text.lm_head = whole.model.language_model, whole.lm_head; "
        "text.save_pretrained(NEW_FOLDER); "
        "and copy the tokenizer's files there"
    )


def geometry_of(config: Any) -> HeadGeometry:
    """Return the geometry of a transformers config.

    Raises:
        ValueError: For an unsupported family, naming the supported ones, and for a config that does
            not say what all layers have.
    """
    family = family_of(config)
    _check_rope(config)
    try:
        geometry = family.geometry(config)
    # Of a config that does not say the same for all layers, or has no number where one is needed
    except (RuntimeError, AttributeError, TypeError, LookupError, ArithmeticError) as error:
        raise ValueError(
            f"the config of this {family.name} cannot be used: {reason(error)}"
        ) from None
    return replace(
        geometry,
        pads_queries=family.pads_queries,
        head_norms=geometry.qk_norm and family.key_norm is not None,
        window=window_of(config),
    )


def window_of(config: Any) -> int:
    """Tokens that a sliding window keeps in view in some layers; 0 if no layer has one."""
    kinds = getattr(config, "layer_types", None)
    on = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return int(getattr(config, "sliding_window", None) or 0) if on else 0


def _check_rope(config: Any) -> None:
    """Raise ValueError for a kind of RoPE that transformers does not have.

    It would fail while it builds the model.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    supported = {"default", *ROPE_INIT_FUNCTIONS}
    for rope in ropes_of(config):
        kind = rope.get("rope_type", "default")
        if kind not in supported:
            raise ValueError(one_of("the config's rope_type", sorted(supported), kind))


def ropes_of(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings of a config, one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in rope.values() if isinstance(part, dict)]
    return kinds or [rope]
