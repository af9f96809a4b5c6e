"""The gate of a promotion: what a trained candidate must show before it becomes a registered version."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attention import checkpoint
from attention.export import compare, export
from attention.modeling import plan_of
from attention.plan import AttentionPlan
from orchestrator import models
from orchestrator.config import ConfigError, SearchConfig
from orchestrator.folders import SearchFolder
from orchestrator.trial import TrialContext
from trainers.data import read_sequences
from trainers.evaluation import measure_cache

if TYPE_CHECKING:
    from orchestrator.promotion_state import Entry


OK = "passed"


@dataclass
class Checks:
    """What the gate measured, and why to refuse (no reason: passed).

    `outcomes`: of each check by name, "passed" or its reasons. `plain`: stock transformers loads the export.
    """

    record: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    exported: str | None = None
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
    model = models.load_model(entry.folder)
    with checks.check("cache"):
        _check_cache(model, plan, checks)
    target = folder.promoted / f"{entry.trial_id}-{entry.steps}" / "exported"
    with checks.check("export"):
        try:
            _export(entry.folder, target, plan, context, checks)
        except ValueError as error:
            checks.reasons.append(f"export failed: {error}")
    if checks.exported is not None:
        with checks.check("logits"):
            _check_logits(model, target, config, context, checks)
        checks.digests["weights_digest"] = checkpoint.weights_digest(target)
    return checks


def _check_loss(entry: Entry, config: SearchConfig, checks: Checks) -> None:
    """Better than the baseline at the same budget after the same tokens."""
    checks.record |= {"loss": entry.loss, "baseline_loss": entry.baseline_loss, "margin": config.promotion.margin}
    if entry.recipe == config.search.baseline:
        checks.reasons.append(f"it is the baseline {entry.recipe} itself; nothing was better at this budget")
    elif entry.baseline_loss is None:
        checks.reasons.append(f"there is no baseline {config.search.baseline} at this budget to compare with")
    elif entry.loss is None or not math.isfinite(entry.loss):
        checks.reasons.append(f"held-out loss is {entry.loss}")
    elif not entry.loss < entry.baseline_loss - config.promotion.margin:
        checks.reasons.append(
            f"held-out loss {entry.loss:.4f} is not below the baseline's {entry.baseline_loss:.4f} by more than "
            f"{config.promotion.margin:g} after the same {entry.steps} steps"
        )


def _check_cache(model: Any, plan: AttentionPlan, checks: Checks) -> None:
    """The bytes that the cache really holds, against the plan of the trial."""
    planned = plan.kv_bytes_per_token(model.dtype)
    held = measure_cache(model, models.CACHE_TOKENS)
    checks.kv_bytes_per_token = planned
    checks.record |= {
        "kv_bytes_per_token": planned,
        "cache_bytes_measured": held,
        "cache_tokens": models.CACHE_TOKENS,
    }
    if held != planned * models.CACHE_TOKENS:
        checks.reasons.append(
            f"the cache holds {held} bytes after {models.CACHE_TOKENS} tokens, planned were "
            f"{planned * models.CACHE_TOKENS}"
        )


def _export(trained: str, target: Path, plan: AttentionPlan, context: TrialContext, checks: Checks) -> None:
    """Plain GQA where the plan allows it, Headfold's own format otherwise (no stock format holds the plan)."""
    try:
        tokenizer = models.load_tokenizer(context.model)
    except ConfigError:
        tokenizer = None
    checks.plain = plan.is_uniform_gqa
    if plan.is_uniform_gqa:
        report = export(trained, "gqa", target, tokenizer)
        checks.record |= {"export": "gqa", "exact": report.exact}
    else:
        checkpoint.save(checkpoint.load(trained), target, tokenizer)
        checks.record |= {"export": "headfold", "exact": True}
    checks.exported = str(target)


def _check_logits(model: Any, target: Path, config: SearchConfig, context: TrialContext, checks: Checks) -> None:
    """Logits of the exported checkpoint, read back, against the trained model's on held-out text, in float32."""
    back = models.load_model(target)
    tokens = read_sequences(context.eval_file)[:2]
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
    exported_plan = plan_of(back)
    if checks.kv_bytes_per_token != exported_plan.kv_bytes_per_token(model.dtype):
        checks.reasons.append(
            f"the exported checkpoint serves {exported_plan.kv_bytes_per_token(model.dtype)} KV bytes a token, planned "
            f"were {checks.kv_bytes_per_token}"
        )
