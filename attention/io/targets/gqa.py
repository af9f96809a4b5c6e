"""Stock GQA: one KV head count in all layers, equal groups, loadable by any server of the family.

Uniform plans only permute their heads. Others are padded: a KV head for each distinct (key, value)
pair, zero query heads to even out groups, zero KV heads to even out layers. A zero query head feeds
zero columns of the output projection, so padding is exact.

Legend: H query heads, P KV heads and m query heads a KV head of the stock model (so P·m query
heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import MistralConfig, PretrainedConfig, PreTrainedModel

from attention.conversion.convert import unshare
from attention.families import family_of, geometry_of
from attention.io import checkpoint
from attention.io.targets import EngineSupport, Lowered, Target, TargetError, _stock
from attention.io.targets._pairs import (
    check_no_composition,
    kv_heads_of,
    pad,
    widths_of,
    written_out,
)
from attention.io.targets._vllm import without_vllm
from attention.io.targets._wide import lowering_wide, support_wide
from attention.modeling.beside import copy_common
from attention.modeling.model_classes import family_fields, plan_of
from attention.plan import AttentionPlan


def _stock_model(model: PreTrainedModel, heads: int, kv_heads: int) -> PreTrainedModel:
    """Return an empty stock model with these counts.

    It is of the same family, or Mistral where Llama's config forbids them.
    """
    config = stock_config(model.config, heads, kv_heads)
    return family_of(config).model_class._from_config(config, dtype=model.dtype)


def stock_config(config: Any, heads: int, kv_heads: int) -> PretrainedConfig:
    """Return the stock config of a model with these counts. Raises TargetError if there is none."""
    family = family_of(config)
    geometry = geometry_of(config)
    plain = family.plain_config(config, kv_heads)
    if plain is None or family.plain_config(config, 1) is None:
        raise TargetError(f"the {family.name} family has no stock GQA form")
    fields: dict[str, Any] = family_fields(plain) | {
        "num_attention_heads": heads,
        "head_dim": geometry.head_dim,
    }
    if geometry.decoder_layers is not None and heads != geometry.num_heads:
        raise TargetError(
            f"a {family.name} has {geometry.num_heads} query heads in the layers that are not "
            f"converted, too, and cannot have {heads}; choose a plan with equal groups and one "
            f"count for all layers (headfold_gqa, align, gqa)"
        )
    if heads == geometry.num_heads or (family.name == "llama" and plain.hidden_size % heads == 0):
        return family.config_class(**fields)
    if family.name == "llama":
        _check_mistral(config, heads)
        for name in checkpoint.LLAMA_ONLY:  # off, and unknown to Mistral
            fields.pop(name, None)
        fields["sliding_window"] = None
        return MistralConfig(**fields)
    way_out = "choose a plan with equal groups, or export to target transformers"
    if geometry.whole_norm:
        raise TargetError(
            f"the norm of a {family.name} spans all heads and would count zero heads too; {way_out}"
        )
    try:
        config_of_stock = family.config_class(**fields)
        fits = geometry_of(config_of_stock).head_dim == geometry.head_dim
    except Exception:  # its validation says no
        fits = False
    if not fits:
        raise TargetError(
            f"a {family.name} of model width {plain.hidden_size} cannot have {heads} query heads "
            f"of "
            f"{geometry.head_dim}: its stock class derives the one from the other; {way_out}"
        )
    return config_of_stock


@support_wide
def support_for(config: Any, plan: AttentionPlan) -> EngineSupport:
    """Give every layer as many KV heads as the layer with most pairs has.

    Raises:
        TargetError: For composition, for a family whose stock form has no groups, and where no
            stock class takes the padded heads.
    """
    check_no_composition(plan, "gqa")
    counts = kv_heads_of(plan)
    family = family_of(config)
    grouped = family.plain_config(config, 1) is not None
    if not grouped and not all(layer.is_identity for layer in plan.layers):
        index = next(i for i, layer in enumerate(plan.layers) if not layer.is_identity)
        other = "; export to target phi" if family.name == "gpt_neox" else ""
        raise TargetError(
            f"layer {index} has {counts[index]} KV heads for {plan.num_heads} query heads, and the "
            f"{family.name} "
            f"family has no stock GQA form: it takes as many KV heads as query heads{other}"
        )
    query_heads = _query_heads(plan)
    if grouped and not plan.is_uniform_gqa:
        stock_config(config, query_heads, max(counts))
    layers = plan.num_layers
    return EngineSupport.of(
        [max(counts)] * layers, plan.head_dim, [query_heads] * layers, plan.other_layers
    )


def _query_heads(plan: AttentionPlan) -> int:
    """Return the query heads of every layer of the stock form."""
    return max(kv_heads_of(plan)) * max(widths_of(plan))


def _except_for(config: Any, plan: AttentionPlan) -> tuple[str, ...]:
    return without_vllm(config, plan, _query_heads(plan))


def _check_mistral(config: Any, heads: int) -> None:
    """Raise TargetError for a Llama that Mistral cannot stand in for."""
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise TargetError(
            f"a Llama with biases cannot hold {heads} query heads of a model width of "
            f"{config.hidden_size}, and "
            "Mistral has no biases; choose a plan with equal groups"
        )


@lowering_wide
def lower(model: PreTrainedModel) -> Lowered:
    """Return the stock GQA form of a Headfold model. Raises TargetError as `support_for` does."""
    plan = plan_of(model)
    support_for(model.config, plan)
    if plan.is_shared:
        lowered = lower(unshare(model))
        return replace(lowered, notes=(*lowered.notes, *written_out(plan)))
    if plan.is_uniform_gqa:
        if not hasattr(model, "plan"):
            return Lowered(model, notes=("the model has this form already",))
        return Lowered(checkpoint.to_plain(model), notes=("heads permuted; nothing added",))
    kv_heads, heads = max(kv_heads_of(plan)), _query_heads(plan)
    stock = _stock_model(model, heads, kv_heads)
    fill(stock, model, [kv_heads] * plan.num_layers, heads)
    note = (
        f"{kv_heads} KV heads in every layer, one for each distinct (key, value) pair of "
        f"the widest layer"
    )
    return Lowered(stock, notes=(note,))


def fill(
    stock: PreTrainedModel, model: PreTrainedModel, kv_heads: Sequence[int], query_heads: int
) -> None:
    """Give a stock model the weights of a Headfold model, padded by heads of zeros.

    Args:
        stock: The model to fill, of the family of `model` or of Mistral.
        model: Where the weights come from.
        kv_heads: KV heads of each layer of `stock`.
        query_heads: Query heads of every layer of `stock`.
    """
    family = family_of(model.config)
    stock_family = family_of(stock.config)
    geometry = geometry_of(model.config)
    copy_common(model, stock)
    sources = family.attention_modules(model)
    targets = stock_family.attention_modules(stock)
    layers = zip(sources, targets, plan_of(model).layers, kv_heads, strict=True)
    for source, module, layer, count in layers:
        heads = family.read(source, geometry)
        stock_family.write(module, pad(heads, layer, count, query_heads // count))
    stock.generation_config = model.generation_config
    stock.eval()


# Ainslie 2023, section 2; padding: zero heads
TARGET = Target(
    "gqa",
    ("transformers", "vLLM"),
    support_for,
    lower,
    _stock.write,
    _stock.read,
    except_for=_except_for,
)
