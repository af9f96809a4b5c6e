"""What loads a folder, and what an export to a stock form would take (`attention.io.targets`)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from attention.families import family_of
from attention.io.checkpoint import load_config
from attention.io.targets import TargetError, kv_bytes_in, targets
from attention.io.targets._gguf.architectures import OF_FAMILY
from attention.io.targets._pairs import widths_of
from attention.modeling.modeling import PREFIX, plan_of_config
from attention.plan import AttentionPlan

ALL = ("transformers", "vLLM", "llama.cpp")


def format_of(folder: str | Path, dtype: Any) -> dict[str, Any]:
    """What a checkpoint is, its KV cache being held in `dtype`: `format` ("stock" or "headfold"), `loads_in` (software
    that loads it), and both in one line for people (`format_note`)."""
    config = load_config(folder)
    plan = plan_of_config(config)
    if not config.model_type.startswith(PREFIX):
        readers = _readers(config, plan)
        direct = [software for software in readers if software != ALL[2]]
        load = f"{' and '.join(direct)} load{'s' * (len(direct) == 1)} it"
        if len(direct) < len(readers):  # as the one file that it reads
            load += f", and {ALL[2]} after `headfold export --target gguf`"
        name = family_of(config).model_class.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        return {"format": "stock", "loads_in": list(readers), "format_note": f"a stock {name} checkpoint: {load}"}
    note = f"Headfold's own format ({_reason(plan)}), which stock software does not load"
    way_out = _way_out(config, plan, dtype)
    return {"format": "headfold", "loads_in": ["headfold"], "format_note": f"{note}; {way_out}"}


def _readers(config: Any, plan: AttentionPlan) -> tuple[str, ...]:
    """Those that were tried: llama.cpp reads a Phi folder as if it had as many KV heads as query heads (use target
    gguf), and other families than those of that target were not tried in it."""
    name = family_of(config).name
    grouped_phi = name == "phi" and max(widths_of(plan)) > 1
    known = ALL if name in OF_FAMILY and not grouped_phi else ALL[:2]
    try:
        kv_bytes_in("vllm", config, plan, "float32")
    except TargetError:
        return ALL[:1]
    return known


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
    """The targets that hold the plan in its own bytes; else the stock one that takes more."""
    before, takes = plan.kv_bytes_per_token(dtype), {}
    for name in targets():
        with suppress(TargetError):
            takes[name] = kv_bytes_in(name, config, plan, dtype)
    if exact := [name for name, after in takes.items() if after <= before]:
        ways = ", ".join(f"--target {name} ({', '.join(targets()[name].engines)})" for name in exact)
        return f"`headfold export` writes it at the same {before} KV bytes per token with {ways}"
    for name in ("gqa", "phi"):
        if name in takes:
            more = f"{takes[name]} KV bytes per token instead of {before}"
            return f"`headfold export --target {name} --allow-larger-cache` lowers it to a stock one, at {more}"
    return "no stock format holds this plan"
