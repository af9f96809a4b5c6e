"""A stock folder with a number of KV heads per layer: the key `per_layer_config` of transformers.

`config.json` is the family's own. While transformers' classes build all layers alike, a small
modelling file in the folder builds the attention of each layer from that layer's settings and keeps
the stock forward, so that vLLM's Transformers backend serves it, too. Where one count serves all
layers the folder is that of target gqa, which needs no code.

All layers have one number of query heads, which the KV heads of each layer divide: zero query heads
make up the rest (`attention.io.targets._pairs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from attention.conversion.convert import unshare
from attention.families import Family, family_of, window_of
from attention.io.checkpoint import KV_HEADS
from attention.io.targets import EngineSupport, Lowered, Target, TargetError, _stock, gqa
from attention.io.targets._code import modeling_per_layer
from attention.io.targets._pairs import (
    check_no_composition,
    check_query_heads,
    kv_heads_of,
    written_out,
)
from attention.io.targets._vllm import without_vllm
from attention.io.targets._wide import lowering_wide, support_wide
from attention.modeling.model_classes import has_foreign_counts, plan_of
from attention.plan import AttentionPlan

_CODE = Path(modeling_per_layer.__file__)


@support_wide
def support_for(config: Any, plan: AttentionPlan) -> EngineSupport:
    """Return the KV heads of each layer in the export.

    Raises:
        TargetError: For composition, for a family whose stock form has no groups, and for counts
            that no number of query heads suits which the family's class takes.
    """
    check_no_composition(plan, "per_layer")
    if len(set(kv_heads_of(plan))) == 1:
        return gqa.support_for(config, plan)
    heads = _stock_config(config, plan).num_attention_heads
    return EngineSupport.of(kv_heads_of(plan), plan.head_dim, [heads] * plan.num_layers)


def _stock_config(config: Any, plan: AttentionPlan) -> PretrainedConfig:
    """Return the stock config with as many KV heads in every layer as the widest has.

    Raises:
        TargetError: As `support_for`.
    """
    counts = kv_heads_of(plan)
    if (family := family_of(config)).reads_layer_config:
        raise TargetError(
            f"target per_layer has no {family.name} with different numbers of KV heads: "
            f"transformers takes one for all layers with a window, got {sorted(set(counts))}; "
            f"convert with a recipe of one count for all layers (headfold_gqa, align, gqa)"
        )
    try:
        return gqa.stock_config(config, check_query_heads(plan), max(counts))
    except TargetError as error:
        index = counts.index(min(counts))
        others = sorted(set(counts) - {counts[index]})
        raise TargetError(
            f"layer {index} has {counts[index]} KV heads, other layers have {others}: {error}"
        ) from None


@lowering_wide
def lower(model: PreTrainedModel) -> Lowered:
    """Return the stock model with different attention sizes per layer; or as target gqa."""
    plan = plan_of(model)
    support_for(model.config, plan)
    if len(set(kv_heads_of(plan))) == 1:
        return gqa.lower(model)
    source = unshare(model)
    config = _stock_config(model.config, plan)
    counts = dict(enumerate(kv_heads_of(plan)))
    config.per_layer_config = {layer: {KV_HEADS: count} for layer, count in counts.items()}
    if scaling := getattr(config, "logits_scaling", None):
        # Granite's, by the name that vLLM's Transformers backend knows
        config.logit_scale = 1 / scaling
    with modeling_per_layer.global_counts(config):
        stock: Any = family_of(config).model_class._from_config(config, dtype=model.dtype)
    modeling_per_layer.size_layers(stock.get_decoder())
    gqa.fill(stock, source, kv_heads_of(plan), config.num_attention_heads)
    note = (
        f"{_CODE.name} in the folder sizes the attention of each layer: load with "
        "trust_remote_code=True"
    )
    if not _except_for(source.config, plan):
        note += "; vllm serve --trust-remote-code --model-impl transformers"
    return Lowered(stock, (note, *written_out(plan)))


def write(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any = None) -> str:
    if has_foreign_counts(model.config):
        family = family_of(model.config)
        classes: dict[str, Any] = {
            "AutoModel": MODEL_MAPPING[family.config_class],
            "AutoModelForCausalLM": family.model_class,
        }
        model.config.auto_map = {
            auto: f"{_CODE.stem}.PerLayer{stock.__name__}" for auto, stock in classes.items()
        }
        (folder / _CODE.name).write_text(code_for(family), encoding="utf-8")
    return _stock.write(model, folder, dtype, tokenizer)


def code_for(family: Family) -> str:
    """Return the modelling file for a family: Llama's, with the names of the family's classes."""
    text = _CODE.read_text(encoding="utf-8")
    model_class = family.model_class.__name__
    decoder: Any = MODEL_MAPPING[family.config_class]
    name = model_class.removesuffix("ForCausalLM")
    return (
        text.replace("LlamaForCausalLM", model_class)
        .replace("LlamaModel", decoder.__name__)
        .replace("A Llama w", f"A {name} w")
    )


def _except_for(config: Any, plan: AttentionPlan) -> tuple[str, ...]:
    """Return vLLM for layers of different counts in a model with windows: it allocates more.

    With one count the folder is the stock one, which vLLM may not compute.
    """
    if len(set(kv_heads_of(plan))) == 1:
        return without_vllm(config, plan)
    return ("vLLM",) if window_of(config) else ()


TARGET = Target(
    "per_layer",
    ("transformers", "vLLM"),
    support_for,
    lower,
    write,
    _stock.read_with_code,
    except_for=_except_for,
)
