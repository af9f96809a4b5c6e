"""The gate of a promotion: the checks that a trained candidate passes before it is registered."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from attention.base.messages import reason
from attention.checkpoint import Checkpoint
from attention.families import window_of
from attention.io import checkpoint
from attention.io.export import export, largest_difference, probe
from attention.io.precision import cast_weights, round_weights
from attention.io.rounding_noise import logit_tolerance
from attention.modeling.model_classes import TYPE_PREFIX, plan_of
from attention.plan import AttentionPlan
from orchestrator import checkpoints
from orchestrator.cluster.placement import task_options
from orchestrator.cluster.ray_tasks import each_on_cluster
from orchestrator.config.schema import SearchConfig
from orchestrator.evaluation.extras import NO_EXTRAS
from orchestrator.evaluation.task_files import with_absolute_paths
from orchestrator.promotion.engine_export import export_for_engine
from orchestrator.promotion.measuring import (
    extras_of,
    limit_violations,
    score_finalist,
    score_reference,
)
from orchestrator.promotion.paired_losses import (
    DocumentLosses,
    LossDifference,
    document_losses,
    paired_bootstrap,
)
from orchestrator.promotion.state import GateRecord, PromotionEntry, TrainedModel
from orchestrator.search.trials.context import SearchSession, TrialContext
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.promotion_record import FinalistScores, GateChecks
from trainers.evaluation import evaluate, measure_cache
from trainers.text.data import read_sequences

OK = "passed"
_DIGITS = 16  # hexadecimal, of a SHA-256
_SETTINGS = (
    "margin",
    "margin_standard_errors",
    "logit_tolerance",
    "tasks",
    "max_task_drop",
    "prompts",
    "context_lengths",
    "max_recall_drop",
)


@dataclass(frozen=True)
class ModelDigests:
    """Digests of the plan and of the weights before and after the export."""

    plan: str
    trained: str
    exported: str | None


@dataclass(frozen=True)
class GateResult:
    """The gate's decision on a candidate; it has passed if there are no `reasons` against it."""

    record: GateRecord
    reasons: list[str]
    digests: ModelDigests


def gate_settings(config: SearchConfig) -> dict[str, Any]:
    """Return the settings that a gate decides by."""
    return config.promotion.model_dump(mode="json", include=set(_SETTINGS))


def check_candidates(
    entries: Sequence[PromotionEntry], session: SearchSession
) -> Iterator[tuple[PromotionEntry, GateResult | str]]:
    """Export trained candidates and check them, each in a task of the cluster, as they end.

    Their references are measured before, in the same way, so that no task that holds a GPU waits
    for another.

    Yields:
        A candidate and the gate's decision; a text if its checks failed, e.g. since its weights
        are damaged.
    """
    config = session.config
    section = config.promotion.model_copy(
        update={"tasks": with_absolute_paths(config.promotion.tasks)}
    )
    config = config.model_copy(update={"promotion": section})  # the task may run in another folder
    folder = session.folder
    context = session.context
    options = task_options(config)
    # Without GPUs to share them out by, as many at a time as models have room for
    most = None if options["num_gpus"] else session.parallel
    if extras_of(config.promotion) != NO_EXTRAS and len(entries) > 1:
        models = [context.model, *(e.baseline.folder for e in entries if e.baseline)]
        references = [path for path in dict.fromkeys(models) if path is not None]
        calls = [(path, config, context, folder.promoted) for path in references]
        for _ in each_on_cluster(options, "scores to compare with", score_reference, calls, most):
            pass
    calls = [(entry, config, folder, context) for entry in entries]
    label = f"gate of {entries[0].name}" if len(entries) == 1 else f"gates of {len(entries)} models"
    for number, result in each_on_cluster(options, label, _try_to_examine, calls, most):
        yield entries[number], result


