"""A model with its KV cache as an engine holds it (`attention.cache_formats`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from attention.cache_formats import LLAMA_CPP, CacheFormatError, CachePair
from attention.io.targets._gguf.architectures import key_order
from attention.modeling.model_classes import plan_of
from attention.modeling.rounded_cache import Scales, rounded_cache


def engine_cache(
    model: PreTrainedModel, pair: CachePair | None, *, scales: Sequence[Scales] | None = None
) -> AbstractContextManager[None]:
    """Let a model read keys and values as an engine holds them in the formats `pair`.

    As `attention.modeling.rounded_cache.rounded_cache`, with the dims of heads in the order that
    llama.cpp has for this model: its blocks are of neighbours there.

    Raises:
        CacheFormatError: For wide heads in Headfold's own format.
    """
    plan = plan_of(model)
    if pair is not None and plan.is_wide:
        raise CacheFormatError(
            "an engine rounds wide heads in the order of their stock form, and this model keeps "
            "them in slices; export it (`headfold export`), and evaluate the folder"
        )
    order = None
    if pair is not None and LLAMA_CPP in pair.engines:
        order = key_order(model.config, plan)
    return rounded_cache(model, pair, scales=scales, key_order=order)
