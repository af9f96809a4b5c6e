"""The losses of a model with its KV cache in the formats of engines."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from attention.cache_formats import CachePair, FormatRecord
from attention.engine_cache import engine_cache
from trainers.evaluation import CachedTeacher, Evaluation, evaluate


class RoundedCacheRow(FormatRecord):
    """A model with its cache rounded as an engine rounds it.

    The increase is relative to an evaluation with a cache that is not rounded.
    """

    loss: float
    kl: float | None


def measure_rounded(
    record: FormatRecord,
    model: PreTrainedModel,
    sequences: Tensor,
    exact: Evaluation,
    teacher: CachedTeacher | None = None,
) -> RoundedCacheRow:
    """Return a record of formats with the losses of a model in them.

    Args:
        record: The formats and their bytes.
        model: With the heads that an engine has in its cache (`with_engine_heads`).
        sequences: The held-out text.
        exact: The evaluation that losses are compared with.
        teacher: The model to compute the KL to.
    """
    with engine_cache(model, CachePair.parse(record["cache_format"])):
        scored = evaluate(model, sequences, teacher=teacher)
    compared = scored.compared(exact)
    return {
        **record,
        "loss": scored.loss,
        "kl": scored.kl,
        "loss_increase": compared["loss_increase"],
        "loss_increase_stderr": compared["loss_increase_stderr"],
    }