def _try_to_examine(
    entry: PromotionEntry, config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> GateResult | str:
    """Check a candidate, without an exception that would end the checks of others."""
    try:
        return examine(entry, config, folder, context)
    except Exception as error:
        return f"{type(error).__name__}: {reason(error)}"


def examine(
    entry: PromotionEntry, config: SearchConfig, folder: SearchFolder, context: TrialContext
) -> GateResult:
    """Check a candidate, where its weights may be loaded; one model at a time is in memory."""
    return _Gate(entry, config, folder, context).run()


class _Gate:
    """The checks of one candidate, and their results."""

    def __init__(
        self,
        entry: PromotionEntry,
        config: SearchConfig,
        folder: SearchFolder,
        context: TrialContext,
    ) -> None:
        assert entry.trained is not None
        self.entry = entry
        self.trained: TrainedModel = entry.trained
        self.config = config
        self.folder = folder
        self.context = context
        self.dtype = checkpoints.dtype_of(context.dtype)
        self.outcomes: dict[str, str] = {}
        self.reasons: list[str] = []
        self.checks: GateChecks = {}
        self.scores: FinalistScores = {}
        self.model: str | None = None
        self.plain = False
        self.served: str | None = None

    @cached_property
    def plan(self) -> AttentionPlan:
        """The plan of the trial."""
        file = self.folder.trial(self.entry.trial_id) / "plan.json"
        return AttentionPlan.from_json(file.read_text(encoding="utf-8"))

    def run(self) -> GateResult:
        with self._check("loss"):
            self._check_loss()
        plan_digest = self.plan.digest
        trained_digest = checkpoint.weights_digest(self.trained.folder)
        model = checkpoints.load_model(self.trained.folder)
        # What is shipped: training may have computed in a wider dtype
        round_weights(model, self.dtype)
        with self._check("cache"):
            self._check_cache(model)
        held_out = read_sequences(self.context.eval_file)[:]
        expected = _logits(model, held_out)
        self._set_tolerance(model, expected, held_out)
        # Training may have written the stock form of its plan already, as it does of wide heads
        plain = (
            not model.config.model_type.startswith(TYPE_PREFIX)
            or checkpoint.plain_form(model.config, self.plan) is not None
        )
        del model
        with self._check("export"):
            self._export("exported" if plain else "headfold")
        exported_digest = None
        if self.model is not None:
            with self._check("logits"):
                self._check_logits(self.model, expected, held_out)
            if self.config.search.target != "any":
                with self._check("engine"):
                    self._check_engine(self.model)
            if extras_of(self.config.promotion) != NO_EXTRAS:
                with self._check("worth"):
                    self._check_scores(self.model)
            exported_digest = checkpoint.weights_digest(self.model)
        record = GateRecord(
            outcomes=self.outcomes,
            checks=self.checks,
            scores=self.scores,
            model=self.model,
            plain=self.plain,
            served=self.served,
            kv_bytes_per_token=self.plan.kv_bytes_per_token(self.dtype),
        )
        digests = ModelDigests(plan_digest, trained_digest, exported_digest)
        return GateResult(record, self.reasons, digests)

    @contextlib.contextmanager
    def _check(self, name: str) -> Iterator[None]:
        """Take the reasons that are added within for the outcome of a check."""
        before = len(self.reasons)
        yield
        self.outcomes[name] = "; ".join(self.reasons[before:]) or OK

    def _compare_losses(self) -> LossDifference | None:
        """Measure on the gate's own text, one model at a time in memory.

        Returns:
            How far the baseline is above the candidate; None where there is no text or no baseline.
        """
        baseline = self.entry.baseline.folder if self.entry.baseline else None
        text = self.context.test_file
        if text is None:
            self.checks["warning"] = (
                "too little held-out text for one of the gate's own: the losses are of the text "
                "that trials and steps were chosen by"
            )
            # By which an error can be given, if not an unbiased mean
            text = self.context.eval_file if self.config.promotion.margin_standard_errors else None
        if text is None:
            return None
        converted = self.folder.trial(self.entry.trial_id) / "converted"
        models = {
            "test_loss": self.trained.folder,
            "baseline_test_loss": baseline,
            "untrained_test_loss": str(converted) if converted.is_dir() else None,
            "original_test_loss": self.context.model,
        }
        losses: dict[str, DocumentLosses] = {}
        for name, path in models.items():
            if path is not None:
                model = checkpoints.load_model(path, device=self.context.device)
                round_weights(model, self.dtype)
                losses[name] = document_losses(model, text)
                del model
        tokens = read_sequences(text)
        self.checks |= cast(
            GateChecks, {name: evaluation.loss for name, evaluation in losses.items()}
        )
        self.checks["test_tokens"] = tokens.shape[0] * tokens.shape[1]
        self.checks["test_documents"] = len(losses["test_loss"].predictions)
        self.checks["test_digest"] = tokens.digest[:_DIGITS]
        if "baseline_test_loss" not in losses:
            return None
        difference = paired_bootstrap(
            losses["baseline_test_loss"],
            losses["test_loss"],
            np.random.default_rng(self.config.search.seed),
        )
        self.checks["loss_difference"] = difference.mean
        self.checks["loss_difference_stderr"] = _number(difference.standard_error)
        self.checks["loss_difference_interval"] = [_number(end) for end in difference.interval]
        return difference

    def _check_loss(self) -> None:
        """Compare with the baseline at the same KV ratio and with the untrained conversion.

        Candidate and baseline count with the best measured step of equally many.
        """
        entry = self.entry
        loss = self.trained.loss
        untrained_loss = self.trained.untrained_loss
        baseline = self.config.search.baseline
        section = self.config.promotion
        self.checks = {
            **self.checks,
            **entry.comparison,
            "loss": loss,
            "shipped": self.trained.description,
            "margin": section.margin,
            "margin_standard_errors": section.margin_standard_errors,
        }
        if entry.recipe == baseline:
            self.reasons.append(
                f"it is the baseline {entry.recipe} itself; nothing was better at this KV ratio"
            )
            return
        if entry.baseline is None or entry.baseline.loss is None:
            self.reasons.append(
                f"there is no baseline {baseline} of as many steps at this KV ratio to compare it "
                "with"
            )
            return
        if loss is None or not math.isfinite(loss):
            self.reasons.append(f"held-out loss is {loss}")
            return
        difference = self._compare_losses()
        if entry.baseline.folder is not None:
            plan = Checkpoint.open(entry.baseline.folder).plan
            self.checks["baseline_kv_bytes_per_token"] = plan.kv_bytes_per_token(self.dtype)
        if reason := self._not_better(loss, entry.baseline.loss, difference):
            self.reasons.append(f"{reason}, each at its best step of the same {entry.steps}")
        elif untrained_loss is not None and loss > untrained_loss:
            self.reasons.append(
                f"held-out loss {loss:.4f} is above the {untrained_loss:.4f} of the untrained "
                "conversion, whose weights were removed"
            )

    def _not_better(
        self, loss: float, baseline_loss: float, difference: LossDifference | None
    ) -> str | None:
        """Return why the candidate is not better than the baseline; None if it is.

        Args:
            loss: On the evaluation text.
            baseline_loss: On the evaluation text.
            difference: On the gate's own text, which counts where it is there.
        """
        section = self.config.promotion
        errors = section.margin_standard_errors
        if difference is None:
            what = "held-out loss"
            above = baseline_loss - loss
            error = math.nan
        else:
            what = "loss on the gate's own text" if self.context.test_file else "held-out loss"
            loss = self.checks.get("test_loss", math.nan)
            baseline_loss = self.checks.get("baseline_test_loss", math.nan)
            above = difference.mean
            error = difference.standard_error
        needed = section.margin + errors * error if errors else section.margin
        if above > needed:
            return None
        required = f"{section.margin:g}"
        if errors:
            required += f" and {errors:g} standard errors of {error:.2g}"
        return (
            f"{what} {loss:.4f} is not below the baseline's {baseline_loss:.4f} by more than "
            f"{required}"
        )

    def _check_cache(self, model: Any) -> None:
        """Compare the bytes of a real cache, in the dtype that is shipped, with the plan."""
        planned = self.plan.kv_bytes_per_token(self.dtype)
        tokens = checkpoints.CACHE_TOKENS
        window = window_of(model.config)
        if window > 1:
            tokens = min(tokens, window - 1)  # all that is still in view
        cast_weights(model, self.dtype)
        measured = measure_cache(model, tokens)
        cast_weights(model, torch.float32)
        self.checks["kv_bytes_per_token"] = planned
        self.checks["cache_bytes_measured"] = measured
        self.checks["cache_tokens"] = tokens
        if measured != planned * tokens:
            self.reasons.append(
                f"the cache holds {measured} bytes after {tokens} tokens, planned were "
                f"{planned * tokens}"
            )

    def _set_tolerance(self, model: Any, expected: list[Tensor], held_out: Tensor) -> None:
        """Enter how far the exported logits may be from these, in float32."""
        tolerance, noise = logit_tolerance(
            partial(_logits, model, held_out),
            expected,
            torch.Generator().manual_seed(self.config.search.seed),
        )
        self.checks["logit_noise"] = noise
        configured = self.config.promotion.logit_tolerance
        self.checks["logit_tolerance"] = tolerance if configured is None else configured

    def _export(self, name: str) -> None:
        """Write plain GQA where plan and family allow it, else Headfold's own format.

        Args:
            name: Of the folder: `exported` or `headfold`.
        """
        out = self.folder.promoted / f"{self.entry.trial_id}-{self.entry.steps}" / name
        try:
            exact = self._write(out, plain=name == "exported")
        except ValueError as error:
            self.reasons.append(f"export failed: {error}")
            return
        self.checks["export"] = "gqa" if name == "exported" else "headfold"
        self.checks["exact"] = exact
        self.model = str(out)
        self.plain = not Checkpoint.open(out).config.model_type.startswith(TYPE_PREFIX)

    def _write(self, out: Path, *, plain: bool) -> bool:
        """Return whether the export computes exactly what the trained model does."""
        trained = self.trained.folder
        tokenizer = self.context.model
        shutil.rmtree(out, ignore_errors=True)  # what a check that was killed has left there
        if plain:
            return export(trained, "gqa", out, tokenizer, dtype=self.dtype).exact
        model = checkpoint.load(trained, torch.float32)
        cast_weights(model, self.dtype)
        checkpoint.save(model, out, tokenizer, record=checkpoint.carried(trained))
        return True

    def _check_logits(self, exported: str, expected: list[Tensor], held_out: Tensor) -> None:
        """Compare the exported checkpoint, read back, with the trained model, in float32.

        Args:
            exported: Folder of the checkpoint.
            expected: Logits of the trained model.
            held_out: Tokens `[N, T]`.
        """
        model = checkpoints.load_model(exported, device=self.context.device)
        self.checks["exported_loss"] = evaluate(model, held_out).loss
        model.cpu()  # where the trained model's logits were computed
        difference = max(map(largest_difference, expected, _logits(model, held_out)))
        tolerance = self.checks.get("logit_tolerance", 0.0)
        self.checks["max_logit_difference"] = difference
        if not difference <= tolerance:
            self.reasons.append(
                "logits of the exported checkpoint differ from the trained model's by "
                f"{difference:.2g}, allowed are {tolerance:g}"
            )
        exported_bytes = plan_of(model).kv_bytes_per_token(self.dtype)
        planned = self.plan.kv_bytes_per_token(self.dtype)
        if exported_bytes != planned:
            self.reasons.append(
                f"the exported checkpoint serves {exported_bytes} KV bytes per token, planned were "
                f"{planned}"
            )

    def _check_engine(self, exported: str) -> None:
        """Export for the engine that the search is for, and load the result there."""
        served, checks, reason = export_for_engine(
            exported, self.config.search.target, self.entry.name
        )
        self.served = served
        self.checks.update(checks)
        if reason is not None:
            self.reasons.append(reason)

    def _check_scores(self, exported: str) -> None:
        """Measure tasks, generated text and long contexts, and hold them to the gate's limits."""
        baseline = self.entry.baseline.folder if self.entry.baseline else None
        self.scores = score_finalist(
            exported, baseline, self.config, self.context, self.folder.promoted
        )
        self.reasons += limit_violations(self.scores, self.config.promotion)


def _number(value: float) -> float | None:
    """Return a value for a record; None for NaN."""
    return None if math.isnan(value) else value


@torch.no_grad()
def _logits(model: Any, held_out: Tensor) -> list[Tensor]:
    """Return the logits that two models are compared by.

    Args:
        held_out: Tokens `[N, T]`.
    """
    return [model(held_out[:2]).logits, probe(model)]
