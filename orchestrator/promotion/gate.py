"""The gate of a promotion: what a trained candidate must show before it becomes a registered version."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.checkpoint import Checkpoint
from attention.families import window_of
from attention.io import checkpoint
from attention.io.export import export, largest_difference, probe
from attention.io.precision import cast_weights, round_weights
from attention.modeling.model_classes import TYPE_PREFIX, plan_of
from attention.plan import AttentionPlan
from orchestrator import checkpoints
from orchestrator.cluster.placement import task_options
from orchestrator.cluster.tasks import on_cluster
from orchestrator.config.schema import SearchConfig
from orchestrator.evaluation.extras import NOTHING_MORE
from orchestrator.evaluation.task_files import placed
from orchestrator.promotion.engine_export import check_engine
from orchestrator.promotion.measuring import extras_of, measure_finalist
from orchestrator.promotion.state import Entry
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.storage.paths import SearchFolder
from trainers.evaluation import evaluate, measure_cache
from trainers.text.data import read_sequences

OK = "passed"


def check_candidate(entry: Entry, session: SearchSession) -> dict[str, str]:
    """Export a trained candidate and check it, in a task of the cluster. Fills in the entry's `gate`, `checks`,
    `reasons` (none: passed), and what is said of the model that was written; returns the digests of plan, trained and
    exported weights."""
    config = session.config
    section = config.promotion.model_copy(update={"tasks": placed(config.promotion.tasks)})
    config = config.model_copy(update={"promotion": section})  # the task may run in another folder
    what = f"gate of {entry.name}"
    seen, digests = on_cluster(task_options(config), what, examine, entry, config, session.folder, session.context)
    vars(entry).update(vars(seen))
    return digests


def examine(
    entry: Entry, config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> tuple[Entry, dict[str, str]]:
    """The checks, where the weights may be loaded. One model at a time is held."""
    entry.gate, entry.checks, entry.reasons = {}, {}, []
    with _check(entry, "loss"):
        _check_loss(entry, config)
    assert entry.folder is not None
    plan = AttentionPlan.from_json((folder.trial(entry.trial_id) / "plan.json").read_text(encoding="utf-8"))
    digests = {"plan_digest": plan.digest, "trained_digest": checkpoint.weights_digest(entry.folder)}
    model, dtype = checkpoints.load_model(entry.folder), checkpoints.dtype_of(context.dtype)
    round_weights(model, dtype)  # what is shipped; training may have computed in a wider dtype
    with _check(entry, "cache"):
        _check_cache(model, plan, dtype, entry)
    held_out = read_sequences(context.eval_file)[:]
    with torch.no_grad():
        expected = [model(held_out[:2]).logits, probe(model)]
    plain = checkpoint.plain_form(model.config, plan) is not None
    del model
    with _check(entry, "export"):
        target = folder.promoted / f"{entry.trial_id}-{entry.steps}" / ("exported" if plain else "headfold")
        try:
            _export(target, dtype, entry, context.model)
        except ValueError as error:
            entry.reasons.append(f"export failed: {error}")
    if entry.model is not None:
        with _check(entry, "logits"):
            _check_logits(expected, held_out, entry, context, config.promotion.logit_tolerance)
        if config.search.target != "any":
            with _check(entry, "engine"):
                check_engine(entry, config.search.target)
        if extras_of(config.promotion) != NOTHING_MORE:
            with _check(entry, "worth"):
                measure_finalist(entry, config, context, folder.promoted)
        digests["weights_digest"] = checkpoint.weights_digest(entry.model)
    return entry, digests


@contextlib.contextmanager
def _check(entry: Entry, name: str) -> Iterator[None]:
    """Whatever reason is added within is that check's."""
    before = len(entry.reasons)
    yield
    entry.gate[name] = "; ".join(entry.reasons[before:]) or OK


