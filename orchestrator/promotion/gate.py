"""The gate of a promotion: what a trained candidate must show before it becomes a registered version."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from attention.io import checkpoint
from attention.io.export import compare, export
from attention.io.precision import cast_weights, round_weights
from attention.modeling.modeling import PREFIX, plan_of
from attention.plan import AttentionPlan
from orchestrator.config.schema import SearchConfig
from orchestrator.conversion import loading
from orchestrator.promotion.state import Entry
from orchestrator.search.prepare import SearchSession
from orchestrator.search.trial import TrialContext
from trainers.evaluation import evaluate, measure_cache
from trainers.text.data import read_sequences

OK = "passed"


def check_candidate(entry: Entry, session: SearchSession) -> dict[str, str]:
    """Export a trained candidate and check it. Fills in the entry's `gate`, `checks`, `reasons` (none: passed), and
    what is said of the model that was written; returns the digests of plan, trained and exported weights."""
    context, folder = session.context, session.folder
    entry.gate, entry.checks, entry.reasons = {}, {}, []
    with _check(entry, "loss"):
        _check_loss(entry, session.config)
    assert entry.folder is not None
    plan = AttentionPlan.from_json((folder.trial(entry.trial_id) / "plan.json").read_text(encoding="utf-8"))
    digests = {"plan_digest": plan.digest, "trained_digest": checkpoint.weights_digest(entry.folder)}
    model, dtype = loading.load_model(entry.folder), loading.dtype_of(context.dtype)
    round_weights(model, dtype)  # what is shipped; training may have computed in a wider dtype
    with _check(entry, "cache"):
        _check_cache(model, plan, dtype, entry)
    with _check(entry, "export"):
        try:
            _export(model, plan, dtype, entry, session)
        except ValueError as error:
            entry.reasons.append(f"export failed: {error}")
    if entry.model is not None:
        with _check(entry, "logits"):
            _check_logits(model, entry.model, entry, context, session.config.promotion.logit_tolerance)
        digests["weights_digest"] = checkpoint.weights_digest(entry.model)
    return digests


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
        entry.reasons.append(f"it is the baseline {entry.recipe} itself; nothing was better at this budget")
    elif entry.baseline_loss is None:
        entry.reasons.append(f"there is no baseline {baseline} at this budget to compare with")
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
    planned, tokens = plan.kv_bytes_per_token(dtype), loading.CACHE_TOKENS
    cast_weights(model, dtype)
    held = measure_cache(model, tokens)
    cast_weights(model, torch.float32)
    entry.kv_bytes_per_token = planned
    entry.checks |= {"kv_bytes_per_token": planned, "cache_bytes_measured": held, "cache_tokens": tokens}
    if held != planned * tokens:
        entry.reasons.append(f"the cache holds {held} bytes after {tokens} tokens, planned were {planned * tokens}")


def _export(model: Any, plan: AttentionPlan, dtype: torch.dtype, entry: Entry, session: SearchSession) -> None:
    """Plain GQA where plan and family allow it; else Headfold's own format, under a name that says so."""
    trained, tokenizer = str(entry.folder), session.context.model
    plain = checkpoint.plain_form(model.config, plan) is not None
    name = "exported" if plain else "headfold"
    target = session.folder.promoted / f"{entry.trial_id}-{entry.steps}" / name
    shutil.rmtree(target, ignore_errors=True)  # what a check that was killed has left there
    exact = True
    if plain:
        exact = export(trained, "gqa", target, tokenizer, dtype=dtype).exact
    else:
        whole = checkpoint.load(trained, torch.float32)
        cast_weights(whole, dtype)
        checkpoint.save(whole, target, tokenizer, record=checkpoint.carried(trained))
    entry.checks |= {"export": "gqa" if plain else "headfold", "exact": exact}
    entry.model, entry.plain = str(target), not checkpoint.load_config(target).model_type.startswith(PREFIX)
    entry.exported = entry.model if entry.plain else None


def _check_logits(model: Any, target: str, entry: Entry, context: TrialContext, tolerance: float) -> None:
    """Logits of the exported checkpoint, read back, against the trained model's on held-out text, in float32."""
    back = loading.load_model(target, device=context.device)
    held_out = read_sequences(context.eval_file)[:]
    entry.checks["exported_loss"] = evaluate(back, held_out).loss
    back.to(model.device)
    tokens = held_out[:2]
    with torch.no_grad():
        difference = (model(tokens).logits - back(tokens).logits).abs().max().item()
    difference = max(difference, compare(model, back)[0])
    entry.checks |= {"max_logit_difference": difference, "logit_tolerance": tolerance}
    if not difference <= tolerance:
        entry.reasons.append(
            f"logits of the exported checkpoint differ from the trained model's by {difference:.2g}, allowed are "
            f"{tolerance:g}"
        )
    served = plan_of(back).kv_bytes_per_token(loading.dtype_of(context.dtype))
    if entry.kv_bytes_per_token != served:
        entry.reasons.append(
            f"the exported checkpoint serves {served} KV bytes a token, planned were {entry.kv_bytes_per_token}"
        )
