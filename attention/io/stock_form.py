"""What stock software makes of a plan: whether it can hold it, at how many bytes, and what loads a folder.

A stock KV head is a pair of a key and a value head, and all layers have equally many: a plan without composition takes
one for each distinct pair of its widest layer (`attention.io.lowerings.gqa`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention.families import family_of
from attention.io.checkpoint import load_config
from attention.modeling.modeling import PREFIX, plan_of_config
from attention.plan import BYTES, AttentionPlan, LayerPlan

Pairs = dict[tuple[int, int], list[int]]
ALL = ("transformers", "vLLM", "llama.cpp")


def pairs_of(layer: LayerPlan) -> Pairs:
    """Query heads by the distinct (key head, value head) pair that they read, in order of first appearance."""
    pairs: Pairs = {}
    for head, pair in enumerate(zip(layer.key_map, layer.value_map, strict=True)):
        pairs.setdefault(pair, []).append(head)
    return pairs


def stock_shape(plan: AttentionPlan) -> tuple[int, int]:
    """KV heads of every layer of the stock form, and query heads to each."""
    layers = [pairs_of(layer) for layer in plan.layers]
    return max(map(len, layers)), max(len(members) for pairs in layers for members in pairs.values())


def stock_bytes(plan: AttentionPlan, dtype: Any) -> int:
    """Bytes of the KV cache a token in the stock form; `dtype` is a torch dtype or its name."""
    return 2 * plan.num_layers * stock_shape(plan)[0] * plan.head_dim * BYTES[str(dtype).removeprefix("torch.")]


def has_stock_form(config: Any, target: str) -> bool:
    """Whether models with this config can be lowered to `target` (of `attention.io.export.TARGETS`) by any means."""
    family = family_of(config)
    if plan_of_config(config).composition is not None:
        return False
    if target == "phi":
        return family.name == "gpt_neox" and config.use_parallel_residual
    return family.plain_config(config, 1) is not None


def format_of(folder: str | Path, dtype: Any) -> dict[str, Any]:
    """What a checkpoint is, its KV cache being held in `dtype`: `format` ("stock" or "headfold"), `loads_in` (software
    that loads it), and both in one line for people (`format_note`)."""
    config = load_config(folder)
    plan = plan_of_config(config)
    if not config.model_type.startswith(PREFIX):
        readers = _readers(config, plan)
        software = " and ".join(filter(None, (", ".join(readers[:-1]), readers[-1])))
        name = family_of(config).model_class.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        note = f"a stock {name} checkpoint: {software} load{'s' * (len(readers) == 1)} it"
        return {"format": "stock", "loads_in": list(readers), "format_note": note}
    note = f"Headfold's own format ({_reason(plan)}): attention.io.checkpoint.load loads it, stock software does not"
    way_out = _way_out(config, plan, dtype)
    return {"format": "headfold", "loads_in": ["headfold"], "format_note": f"{note}; {way_out}"}


def _readers(config: Any, plan: AttentionPlan) -> tuple[str, ...]:
    """vLLM and llama.cpp take as many KV heads as query heads for Phi; llama.cpp has no OPT."""
    name = family_of(config).name
    if name == "phi" and stock_shape(plan)[1] > 1:
        return ALL[:1]
    return ALL[:2] if name == "opt" else ALL


def _reason(plan: AttentionPlan) -> str:
    if plan.composition is not None:
        return "heads are composed"
    if plan.is_shared:
        return "layers share weights"
    if any(layer.key_map != layer.value_map for layer in plan.layers):
        return "keys and values have groups of their own"
    if len({layer.key_heads for layer in plan.layers}) > 1:
        return "layers have different numbers of KV heads"
    return "the family has no stock form with groups" if plan.is_uniform_gqa else "groups are of different sizes"


def _way_out(config: Any, plan: AttentionPlan, dtype: Any) -> str:
    target = next((name for name in ("gqa", "phi") if has_stock_form(config, name)), None)
    if target is None:
        return "no stock format holds this plan"
    before, after = plan.kv_bytes_per_token(dtype), stock_bytes(plan, dtype)
    cost = f"at {after} KV bytes a token instead of {before}" if after != before else f"at the same {after} KV bytes"
    larger = " --allow-larger-cache" if after > before else ""
    return f"`headfold export --target {target}{larger}` lowers it to a stock one, {cost}"
