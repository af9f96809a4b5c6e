"""A model with its KV cache as an engine holds it (`attention.cache_formats`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from attention.cache_formats import LLAMA_CPP, CacheFormatError, CachePair
from attention.io.targets._gguf.architectures import key_order
from attention.io.wide_form import WideFormError, to_wide
from attention.modeling.model_classes import plan_of
from attention.modeling.rounded_cache import Scales, rounded_cache


def with_engine_heads(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the heads that an engine has in its cache.

    Wide heads, which Headfold stores in slices, become heads of a larger head dim: an engine's
    blocks are of neighbours in that. Any other model is returned unchanged. Parameters outside of
    attention share `model`'s memory.

    Raises:
        CacheFormatError: For wide heads that no stock model has.
    """
    if not plan_of(model).is_wide:
        return model
    try:
        return to_wide(model)
    except WideFormError as error:
        raise CacheFormatError(f"no engine holds these heads: {error}") from None


def engine_cache(
    model: PreTrainedModel, pair: CachePair | None, *, scales: Sequence[Scales] | None = None
) -> AbstractContextManager[None]:
    """Let a model read keys and values as an engine holds them in the formats `pair`.

    As `attention.modeling.rounded_cache.rounded_cache`, with the dims of heads in the order that
    llama.cpp has for this model: its blocks are of neighbours there.

    Raises:
        CacheFormatError: For wide heads in slices (see `with_engine_heads`).
    """
    plan = plan_of(model)
    if pair is not None and plan.is_wide:
        raise CacheFormatError(
            "an engine rounds wide heads in the order of their stock form, and this model keeps "
            "them in slices: take `with_engine_heads` of it"
        )
    order = None
    if pair is not None and LLAMA_CPP in pair.engines:
        order = key_order(model.config, plan)
    return rounded_cache(model, pair, scales=scales, key_order=order)
