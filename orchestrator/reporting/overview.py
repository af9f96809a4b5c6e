"""The table at the top of a report: the promoted models of a search, else its best trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from attention.base.text import number
from attention.plan import BYTES
from attention.ratios import percent
from orchestrator.reporting.comparison import KV_COLUMN, NO_VALUE
from orchestrator.reporting.evaluation_tables import tokens_per_gb
from orchestrator.reporting.promoted_models import PromotedModel
from orchestrator.reporting.tables import Table
from orchestrator.storage.records import (
    OriginalRecord,
    TrialRecord,
    best_per_budget,
    counts_per_gpu,
    promoted_bytes,
    served_bytes,
)

_COLUMNS = (
    "model",
    KV_COLUMN,
    "perplexity",
    "loss increase",
    "tokens/GB, 16 bits",
    "tokens/GB, 8 bits",
    "engines",
    "path",
)
_NOTE = (
    "Perplexity and loss (nats per token) are of held-out text; ± is the standard error of the "
    "increase over its sequences. Tokens/GB: tokens in 1e9 bytes of KV cache in 16 bits, and in 8 "
    "bits as fp8 of vLLM (q8_0 of llama.cpp takes 6 % more). Paths are relative to "
)
_PER_GPU_NOTE = f"Tokens/GB count the bytes on each GPU of the search. {_NOTE}"


def overview_table(
    root: Path,
    trials: Sequence[TrialRecord],
    original: OriginalRecord,
    models: Sequence[PromotedModel],
) -> Table:
    """Return a row for the original model, and one for each result, the largest cache first.

    Args:
        root: Folder of the search.
        trials: Without probes.
        original: The original model.
        models: The promoted models; without any, the best trial at each KV ratio has a row.
    """
    own_loss, own_size = original["loss"], served_bytes(original)
    rows = [
        [
            f"{Path(str(original.get('model', ''))).name or 'model'} (original)",
            "100%",
            number(math.exp(own_loss), ".2f"),
            NO_VALUE,
            *_tokens(own_size, original),
            NO_VALUE,
            str(original.get("model") or NO_VALUE),
        ]
    ]
    for model in reversed(models):
        error = model["loss_increase_stderr"]
        engines = [service["engine"] for service in model["serve"] if "commands" in service]
        rows.append(
            [
                model["label"],
                percent(model["kv_ratio"]),
                _perplexity(model["loss"], own_loss),
                number(model["loss_increase"], "+z.3f") + (f" ± {error:.3f}" if error else ""),
                *_tokens(promoted_bytes(model, trials), original),
                ", ".join(engines) or NO_VALUE,
                _path(model["path"], root),
            ]
        )
    for trial in () if models else best_per_budget(trials).values():
        rows.append(
            [
                trial.label,
                percent(trial.kv_ratio),
                _perplexity(trial.loss, own_loss),
                number(trial.loss - own_loss, "+z.3f"),
                *_tokens(trial.served_bytes, original),
                NO_VALUE,
                f"trials/{trial.trial_id}",
            ]
        )
    note = _PER_GPU_NOTE if counts_per_gpu(original) else _NOTE
    return Table(_COLUMNS, rows, notes=[f"{note}{root}."])


def _perplexity(loss: float | None, own_loss: float) -> str:
    if loss is None:
        return NO_VALUE
    return f"{math.exp(loss):.2f} ({100 * math.expm1(loss - own_loss):+,.1f} %)"


def _tokens(size: int | None, original: OriginalRecord) -> tuple[str, str]:
    """Return the tokens per GB in 16 and in 8 bits for a size in the dtype of the search."""
    if not size:
        return NO_VALUE, NO_VALUE
    values = size / BYTES[original.get("dtype", "bfloat16")]
    return f"{tokens_per_gb(2 * values):,}", f"{tokens_per_gb(values):,}"


def _path(path: str | None, root: Path) -> str:
    if path is None:
        return NO_VALUE
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
