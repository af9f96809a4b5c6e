"""The software that loads a folder, and what a stock export would need (`attention.io.targets`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attention.checkpoint import Checkpoint
from attention.families import family_of
from attention.io.targets import EngineSupport, TargetError, targets
from attention.io.targets._vllm import without_vllm
from attention.modeling.model_classes import TYPE_PREFIX
from attention.plan import AttentionPlan

ALL = ("transformers", "vLLM", "llama.cpp")


def format_of(folder: str | Path | Checkpoint, dtype: Any) -> dict[str, Any]:
    """Return the format of a checkpoint whose KV cache is stored in `dtype`.

    `format` ("stock" or "headfold"), `loads_in` (software that loads it), and both in one line for
    people, with the next command (`format_note`); for Headfold's own format also `padding`: for
    each target that stores the plan at its own size, the query heads of zeros
    (`EngineSupport.zero_query_heads`) that it adds, if any, and their share of the operations of
    attention.
    """
    opened = Checkpoint.open(folder)
    config = opened.config
    plan = opened.plan
    folder = opened.path
    if config.model_type.startswith(TYPE_PREFIX):
        note = f"Headfold's own format ({_reason(plan)}), which stock software does not load"
        support = support_by_target(config, plan)
        padding = {}
        for name in exact_targets(config, plan, dtype):
            if zeros := support[name].zero_query_heads(plan):
                padding[name] = {
                    "zero_query_heads": zeros,
                    "extra_attention": support[name].extra_attention(plan),
                }
        way_out = _way_out(folder, config, plan, dtype, padding)
        facts = {
            "format": "headfold",
            "loads_in": ["headfold"],
            "format_note": f"{note}; {way_out}",
        }
        return facts | ({"padding": padding} if padding else {})
    supported = support_by_target(config, plan)
    readers = _readers(config, plan, supported)
    direct = [software for software in readers if software != ALL[2]]
    commands = []
    if ALL[1] in direct:
        commands.append(f"`vllm serve {shlex.quote(str(folder))}`")
    elif "vllm" in supported:  # in another form than the stock one
        commands.append(f"`{export_command(folder, 'vllm')}`, for {ALL[1]}")
    if ALL[2] in readers:  # as the one file that it reads
        commands.append(f"`{export_command(folder, 'gguf')}`, for {ALL[2]}")
    name = (
        family_of(config)
        .model_class.__name__.removesuffix("ForCausalLM")
        .removesuffix("LMHeadModel")
    )
    load = f"{' and '.join(direct)} load{'s' * (len(direct) == 1)} as it is"
    note = ": ".join(
        [f"a stock {name} checkpoint, which {load}", *filter(None, [" or ".join(commands)])]
    )
    return {"format": "stock", "loads_in": list(readers), "format_note": note}


def export_command(folder: str | Path, target: str, *options: str) -> str:
    """Return the command that exports a checkpoint, into a folder next to it."""
    return shlex.join(
        [
            "headfold",
            "export",
            str(folder),
            "--target",
            target,
            "--out",
            f"{folder}-{target}",
            *options,
        ]
    )


def exact_targets(config: Any, plan: AttentionPlan, dtype: Any) -> dict[str, int]:
    """Return the targets that hold a plan in its own bytes, and how many those are per token.

    An engine's own formats first, those that need code in the folder last.
    """
    before = plan.kv_bytes_per_token(dtype)
    takes = {
        name: support.bytes_per_token(dtype)
        for name, support in support_by_target(config, plan).items()
    }
    with_code = ("per_layer", "transformers")
    order = sorted(takes, key=lambda name: (name in with_code, name == "gguf", name))
    return {name: takes[name] for name in order if takes[name] <= before}


def support_by_target(config: Any, plan: AttentionPlan) -> dict[str, EngineSupport]:
    """Return the caches of the engines of each target that can represent a plan."""
    support = {}
    for name, one in targets().items():
        with suppress(TargetError):
            support[name] = one.support_for(config, plan)
    return support


def _readers(
    config: Any, plan: AttentionPlan, supported: Mapping[str, EngineSupport]
) -> tuple[str, ...]:
    """Return the software that loads a stock folder, llama.cpp by way of target gguf."""
    reads = {
        ALL[0]: True,
        ALL[1]: "vllm" in supported and not without_vllm(config, plan),
        ALL[2]: "vllm" in supported and "gguf" in supported,
    }
    return tuple(name for name in ALL if reads[name])


def _reason(plan: AttentionPlan) -> str:
    if plan.composition is not None:
        return "heads are composed"
    if plan.is_shared:
        return "layers share weights"
    if any(layer.key_map != layer.value_map for layer in plan.layers):
        return "keys and values have different groups"
    if len({layer.key_heads for layer in plan.layers}) > 1:
        return "layers have different numbers of KV heads"
    return (
        "the family has no stock form with groups"
        if plan.is_uniform_gqa
        else "groups are of different sizes"
    )


def _way_out(
    folder: str | Path,
    config: Any,
    plan: AttentionPlan,
    dtype: Any,
    padding: Mapping[str, Mapping[str, float]],
) -> str:
    """Return the command that writes what engines load.

    It keeps the plan's own bytes if a target can, else it writes the stock form, which takes more.
    """
    before = plan.kv_bytes_per_token(dtype)
    if exact := exact_targets(config, plan, dtype):
        first, *rest = exact
        engines = {
            name: " and ".join(targets()[name].engines_of(config, plan))
            + _more_work(padding.get(name))
            for name in exact
        }
        also = ", ".join(f"--target {name} for {engines[name]}" for name in rest)
        command = (
            f"`{export_command(folder, first)}` writes it for {engines[first]} at the same "
            f"{before} KV bytes"
        )
        return f"{command} per token" + f" ({also})" * bool(also)
    support = support_by_target(config, plan)
    for name in ("gqa", "phi"):
        if name in support:
            command = export_command(folder, name, "--allow-larger-cache")
            takes = support[name].bytes_per_token(dtype)
            return (
                f"`{command}` lowers it to a stock one, at {takes} KV bytes per token instead of "
                f"{before}"
            )
    return (
        "no stock format supports this plan: load it with attention.io.checkpoint.load of Headfold"
    )


def _more_work(padding: Mapping[str, float] | None) -> str:
    return (
        ""
        if padding is None
        else f" with {100 * padding['extra_attention']:.3g} % more work in attention"
    )
