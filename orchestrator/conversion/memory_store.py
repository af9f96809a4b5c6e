"""A conversion with the whole checkpoint in memory; one calibration serves several KV ratios."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from attention.base.memory import freeze_garbage
from attention.cache_formats import CacheFormatError, CachePair, format_record
from attention.calibration.calibrate import calibrate
from attention.calibration.sizes import stored_tokens
from attention.calibration.store import Calibration
from attention.conversion.refinement.original import Original
from attention.engine_cache import with_engine_heads
from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan
from attention.ratios import own_heads
from orchestrator import checkpoints
from orchestrator.config.parsing import ConfigError
from orchestrator.conversion.calibration import checkpoint_calibration, choose_mixed
from orchestrator.conversion.dha_distances import Distances, measure
from orchestrator.conversion.execution import convert_and_refine, planning_context
from orchestrator.conversion.layer_store import LayerPlans, LayerStore
from orchestrator.conversion.request import ConversionRequest
from orchestrator.resources.memory import available_bytes
from search_spaces.planning.planner import make_plan
from search_spaces.site import FUSION_DISTANCES
from trainers.evaluation import CachedTeacher, evaluate
from trainers.loop import TrainingDiverged
from trainers.polish import polish
from trainers.rounded_caches import measure_rounded
from trainers.search_phase import search_phase_settings


class MemoryStore(LayerStore[PreTrainedModel]):
    """A checkpoint in memory with its statistics, ready to be converted at any KV ratio.

    Attributes:
        original: The original model, in the dtype to compute in.
        teacher: The same, for comparisons on the held-out text.
        original_evaluation: Its losses there.
        context: What plans are made from.
        cache_pair: Cache formats that converted models are measured with too; None: in 16 bits.
    """

    def __init__(self, request: ConversionRequest, *, always_calibrate: bool = False) -> None:
        """Load the model of a request, and calibrate it if the recipe needs that.

        Raises:
            DataError: For its texts.
        """
        freeze_garbage()
        needs = request.recipe.needs
        if FUSION_DISTANCES in needs:
            # A package that it lacks is missed before all else
            import trainers.fusion_search  # noqa: F401
        super().__init__(request, request.texts())
        self._polished: dict[str, Any] = {}
        self.cache_pair: CachePair | None = None
        sequences = self.texts.calibration
        self.original = request.load_model()
        calibration = None
        if always_calibrate or "statistics" in needs:
            with request.phases("calibrate"):
                with_inputs = always_calibrate or "inputs" in needs
                sampled = stored_tokens(sequences.shape[1]) if with_inputs else 0
                calibration = _calibration(request, self.original, sequences, sampled)
        with request.phases("evaluate"):
            self.teacher = CachedTeacher(self.original)
            self.original_evaluation = evaluate(self.teacher, self.texts.held_out)
        distances = (
            _fusion_distances(request, self.original, sequences)
            if FUSION_DISTANCES in needs
            else None
        )
        self.context = planning_context(
            Original(self.original), calibration, sequences, request.cache_dir, distances
        )

    @property
    def loss(self) -> float:
        """Held-out loss of the original model."""
        return self.original_evaluation.loss

    def plan(self, budget: Fraction) -> AttentionPlan:
        before = len(self.context.work)
        generator = np.random.default_rng(self.request.seed)
        with self.phases("plan"):
            plan = make_plan(self.request.recipe, budget, self.context, generator)
        self.work += self.context.work[before:]
        return plan

    def convert(self, plans: LayerPlans) -> tuple[AttentionPlan, PreTrainedModel]:
        assert isinstance(plans, AttentionPlan)  # of `plan`
        model, work = convert_and_refine(self.request.recipe, plans, self.context, self.phases)
        self.work += work
        return plans, model

    @cached_property
    def _polish_teacher(self) -> CachedTeacher:
        return CachedTeacher(self.original)

    def polish(self, layers: PreTrainedModel) -> Mapping[str, Any]:
        options = self.request.polish
        self._polished = {}
        if options.polish:
            with self.phases("polish"):
                try:
                    work = polish(
                        self._polish_teacher,
                        layers,
                        self.texts.calibration,
                        steps=options.polish,
                        weights=options.polish_weights,
                        seed=self.request.seed,
                    )
                except TrainingDiverged as error:
                    raise ConfigError(f"polish: {error}; leave --polish out") from None
            self._polished = {"polish": asdict(work)}
        return self._polished

    def measure(self, layers: PreTrainedModel) -> Mapping[str, Any]:
        request = self.request
        with self.phases("evaluate"):
            round_weights(layers, request.written)  # what is measured is what is written
            losses = self.compare(layers)
            if self.cache_pair is not None:
                cached = self._in_engine_cache(layers, self.cache_pair)
                notes = [*losses.get("notes", ()), *cached.get("notes", ())]
                losses = {**losses, **cached, **({"notes": notes} if notes else {})}
            cast_weights(layers, request.written)
        measured = {
            "original_loss": self.loss,
            **losses,
            "eval_tokens": self.original_evaluation.tokens,
            **checkpoints.cache_facts(layers, own_heads(request.geometry)),
        }
        if self.context.calibration is not None:
            measured["mixed_moments"] = self.context.calibration.mixed
        return measured

    def _in_engine_cache(self, layers: PreTrainedModel, pair: CachePair) -> Mapping[str, Any]:
        """Return what a converted model loses with its cache in the formats of an engine.

        A note says so where no engine holds its heads in them: the checkpoint is written all the
        same.
        """
        try:
            facts = format_record(pair, plan_of(layers), self.request.checkpoint.plan)
            engine_model = with_engine_heads(layers)
        except CacheFormatError as error:
            return {"notes": [f"not measured with its cache in {pair.name}: {error}"]}
        exact = self.original_evaluation
        row = measure_rounded(facts, engine_model, self.texts.held_out, exact, self.teacher)
        return {"engine_cache": row}

    def compare(self, model: PreTrainedModel) -> Mapping[str, Any]:
        """Return held-out loss and KL of a converted model, and the original's loss."""
        scored = evaluate(model, self.texts.held_out, teacher=self.teacher)
        comparison = scored.compared(self.original_evaluation)
        return {"loss": scored.loss, "kl": scored.kl, **comparison, **scored.noted}

    def write(
        self, plan: AttentionPlan, layers: PreTrainedModel, out: Path, overwrite: bool
    ) -> Mapping[str, Any]:
        note = self.request.note() | self._polished
        if self.cache_pair is not None:
            note |= {"cache_format": self.cache_pair.name}
        with self.phases("save"):
            checkpoint.save(layers, out, self.request.model, record=note, overwrite=overwrite)
        return {}


def _calibration(
    request: ConversionRequest, original: PreTrainedModel, sequences: Tensor, sampled: int
) -> Calibration:
    """Return the statistics of the model, with the inputs of at most `sampled` tokens.

    In files where the request names a folder for them, made a layer at a time; else in memory.
    """
    if request.cache_dir is not None:
        return checkpoint_calibration(
            request.checkpoint,
            sequences,
            request.cache_dir,
            dtype=request.dtype,
            device=request.device,
        )
    tokens = sampled and sequences.numel()
    free, length = available_bytes(), sequences.shape[1]
    mixed = choose_mixed(request.geometry, tokens, free, length, in_memory=True)
    return calibrate(original, sequences, sample_tokens=sampled, mixed=mixed)


def _fusion_distances(
    request: ConversionRequest, original: PreTrainedModel, sequences: Tensor
) -> Distances:
    print(
        "measuring the distances of heads in training (dha's search phase)",
        file=sys.stderr,
    )
    with request.phases("search phase"):
        knobs = request.recipe.knobs("objective")
        training = search_phase_settings(*sequences.shape)
        return measure(
            original,
            sequences,
            training,
            knobs["steps"],
            knobs["rate"],
            request.seed,
            device=checkpoints.device_of(request.device),
        )
