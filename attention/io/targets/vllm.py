"""vLLM: a stock folder where one KV head count serves all layers, else DeciLM, which has a count of its own in each.

DeciLM is vLLM's `DeciLMForCausalLM` (file `nemotron_nas`): Llama with `block_configs[l].attention.n_heads_in_group`. It
has one number N of query heads for all layers, which every layer's KV heads must divide: zero query heads make up the
rest (`attention.io.targets._pairs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from attention.families import family_of
from attention.io.targets import Held, Lowered, Target, TargetError, _stock, gqa
from attention.io.targets._pairs import check_no_composition, kv_heads_of, query_heads_for_all, widths_of, window_of
from attention.plan import AttentionPlan

LLAMA_LIKE = ("llama", "mistral", "qwen2")
MOST_QUERY_HEADS = 8
"""Times a model's own query heads that may be written, zeros included: beyond it attention is no bargain."""


def held(config: Any, plan: AttentionPlan) -> Held:
    """A count of its own in each layer for Llama-like families, else one for all as target gqa. Raises TargetError for
    composition, for groups where vLLM's family has none, and for counts with no small common multiple."""
    check_no_composition(plan, "vllm")
    counts, family = kv_heads_of(plan), family_of(config).name
    if family == "phi" and (grouped := [i for i, width in enumerate(widths_of(plan)) if width > 1]):
        raise TargetError(
            f"layer {grouped[0]} has {counts[grouped[0]]} KV heads for {plan.num_heads} query heads, and vLLM's Phi "
            "takes as many KV heads as query heads; export to target gqa for transformers"
        )
    if not has_own_counts(config, plan):
        return gqa.held(config, plan)
    if (heads := query_heads_for_all(plan)) > MOST_QUERY_HEADS * plan.num_heads:
        index = max(range(len(counts)), key=lambda i: counts[: i + 1].index(counts[i]))
        raise TargetError(
            f"layer {index} has {counts[index]} KV heads beside {sorted(set(counts) - {counts[index]})} in other "
            f"layers: one number of query heads that all divide is {heads}, more than {MOST_QUERY_HEADS} times the "
            f"model's {plan.num_heads}; choose counts that divide each other, or export to target gguf"
        )
    return Held.of(counts, plan.head_dim)


def has_own_counts(config: Any, plan: AttentionPlan) -> bool:
    """Whether a plan is written as DeciLM: its layers differ, and the family's maths is Llama's."""
    return family_of(config).name in LLAMA_LIKE and not window_of(config) and len(set(kv_heads_of(plan))) > 1


def lower(model: PreTrainedModel) -> Lowered:
    raise NotImplementedError


def write(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any = None) -> str:
    raise NotImplementedError


TARGET = Target("vllm", ("vLLM",), held, lower, write, _stock.read)
