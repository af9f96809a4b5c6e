"""Code that all engines share for wide heads: they are a model of a larger head dim.

Targets are called with that model (`attention.io.wide_form`), whose plan has no wide heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from attention.conversion.convert import unshare
from attention.io.targets import EngineSupport, Lowered, TargetError
from attention.io.wide_form import WideFormError, to_wide, wide_config
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan

SupportFor = Callable[[Any, AttentionPlan], EngineSupport]
Lower = Callable[[PreTrainedModel], Lowered]


def support_wide(support_for: SupportFor) -> SupportFor:
    """Wrap `support_for`: it is called with the model of a larger head dim where heads are wide."""

    def support_for_wide(config: Any, plan: AttentionPlan) -> EngineSupport:
        if not plan.is_wide:
            return support_for(config, plan)
        try:
            return support_for(*wide_config(config, plan))
        except WideFormError as error:
            raise TargetError(str(error)) from None

    return support_for_wide


def lowering_wide(lower: Lower) -> Lower:
    """Return `lower` that is given the model of a larger head dim where heads are wide."""

    def lower_wide(model: PreTrainedModel) -> Lowered:
        plan = plan_of(model)
        if not plan.is_wide:
            return lower(model)
        try:
            lowered = lower(to_wide(unshare(model)))
        except WideFormError as error:
            raise TargetError(str(error)) from None
        head_dim = plan_of(lowered.model).head_dim
        note = f"head dim {head_dim}; rotary frequencies by the factors of longrope"
        return replace(lowered, notes=(note, *lowered.notes))

    return lower_wide
