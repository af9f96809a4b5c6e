"""Stock models that vLLM 0.32 does not compute, or not with any heads."""

from __future__ import annotations

from typing import Any

from attention.families import family_of, geometry_of
from attention.io.targets import TargetError
from attention.io.targets._pairs import query_heads_for_all
from attention.plan import AttentionPlan


def check_computed(config: Any) -> None:
    """Raise TargetError for a variant of a family that vLLM does not compute."""
    family = family_of(config).name
    if family == "stablelm" and config.qk_layernorm:
        raise TargetError(
            "vLLM has no stablelm whose queries and keys are normalised (qk_layernorm=true)"
        )
    if family == "olmoe" and config.rms_norm_eps != 1e-5:
        raise TargetError(
            f"vLLM's olmoe has norms with an epsilon of 1e-5, the model of {config.rms_norm_eps:g}"
        )


def takes_width(config: Any, plan: AttentionPlan, query_heads: int | None = None) -> bool:
    """Whether vLLM takes query heads of the width that they have together.

    Its qwen2 takes that of the model: neither padded heads nor wide ones, which the query heads
    then are as well.

    Args:
        config: Of the checkpoint.
        plan: Its plan.
        query_heads: Query heads of a layer in the stock form (default: as few as suit all layers).
    """
    if family_of(config).name != "qwen2":
        return True
    of_head = plan.head_dim * max(max(layer.widths) for layer in plan.layers)
    return (query_heads or query_heads_for_all(plan)) * of_head == geometry_of(config).hidden_size


def without_vllm(
    config: Any, plan: AttentionPlan, query_heads: int | None = None
) -> tuple[str, ...]:
    """Return vLLM where it does not compute the stock form of a plan (`Target.except_for`).

    Arguments are those of `takes_width`.
    """
    try:
        check_computed(config)
    except TargetError:
        return ("vLLM",)
    return () if takes_width(config, plan, query_heads) else ("vLLM",)
