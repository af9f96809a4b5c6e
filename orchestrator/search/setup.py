"""A search before it begins: its configuration with the checkpoint open."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io.precision import DTYPES
from orchestrator import checkpoints
from orchestrator.config.schema import SearchConfig
from orchestrator.resources.disk import most_promoted
from orchestrator.resources.search_estimate import SearchWork
from orchestrator.resources.size import PlannedConversion, SearchInputs
from orchestrator.search.candidates import (
    candidate_space,
    engine_form,
    named_candidates,
    search_phase_candidates,
    searcher_settings,
)
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.search.trials.context import relaxation_sequences
from orchestrator.storage.paths import storage_path


def open_models(config: SearchConfig, *, weights: bool = True) -> SearchConfig:
    """Return the configuration with plain copies of models that are GGUF files or quantised.

    The copies are in the storage, which every node sees.

    Args:
        config: The configuration as it was read.
        weights: Whether the copies have weights. Otherwise (for estimates) they are configs and
            tokenizers in the user's cache.

    Raises:
        ConfigError: For a source that cannot be read.
    """
    section = config.model
    cache = storage_path(config.storage) / "cache" if weights else None
    folders = {
        key: checkpoints.resolve_model(
            source, dequantize=section.dequantize, weights=weights, cache=cache, key=f"model.{key}"
        )
        for key in ("path", "teacher")
        if (source := getattr(section, key)) is not None
    }
    return config.model_copy(update={"model": section.with_folders(**folders)})


@dataclass(frozen=True, eq=False)
class SearchSetup:
    """A configuration and its checkpoint, which is opened once.

    Values derived from the two are computed when first needed, and cached.

    Attributes:
        config: The configuration, its models as `open_models` leaves them.
        model: The checkpoint that is converted.
    """

    config: SearchConfig
    model: Checkpoint

    @classmethod
    def open(
        cls, config: SearchConfig, *, weights: bool = True, sequence_length: int | None = None
    ) -> SearchSetup:
        """Open the checkpoint of a configuration.

        Raises ConfigError as `checkpoints.open_checkpoint` does.
        """
        model = checkpoints.open_checkpoint(
            config.model.path, "model.path", weights=weights, sequence_length=sequence_length
        )
        return cls(config, model)

    @property
    def geometry(self) -> HeadGeometry:
        return self.model.geometry

    @cached_property
    def problem(self) -> SearchProblem:
        """The input of the searcher.

        Raises:
            ConfigError: For a candidate that cannot be.
        """
        config = self.config
        section = config.search
        engine = engine_form(config, self.model)
        named = named_candidates(config, self.geometry, engine)  # first: it says best what is wrong
        return SearchProblem(
            space=candidate_space(config, self.geometry, engine),
            named=named,
            samples=section.num_samples,
            seed=section.seed,
            settings=searcher_settings(config),
            seeds=tuple(config.seeds),
            objectives=config.objectives,
        )

    @cached_property
    def dtype(self) -> str:
        """Name of the dtype in which models are written and bytes are counted.

        Raises:
            ConfigError: If the checkpoint's dtype is not known.
        """
        return checkpoints.written_dtype(self.model, self.config.model.dtype)

    @cached_property
    def inputs(self) -> SearchInputs:
        """The input of estimates. Raises ConfigError as `problem` and `dtype` do."""
        candidates = self.problem.named
        return SearchInputs(
            config=self.config,
            model=self.model.config,
            written=DTYPES[self.dtype],
            candidates=tuple(
                PlannedConversion(c.recipe, c.kv_ratio, c.used_ratio) for c in candidates
            ),
        )

    @cached_property
    def work(self) -> SearchWork:
        """The amount of work of the search: trials, trainings and tokens."""
        config, problem = self.config, self.problem
        trials = make_searcher(config.search.searcher, problem).total
        # A searcher with its own number of trainings measures samples untrained, and trains the
        # best.
        probes = problem.samples if trials > problem.total else 0
        baselines = sum(c.recipe.name == config.search.baseline for c in problem.named)
        # No rung stops a trial while it relaxes
        never_stopped = baselines + sum(c.recipe.relaxation != "none" for c in problem.named)
        never_stopped += max(0, trials - problem.total)  # those that a searcher adds at its end
        if not config.rungs.stop or config.rungs.scheduler == "none":
            never_stopped = trials - probes
        length = config.data.sequence_length
        step_tokens = config.train.batch_size * length
        tokens = 0.0
        measured = float(trials * config.data.eval.tokens)
        for rung, (before, after) in enumerate(itertools.pairwise(config.rungs.steps), start=1):
            stoppable = trials - probes - never_stopped
            left = never_stopped + stoppable * config.rungs.reduction_factor**-rung
            tokens += left * (after - before) * step_tokens
            measured += left * config.data.eval.tokens
        steps, batch = config.rungs.steps, config.train.batch_size
        relaxed = length * sum(
            relaxation_sequences(each.recipe, steps, batch) for each in problem.named
        )
        phases = search_phase_candidates(config, problem.named)
        phase_steps = sum(each.recipe.knobs("objective")["steps"] for each in phases)
        promotion = config.promotion
        drawn = problem.space.joint.kv_ratios if problem.samples else ()
        ratios = {*(candidate.kv_ratio for candidate in problem.named), *map(float, drawn)}
        # Candidates, and the baseline at each KV ratio
        trainings = len(ratios) + most_promoted(self.inputs, ratios)
        trainings *= promotion.enabled and promotion.steps > 0
        promoted = trainings * promotion.steps * config.promotion_train.batch_size * length
        measured += trainings * promotion.evaluations * config.data.eval.tokens
        return SearchWork(
            trials=trials,
            probes=probes,
            trainings=trainings,
            tokens=round(tokens) + relaxed + promoted,
            tokens_most=(trials - probes) * steps[-1] * step_tokens + relaxed + promoted,
            tokens_promoted=promoted,
            tokens_measured=round(measured),
            search_phases=len(phases),
            search_phase_tokens=phase_steps * step_tokens,
        )
