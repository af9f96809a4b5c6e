"""Stock GQA: one KV head count in all layers, equal groups, loadable by any server of the family.

Uniform plans only permute their heads. Others are padded: a KV head for each distinct (key, value) pair, zero query
heads to even out groups, zero KV heads to even out layers. A zero query head feeds zero columns of the output
projection, so padding is exact.

Legend: H query heads, P KV heads and m query heads a KV head of the stock model (so P·m query heads).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from attention.conversion.conversion import unshare
from attention.families import family_of, geometry_of
from attention.heads import LayerHeads
from attention.io import checkpoint
from attention.io.export import TARGETS, Lowered
from attention.io.stock_form import pairs_of, stock_shape
from attention.modeling.modeling import family_fields, plan_of
from attention.plan import AttentionPlan, LayerPlan


def _take(x: Tensor | None, index: list[int | None]) -> Tensor | None:
    """Rows of x by index; None gives a row of zeros."""
    if x is None:
        return None
    zero = torch.zeros_like(x[0])
    return torch.stack([zero if i is None else x[i] for i in index])


def pad(heads: LayerHeads, layer: LayerPlan, kv_heads: int, width: int) -> LayerHeads:
    """Heads of one layer with `kv_heads` KV heads and `width` query heads to each, zeros where there is none."""
    keys: list[int | None] = []
    values: list[int | None] = []
    queries: list[int | None] = []
    for (key, value), members in pairs_of(layer).items():
        keys.append(key)
        values.append(value)
        queries += [*members, *[None] * (width - len(members))]
    missing = kv_heads - len(keys)
    keys += [None] * missing
    values += [None] * missing
    queries += [None] * missing * width
    padded = {
        "q": _take(heads.q, queries), "o": _take(heads.o, queries), "q_bias": _take(heads.q_bias, queries),
        "k": _take(heads.k, keys), "k_bias": _take(heads.k_bias, keys),
        "v": _take(heads.v, values), "v_bias": _take(heads.v_bias, values),
    }  # fmt: skip
    return replace(heads, **padded)


def _stock_model(model: PreTrainedModel, heads: int, kv_heads: int) -> PreTrainedModel:
    """An empty stock model with these counts: of the same family, or Mistral where Llama's config forbids them."""
    family = family_of(model.config)
    config = family.plain_config(model.config, kv_heads)
    if config is None or family.plain_config(model.config, 1) is None:
        raise ValueError(f"the {family.name} family has no stock GQA form")
    changes = {"num_attention_heads": heads, "head_dim": geometry_of(model.config).head_dim}
    fields: dict[str, Any] = family_fields(config) | changes
    if family.name != "llama" or config.hidden_size % heads == 0:
        return family.model_class._from_config(family.config_class(**fields), dtype=model.dtype)
    if fields.pop("attention_bias", False) or fields.pop("mlp_bias", False):
        raise ValueError(
            f"a Llama with biases cannot hold {heads} query heads of a model width of {config.hidden_size}, and "
            "Mistral has no biases; choose a plan with equal groups"
        )
    fields.pop("pretraining_tp", None)
    return MistralForCausalLM._from_config(MistralConfig(**fields, sliding_window=None), dtype=model.dtype)


def written_out(plan: AttentionPlan) -> tuple[str, ...]:
    """A note about shared weights, which stock formats do not have; none if nothing is shared."""
    if not plan.is_shared:
        return ()
    heads = len({(s.layer, s.head) for s in plan.head_shares})
    return (
        f"{heads} shared heads and {len(plan.mlp_shares)} shared MLP blocks are written out: stock formats "
        "hold a copy of its own for every layer, so the file and the memory are those of the unshared model",
    )


@TARGETS.part("gqa", source="Ainslie 2023, section 2; padding: zero heads")
def lower(model: PreTrainedModel) -> Lowered:
    """The stock GQA form of a Headfold model. Raises ValueError for a composed plan, which has none."""
    plan = plan_of(model)
    if plan.composition is not None:
        raise ValueError("a plan with composition (dcmha) has no stock form; serve it with Headfold")
    if plan.is_shared:
        lowered = lower(unshare(model))
        return replace(lowered, notes=(*lowered.notes, *written_out(plan)))
    if plan.is_uniform_gqa:
        if not hasattr(model, "plan"):
            return Lowered(model, exact=True, notes=("the model has this form already",))
        return Lowered(checkpoint.to_plain(model), exact=True, notes=("heads permuted; nothing added",))
    kv_heads, width = stock_shape(plan)
    stock = _stock_model(model, kv_heads * width, kv_heads)
    family, stock_family = family_of(model.config), family_of(stock.config)
    geometry = geometry_of(model.config)
    target = stock.state_dict()
    same = {k: t for k, t in model.state_dict().items() if k in target and t.shape == target[k].shape}
    stock.load_state_dict(same, strict=False)
    sources, targets = family.attention_modules(model), stock_family.attention_modules(stock)
    for source, module, layer in zip(sources, targets, plan.layers, strict=True):
        stock_family.write(module, pad(family.read(source, geometry), layer, kv_heads, width))
    stock.generation_config = model.generation_config
    notes = (
        f"{kv_heads} KV heads in every layer, one for each distinct (key, value) pair of the widest layer",
        f"{kv_heads * width - plan.num_heads} zero query heads a layer even out the groups",
    )
    return Lowered(stock.eval(), exact=True, notes=notes)