def _check_loss(entry: Entry, config: SearchConfig) -> None:
    """Better than the baseline at the same KV ratio, each at its best measured step of equally many, and no worse than
    its own untrained conversion. How far the original model is away is recorded."""
    margin, baseline = config.promotion.margin, config.search.baseline
    entry.checks |= entry.compared | {"loss": entry.loss, "shipped": entry.shipped, "margin": margin}
    if entry.recipe == baseline:
        entry.reasons.append(f"it is the baseline {entry.recipe} itself; nothing was better at this KV ratio")
    elif entry.baseline_loss is None:
        entry.reasons.append(f"there is no baseline {baseline} at this KV ratio to compare with")
    elif entry.loss is None or not math.isfinite(entry.loss):
        entry.reasons.append(f"held-out loss is {entry.loss}")
    elif not entry.loss < entry.baseline_loss - margin:
        entry.reasons.append(
            f"held-out loss {entry.loss:.4f} is not below the baseline's {entry.baseline_loss:.4f} by more than "
            f"{margin:g}, each at its best step of the same {entry.steps}"
        )
    elif entry.untrained_loss is not None and entry.loss > entry.untrained_loss:
        entry.reasons.append(
            f"held-out loss {entry.loss:.4f} is above the {entry.untrained_loss:.4f} of its own untrained conversion, "
            "whose weights are gone"
        )


def _check_cache(model: Any, plan: AttentionPlan, dtype: torch.dtype, entry: Entry) -> None:
    """The bytes that the cache really holds in the dtype that is shipped, against the plan of the trial."""
    planned, window = plan.kv_bytes_per_token(dtype), window_of(model.config)
    tokens = (
        min(checkpoints.CACHE_TOKENS, window - 1) if window > 1 else checkpoints.CACHE_TOKENS
    )  # all that is still in view
    cast_weights(model, dtype)
    held = measure_cache(model, tokens)
    cast_weights(model, torch.float32)
    entry.kv_bytes_per_token = planned
    entry.checks |= {"kv_bytes_per_token": planned, "cache_bytes_measured": held, "cache_tokens": tokens}
    if held != planned * tokens:
        entry.reasons.append(f"the cache holds {held} bytes after {tokens} tokens, planned were {planned * tokens}")


def _export(target: Path, dtype: torch.dtype, entry: Entry, tokenizer: str) -> None:
    """Plain GQA where plan and family allow it; else Headfold's own format, under a name that says so."""
    trained, plain = str(entry.folder), target.name == "exported"
    shutil.rmtree(target, ignore_errors=True)  # what a check that was killed has left there
    exact = True
    if plain:
        exact = export(trained, "gqa", target, tokenizer, dtype=dtype).exact
    else:
        whole = checkpoint.load(trained, torch.float32)
        cast_weights(whole, dtype)
        checkpoint.save(whole, target, tokenizer, record=checkpoint.carried(trained))
    entry.checks |= {"export": "gqa" if plain else "headfold", "exact": exact}
    entry.model, entry.plain = str(target), not Checkpoint.open(target).config.model_type.startswith(TYPE_PREFIX)
    entry.exported = entry.model if entry.plain else None


def _check_logits(
    expected: list[Tensor], held_out: Tensor, entry: Entry, context: TrialContext, tolerance: float
) -> None:
    """Logits of the exported checkpoint, read back, against the trained model's on held-out text, in float32."""
    back = checkpoints.load_model(str(entry.model), device=context.device)
    entry.checks["exported_loss"] = evaluate(back, held_out).loss
    back.cpu()  # where the trained model's were computed
    with torch.no_grad():
        logits = [back(held_out[:2]).logits, probe(back)]
    difference = max(map(largest_difference, expected, logits))
    entry.checks |= {"max_logit_difference": difference, "logit_tolerance": tolerance}
    if not difference <= tolerance:
        entry.reasons.append(
            f"logits of the exported checkpoint differ from the trained model's by {difference:.2g}, allowed are "
            f"{tolerance:g}"
        )
    served = plan_of(back).kv_bytes_per_token(checkpoints.dtype_of(context.dtype))
    if entry.kv_bytes_per_token != served:
        entry.reasons.append(
            f"the exported checkpoint serves {served} KV bytes per token, planned were {entry.kv_bytes_per_token}"
        )
