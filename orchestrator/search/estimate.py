"""`headfold estimate CONFIG`: what a search will take, from its configuration and the checkpoint's config.json."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
from pathlib import Path

from orchestrator import checkpoints
from orchestrator.cluster.capacity import concurrency
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.session import local_nodes
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.resources.disk import Storage
from orchestrator.resources.search_estimate import SearchEstimate, SearchWork
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.search.trials.context import unfinished_relaxations
from orchestrator.search.validation import Prepared, search_inputs, search_problem
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder


def search_work(config: SearchConfig, problem: SearchProblem) -> SearchWork:
    """Count what a search does."""
    trials = make_searcher(config.search.searcher, problem).total
    # A searcher with a number of its own measures its samples untrained, and trains what it has found.
    probes = problem.samples if trials > problem.total else 0
    baselines = sum(c.recipe.name == config.search.baseline for c in problem.named)
    never = baselines if config.rungs.stop else trials - probes
    step_tokens = config.train.batch_size * config.data.sequence_length
    tokens = 0.0
    measured = float(trials * config.data.eval.tokens)
    for rung, (before, after) in enumerate(itertools.pairwise(config.rungs.steps), start=1):
        left = never + (trials - probes - never) * config.rungs.reduction_factor**-rung
        tokens += left * (after - before) * step_tokens
        measured += left * config.data.eval.tokens
    promotion, ratios = config.promotion, len(config.search.kv_ratios or config.search.kv_heads)
    # Candidates, and the baseline at each KV ratio
    trainings = ratios * (2 if promotion.select == "front" else promotion.top + 1)
    trainings *= promotion.enabled and promotion.steps > 0
    promoted = trainings * promotion.steps * step_tokens
    measured += trainings * promotion.evaluations * config.data.eval.tokens
    return SearchWork(
        trials=trials,
        probes=probes,
        trainings=trainings,
        tokens=round(tokens) + promoted,
        tokens_most=(trials - probes) * config.rungs.steps[-1] * step_tokens + promoted,
        tokens_measured=round(measured),
    )


def estimate_search(
    config: SearchConfig, storage: Path, *, parallel: int = 1, alone: bool = True, gpu_bytes: int | None = None
) -> SearchEstimate:
    """The estimate of a search with `parallel` trials at a time (`SearchEstimate.of`). No text and no weights are read,
    nothing is written. Raises ConfigError for what `validate_search` refuses of the candidates.
    """
    model = checkpoints.open_checkpoint(
        config.model.path, "model.path", sequence_length=config.data.sequence_length, weights=False
    )
    problem = search_problem(config, model.geometry)
    return SearchEstimate.of(
        search_inputs(config, problem),
        search_work(config, problem),
        storage,
        parallel=parallel,
        alone=alone,
        gpu_bytes=gpu_bytes,
        warnings=unfinished_relaxations((c.recipe for c in problem.named), config.rungs.steps),
    )


def storage_of(config: SearchConfig, problem: SearchProblem) -> Storage:
    """Where the configuration says that a search will write, and how much."""
    work = search_work(config, problem)
    return Storage.of(search_inputs(config, problem), work.converted, work.trainings)


def check_disk(config: SearchConfig, prepared: Prepared, parallel: int) -> None:
    """Raises ConfigError for a new search that cannot fit where it will write, before anything of it is made."""
    if shortage := storage_of(config, prepared.problem).shortage(parallel):
        raise ConfigError(f"storage: {shortage}")


def disk_shortage(config: SearchConfig) -> str | None:
    """Say by how much a search of one trial at a time does not fit its storage; None where it does."""
    model = checkpoints.open_checkpoint(config.model.path, "model.path", weights=False)
    return storage_of(config, search_problem(config, model.geometry)).shortage(1)


def local_parallel(config: SearchConfig) -> int:
    """Trials at a time on this machine; 1 where not even one fits, since a larger cluster will run it."""
    with contextlib.suppress(ConfigError):
        return concurrency(local_nodes(), Demand.of(config), config.resources.max_concurrent)
    return 1


def announce(config: SearchConfig, folder: SearchFolder, parallel: int) -> None:
    """Print what a search will take as it starts, warn of what does not fit, and keep it in the search's folder.

    A search that is resumed was told before. What cannot be estimated ends no search: it is said.
    """
    if folder.estimate.exists():
        return
    try:
        estimate = estimate_search(config, folder.root, parallel=parallel, alone=not os.environ.get("RAY_ADDRESS"))
    except Exception as error:
        print(f"estimate not possible: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return
    write_json(folder.estimate, estimate.record())
    for number, (name, value) in enumerate(estimate.describe(config).items()):
        print(f"{'' if number else 'estimate':9}{name}: {value}", flush=True)
    for warning in estimate.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    print(f"watch    headfold watch {shlex.quote(str(folder.root))}", flush=True)
