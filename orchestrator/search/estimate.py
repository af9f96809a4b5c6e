"""Estimates of a search from its configuration and the checkpoint's config, printed and checked."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from pathlib import Path

from attention.io.precision import DTYPES
from attention.ratios import percent
from attention.tensor_parallel import heads_per_rank
from orchestrator.cluster.capacity import Nodes, concurrency
from orchestrator.cluster.placement import ACCELERATOR_PREFIX, Demand
from orchestrator.cluster.session import local_nodes
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.resources.disk import Storage
from orchestrator.resources.rank_estimate import estimate_ranks
from orchestrator.resources.search_estimate import SearchEstimate
from orchestrator.search.setup import SearchSetup
from orchestrator.search.trials.context import unfinished_relaxations
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder

_CPUS_ENOUGH = 1e6
"""CPUs of another machine, of which only the GPUs are named."""


def estimate_search(
    setup: SearchSetup,
    storage: Path,
    *,
    parallel: int = 1,
    alone: bool = True,
    gpu_bytes: int | None = None,
    gpu: str | None = None,
) -> SearchEstimate:
    """Estimate a search. No text and no weights are read, nothing is written.

    Args:
        setup: The search.
        storage: The folder that it will write into.
        parallel: Trials at a time.
        alone: Whether this machine is the only one that it runs on.
        gpu_bytes: GPU memory of the machines that it will run on, if not this one.
        gpu: Their type, likewise.

    Raises:
        ConfigError: For what `SearchSetup.problem` refuses.
    """
    recipes = (candidate.recipe for candidate in setup.problem.named)
    return SearchEstimate.of(
        setup.inputs,
        setup.work,
        storage,
        parallel=parallel,
        alone=alone,
        gpu_bytes=gpu_bytes,
        gpu=gpu,
        warnings=[
            *unfinished_relaxations(recipes, setup.config.rungs.steps),
            *ratios_without_saving(setup),
            *baselines_of_fewer_bytes(setup),
        ],
    )


def baselines_of_fewer_bytes(setup: SearchSetup) -> list[str]:
    """Return a warning for KV ratios at which the baseline's plan is smaller than another recipe's.

    A KV ratio is a limit, and not every recipe has a plan of exactly that size.
    """
    baseline = setup.config.search.baseline
    sizes: dict[float, dict[str, float]] = {}
    for candidate in setup.problem.named:
        sizes.setdefault(candidate.kv_ratio, {})[candidate.recipe.name] = candidate.used_ratio
    warnings = []
    for ratio, used in sorted(sizes.items(), reverse=True):
        larger = [name for name, size in used.items() if size > used.get(baseline, ratio)]
        if larger:
            warnings.append(
                f"search.kv_ratios: at {ratio:g} the baseline {baseline} keeps "
                f"{percent(used[baseline])} of the cache at most, {', '.join(larger)} up to "
                f"{percent(max(used.values()))}: their losses are of different sizes; choose a KV "
                "ratio that all reach, or set search.strict to refuse others"
            )
    return warnings


def ratios_without_saving(setup: SearchSetup) -> list[str]:
    """Return a warning for KV ratios that save no bytes on the GPUs of `search.tensor_parallel`.

    That is, no recipe takes fewer bytes per GPU than the original, or at a larger ratio of the
    search.
    """
    ranks, geometry = setup.config.search.tensor_parallel, setup.geometry
    if ranks == 1:
        return []
    sizes: dict[float, int] = {}
    smallest = math.inf
    for candidate in setup.problem.named:
        ratio, dtype = candidate.kv_ratio, DTYPES[setup.dtype]
        cache = estimate_ranks(candidate.recipe, candidate.used_ratio, geometry, dtype, ranks)
        sizes[ratio] = min(
            sizes.get(ratio, cache.kv_bytes_per_token_per_gpu), cache.kv_bytes_per_token_per_gpu
        )
        smallest = cache.kv_bytes_per_token_per_gpu_original or smallest
    idle: list[str] = []
    for ratio, size in sorted(sizes.items(), reverse=True):
        if size >= smallest:
            idle.append(percent(ratio))
        smallest = min(smallest, size)
    heads = heads_per_rank(geometry.num_kv_heads, ranks)
    if not idle:
        return []
    return [
        f"search.tensor_parallel: on {ranks} GPUs the KV ratio(s) {', '.join(idle)} take as many "
        f"bytes per GPU as the original or a larger ratio: {heads} "
        f"of the checkpoint's {geometry.num_kv_heads} KV heads per layer are on each GPU, and at "
        "least one stays there; leave them out, or set fewer GPUs"
    ]


def storage_of(setup: SearchSetup) -> Storage:
    """Return the folders that a search writes to under the configuration, and how much."""
    return Storage.of(setup.inputs, setup.work.converted, setup.work.trainings)


def check_disk(setup: SearchSetup, parallel: int) -> None:
    """Raise ConfigError for a new search that does not fit where it will write."""
    if shortage := storage_of(setup).shortage(parallel):
        raise ConfigError(f"storage: {shortage}")


def local_parallel(config: SearchConfig, gpus: int | None = None, gpu: str | None = None) -> int:
    """Return the trials at a time on this machine, or on another with CPUs enough.

    It is 1 where not even one fits, since a larger cluster will run it.

    Args:
        config: Of the search.
        gpus: Of the other machine; None for this one.
        gpu: Their type, if it is known.
    """
    nodes = local_nodes()
    if gpus:
        kinds = {f"{ACCELERATOR_PREFIX}{gpu}": 1.0} if gpu else {}
        nodes = [Nodes(1, {"GPU": float(gpus), "CPU": _CPUS_ENOUGH, **kinds})]
    with contextlib.suppress(ConfigError):
        return concurrency(nodes, Demand.of(config), config.resources.max_concurrent)
    return 1


def announce(
    setup: SearchSetup, folder: SearchFolder, parallel: int, *, verbose: bool = False
) -> None:
    """Print the estimate of a search as it starts, with warnings, and save it in its folder.

    Nothing is printed for a resumed search. If no estimate is possible, that is printed.
    """
    if folder.estimate.exists():
        return
    try:
        estimate = estimate_search(
            setup, folder.root, parallel=parallel, alone=not os.environ.get("RAY_ADDRESS")
        )
    except Exception as error:
        print(
            f"estimate not possible: {type(error).__name__}: {error}", file=sys.stderr, flush=True
        )
        return
    write_json(folder.estimate, estimate.record())
    words = estimate.describe(setup.config, verbose=verbose)
    for number, (name, value) in enumerate(words.items()):
        print(f"{'' if number else 'estimate':9}{name}: {value}", flush=True)
    for warning in estimate.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    print(f"watch    headfold watch {shlex.quote(str(folder.root))}", flush=True)
