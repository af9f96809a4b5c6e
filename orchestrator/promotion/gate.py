"""The gate of a promotion: what a trained candidate must show before it becomes a registered version."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attention.io import checkpoint
from attention.io.export import compare, export
from attention.io.precision import cast_weights, round_weights
from attention.modeling.modeling import PREFIX, plan_of
from attention.plan import AttentionPlan
from orchestrator.config.schema import SearchConfig
from orchestrator.conversion import loading
from orchestrator.search.trial import TrialContext
from orchestrator.storage.paths import SearchFolder
from trainers.evaluation import measure_cache
from trainers.text.data import read_sequences

if TYPE_CHECKING:
    from orchestrator.promotion.state import Entry


OK = "passed"


@dataclass
class Checks:
    """What the gate measured, and why to refuse (no reason: passed).

    `outcomes`: of each check by name, "passed" or its reasons. `model`: the folder that was written; `plain`: stock
    transformers loads it.
    """

    record: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    plain: bool = False
    kv_bytes_per_token: int | None = None
    digests: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Whatever reason is added within is that check's."""
        before = len(self.reasons)
        yield
        self.outcomes[name] = "; ".join(self.reasons[before:]) or OK


def check_candidate(entry: Entry, config: SearchConfig, context: TrialContext, folder: SearchFolder) -> Checks:
    """Export a trained candidate and check it. Never raises for a candidate that fails: the reasons say why."""
    checks = Checks()
    with checks.check("loss"):
        _check_loss(entry, config, checks)
    assert entry.folder is not None
    plan = AttentionPlan.from_json((folder.trial(entry.trial_id) / "plan.json").read_text(encoding="utf-8"))
    checks.digests = {"plan_digest": plan.digest, "trained_digest": checkpoint.weights_digest(entry.folder)}
    model = loading.load_model(entry.folder)
    round_weights(
        model, loading.dtype_of(context.dtype)
    )  # what is shipped; training may have computed in a wider dtype
    with checks.check("cache"):
        _check_cache(model, plan, loading.dtype_of(context.dtype), checks)
    with checks.check("export"):
        try:
            _export(model, entry, plan, context, folder, checks)
        except ValueError as error:
            checks.reasons.append(f"export failed: {error}")
    if checks.model is not None:
        with checks.check("logits"):
            _check_logits(model, checks.model, config, context, checks)
        checks.digests["weights_digest"] = checkpoint.weights_digest(checks.model)
    return checks


def _check_loss(entry: Entry, config: SearchConfig, checks: Checks) -> None:
    """Better than the baseline at the same budget, each at its best measured step of equally many, and no worse than
    its own untrained conversion. How far the original model is away is recorded."""
    checks.record |= {
        "loss": entry.loss,
        "best_step": entry.best_step,
        "shipped": entry.shipped,
        "last_loss": entry.last_loss,
        "untrained_loss": entry.untrained_loss,
        "baseline_loss": entry.baseline_loss,
        "baseline_step": entry.baseline_step,
        "original_loss": entry.original_loss,
        "margin": config.promotion.margin,
    }
    if entry.recipe == config.search.baseline:
        checks.reasons.append(f"it is the baseline {entry.recipe} itself; nothing was better at this budget")
    elif entry.baseline_loss is None:
        checks.reasons.append(f"there is no baseline {config.search.baseline} at this budget to compare with")
    elif entry.loss is None or not math.isfinite(entry.loss):
        checks.reasons.append(f"held-out loss is {entry.loss}")
    elif not entry.loss < entry.baseline_loss - config.promotion.margin:
        checks.reasons.append(
            f"held-out loss {entry.loss:.4f} is not below the baseline's {entry.baseline_loss:.4f} by more than "
            f"{config.promotion.margin:g}, each at its best step of the same {entry.steps}"
        )
    elif entry.untrained_loss is not None and entry.loss > entry.untrained_loss:
        checks.reasons.append(
            f"held-out loss {entry.loss:.4f} is above the {entry.untrained_loss:.4f} of its own untrained conversion, "
            "whose weights are gone"
        )


def _check_cache(model: Any, plan: AttentionPlan, dtype: torch.dtype, checks: Checks) -> None:
    """The bytes that the cache really holds in the dtype that is shipped, against the plan of the trial.

    `model`: in float32, its weights rounded to `dtype`, and so again when this returns.
    """
    planned = plan.kv_bytes_per_token(dtype)
    cast_weights(model, dtype)
    held = measure_cache(model, loading.CACHE_TOKENS)
    cast_weights(model, torch.float32)
    checks.kv_bytes_per_token = planned
    checks.record |= {
        "kv_bytes_per_token": planned,
        "cache_bytes_measured": held,
        "cache_tokens": loading.CACHE_TOKENS,
    }
    if held != planned * loading.CACHE_TOKENS:
        checks.reasons.append(
            f"the cache holds {held} bytes after {loading.CACHE_TOKENS} tokens, planned were "
            f"{planned * loading.CACHE_TOKENS}"
        )


def _export(
    model: Any, entry: Entry, plan: AttentionPlan, context: TrialContext, folder: SearchFolder, checks: Checks
) -> None:
    """Plain GQA where plan and family allow it; else Headfold's own format, under a name that says so.

    In the dtype of the search's checkpoint, whatever training has computed in.
    """
    trained, dtype = str(entry.folder), loading.dtype_of(context.dtype)
    place = folder.promoted / f"{entry.trial_id}-{entry.steps}"
    if checkpoint.plain_form(model.config, plan) is not None:
        target = _free(place / "exported")
        report = export(trained, "gqa", target, context.model, dtype=dtype)
        checks.record |= {"export": "gqa", "exact": report.exact}
    else:
        target = _free(place / "headfold")
        whole = checkpoint.load(trained, torch.float32)
        cast_weights(whole, dtype)
        checkpoint.save(whole, target, context.model, record=checkpoint.carried(trained))
        checks.record |= {"export": "headfold", "exact": True}
    checks.model = str(target)
    checks.plain = not checkpoint.load_config(target).model_type.startswith(PREFIX)


def _free(target: Path) -> Path:
    """Without what a check that was killed has left there: the folder is the search's own."""
    shutil.rmtree(target, ignore_errors=True)
    return target


def _check_logits(model: Any, target: str, config: SearchConfig, context: TrialContext, checks: Checks) -> None:
    """Logits of the exported checkpoint, read back, against the trained model's on held-out text, in float32.

    `model`: the trained one, its weights rounded to the dtype of the export. The export's own held-out loss is kept.
    """
    back = loading.load_model(target, device=context.device)
    held_out = read_sequences(context.eval_file)
    checks.record["exported_loss"] = loading.score(back, held_out).loss
    back.to(model.device)
    tokens = held_out[:2]
    with torch.no_grad():
        difference = (model(tokens).logits - back(tokens).logits).abs().max().item()
    random_difference, _ = compare(model, back)
    difference = max(difference, random_difference)
    checks.record |= {"max_logit_difference": difference, "logit_tolerance": config.promotion.logit_tolerance}
    if not difference <= config.promotion.logit_tolerance:
        checks.reasons.append(
            f"logits of the exported checkpoint differ from the trained model's by {difference:.2g}, allowed are "
            f"{config.promotion.logit_tolerance:g}"
        )
    served = plan_of(back).kv_bytes_per_token(loading.dtype_of(context.dtype))
    if checks.kv_bytes_per_token != served:
        checks.reasons.append(
            f"the exported checkpoint serves {served} KV bytes a token, planned were {checks.kv_bytes_per_token}"
        )
