"""`headfold estimate CONFIG`: what a search will take, from its configuration and the checkpoint's config.json.

Trials and tokens are counted, memory and disk are sums of what is known to be held or written; time is tokens over a
rate that is either configured or measured here on random weights. The starts of processes and the search phases of DHA
are left out; what a plan takes beyond its operations is not known beforehand.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from attention.io.precision import DTYPES
from attention.progress import duration
from orchestrator import checkpoints
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.room import concurrency
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.conversion.estimates.sizes import SPARE, Conversion, Size
from orchestrator.conversion.estimates.work import available_bytes, matmul_rate, operations
from orchestrator.search.needs.disk import Storage, giga
from orchestrator.search.needs.fitting import refused
from orchestrator.search.needs.memory import Needs
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.search.trials.context import unfinished_relaxations
from orchestrator.search.validation import Prepared, local_nodes, search_problem
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import compact, write_json
from trainers.losses import objective
from trainers.settings import TrainSettings

MEASURABLE = 300_000_000  # parameters up to which a rate is measured here
FEW_TOKENS = 1024  # of the measured step


@dataclass(frozen=True)
class Work:
    """What a search will do, counted: trials, those of them that are probes, trainings of the promotion, tokens.

    `tokens`: trained on if every rung stops as many as it should; `tokens_most`: if it stops none.
    """

    trials: int
    probes: int
    trainings: int
    tokens: int
    tokens_most: int
    tokens_measured: int

    @classmethod
    def of(cls, config: SearchConfig, problem: SearchProblem) -> Work:
        trials = make_searcher(config.search.searcher, problem).total
        # A searcher with a number of its own measures its samples untrained, and trains what it has found.
        probes = problem.samples if trials > problem.total else 0
        baselines = sum(c.recipe.name == config.search.baseline for c in problem.named)
        never = baselines if config.rungs.stop else trials - probes
        a_step, steps = config.train.batch_size * config.data.sequence_length, config.rungs.steps
        tokens, measured = 0.0, float(trials * config.data.eval.tokens)
        for rung, (before, after) in enumerate(itertools.pairwise(steps), start=1):
            left = never + (trials - probes - never) * config.rungs.reduction_factor**-rung
            tokens += left * (after - before) * a_step
            measured += left * config.data.eval.tokens
        promotion, ratios = config.promotion, len(config.search.kv_ratios or config.search.kv_heads)
        # Candidates, and the baseline at each KV ratio
        trainings = ratios * (2 if promotion.select == "front" else promotion.top + 1)
        trainings *= promotion.enabled and promotion.steps > 0
        promoted = promotion.steps * a_step
        measured += trainings * promotion.evaluations * config.data.eval.tokens
        most = (trials - probes) * steps[-1] * a_step + trainings * promoted
        return cls(trials, probes, trainings, round(tokens) + trainings * promoted, most, round(measured))


@dataclass(frozen=True)
class SearchEstimate(Work):
    """Counts, bytes, hours, and what of it does not fit (`warnings`).

    `rate`: tokens a second of one worker, None where it is not known; `rate_from`: "configured", "measured here", or
    why it is not known. `cpu_hours`, `gpu_hours`: of trials and promotion; `hours`: on the wall with `parallel` trials
    at a time; `price`: of these hours. `worker_bytes`, `driver_bytes`: peak memory of a training worker and of a
    trial's own process; `processes`: these and all others by parts (`orchestrator.search.needs.memory.Need`), and
    `refusals`: which of them do not fit the GPU that they ask for. `disk`: bytes in the storage at the moment of most,
    `disk_parts` by what they are of (each at its own most), `disk_kept` in the end, `disk_free`: what is free there.
    """

    rate: float | None
    rate_from: str
    cpu_hours: float | None
    gpu_hours: float | None
    hours: float | None
    price: float | None
    parallel: int
    worker_bytes: int
    driver_bytes: int
    memory_free: int
    disk: int
    disk_parts: dict[str, int]
    disk_kept: int
    disk_free: int
    warnings: tuple[str, ...]
    processes: tuple[dict[str, Any], ...]
    refusals: tuple[str, ...]


def estimate_search(
    config: SearchConfig, storage: Path, *, parallel: int = 1, alone: bool = True, gpu_bytes: int | None = None
) -> SearchEstimate:
    """The estimate of a search with `parallel` trials at a time. No text and no weights are read, nothing is written.

    Memory is held against that of this machine where it is the only one (`alone`), and that of processes with a GPU
    against `gpu_bytes`, the memory of each of its GPUs, where that is given. Raises ConfigError for what
    `validate_search` refuses of the candidates.
    """
    length, train, resources = config.data.sequence_length, config.train, config.resources
    model = checkpoints.open_checkpoint(config.model.path, "model.path", sequence_length=length, weights=False)
    model_config = model.config
    problem, size = search_problem(config, model.geometry), Size.of(model_config)
    work = Work.of(config, problem)
    place = Storage.of(config, problem, work.trials - work.probes, work.trainings, storage)
    needs = Needs(config, model_config, size, problem, place.mixed)
    working, conversions, processes = needs.working, needs.conversions, needs.all()
    # What a recipe's recovery changes may be a distillation, which wants the original model too
    trainings = problem.trainings(train)
    worker, driver = needs.trainings()[0].total, needs.planning().total
    rate, source = training_rate(model_config, train, config.data.sequence_length, size, resources.tokens_per_second)
    hours = cpu = gpu = price = None
    if rate is not None:
        # A measured token goes forward alone, a trained one back as well, which is twice the work; where there is
        # distillation both go forward through the original model too
        share = 1 / 2 if any(each.distillation != "none" for each in trainings) else 1 / 3
        training = (work.tokens + work.tokens_measured * share) / rate / 3600
        driving = planning_seconds(config, conversions, size, working) / 3600
        cpu = training * train.cpus_per_worker + driving * max(1.0, resources.trial_cpus)
        gpu = training * train.gpus_per_worker + driving * resources.trial_gpus
        hours = (training / train.num_workers + driving) / parallel
        if resources.price_per_hour is not None:
            price = resources.price_per_hour * (gpu if train.gpus_per_worker else cpu)
    held = parallel * (driver + train.num_workers * worker)
    memory = available_bytes() if alone and not train.gpus_per_worker else 0
    warnings = []
    if memory and not train.gpus_per_worker and held > SPARE * memory:
        warnings.append(
            f"memory: {parallel} trial(s) at a time take about {giga(held)}, and {giga(memory)} are available; lower "
            "resources.max_concurrent, train.micro_batch_size or train.num_workers"
        )
    warnings += [
        f"memory: {need.process} takes {giga(need.total)} of a GPU, and each has {giga(gpu_bytes)}"
        for need in processes
        if gpu_bytes is not None and need.share and need.total > gpu_bytes * min(1.0, need.share)
    ]
    takes = place.disk(parallel)
    if shortage := place.shortage(parallel):
        warnings.append(f"disk: {shortage}")
    warnings += unfinished_relaxations((c.recipe for c in problem.named), config.rungs.steps)
    stored = (takes.most, takes.parts, takes.kept, place.free)
    told = (tuple(need.record() for need in processes), tuple(refused(needs)))
    times = (rate, source, cpu, gpu, hours, price)
    counts = (work.trials, work.probes, work.trainings, work.tokens, work.tokens_most, work.tokens_measured)
    return SearchEstimate(*counts, *times, parallel, worker, driver, memory, *stored, tuple(warnings), *told)


def check_disk(config: SearchConfig, prepared: Prepared, parallel: int) -> None:
    """Raises ConfigError for a new search that cannot fit where it will write, before anything of it is made."""
    work = Work.of(config, prepared.problem)
    place = Storage.of(config, prepared.problem, work.trials - work.probes, work.trainings)
    if shortage := place.shortage(parallel):
        raise ConfigError(f"storage: {shortage}")


def disk_shortage(config: SearchConfig) -> str | None:
    """Say by how much a search of one trial at a time does not fit its storage; None where it does."""
    model = checkpoints.open_checkpoint(config.model.path, "model.path", weights=False)
    problem = search_problem(config, model.geometry)
    work = Work.of(config, problem)
    return Storage.of(config, problem, work.trials - work.probes, work.trainings).shortage(1)


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
    write_json(folder.estimate, asdict(estimate))
    for number, (name, value) in enumerate(describe_search(estimate, config).items()):
        print(f"{'' if number else 'estimate':9}{name}: {value}", flush=True)
    for warning in estimate.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    print(f"watch    headfold watch {shlex.quote(str(folder.root))}", flush=True)


# ---- time -------------------------------------------------------------------------------------------------------


def training_rate(
    model_config: PretrainedConfig, train: TrainSettings, length: int, size: Size, configured: float | None = None
) -> tuple[float | None, str]:
    """Tokens a second that one worker trains on, in sequences of `length`, and where that is from."""
    if configured is not None:
        return configured, "configured"
    wants_gpu = train.shape.device == "cuda"
    if wants_gpu and not torch.cuda.is_available():
        return None, "unknown: workers have GPUs and this machine has none; set resources.tokens_per_second"
    if size.total > MEASURABLE:
        return None, "unknown: too large a model to be measured in passing; set resources.tokens_per_second"
    return measured_rate(model_config, train, length), "measured here"


def measured_rate(model_config: PretrainedConfig, train: TrainSettings, length: int) -> float:
    """Tokens a second of one training step on random weights, distillation included: the second step of two."""
    from transformers import AutoModelForCausalLM

    device = torch.device(train.shape.device)
    dtype = DTYPES[train.dtype]
    model: Any = AutoModelForCausalLM.from_config(model_config, dtype=dtype).to(device)
    if train.activation_checkpointing:
        model.train().activation_checkpointing_enable({"use_reentrant": False})
    rows = max(1, min(train.device_batch_size, FEW_TOKENS // length))
    batch = torch.zeros(rows, length, dtype=torch.long, device=device)
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(train.cpus_per_worker)))
    loss_fn = objective(train.distillation, train.distillation_weight, model)
    seconds = 0.0
    try:
        for _ in range(2):
            started = time.perf_counter()
            loss_fn(model, batch).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
    finally:
        torch.set_num_threads(before)
    return rows * length / seconds


def planning_seconds(
    config: SearchConfig, conversions: Sequence[Conversion], size: Size, working: torch.dtype
) -> float:
    """Seconds of planning and converting: the operations of all candidates at the rate of a matrix product here."""
    each = sum(operations(conversion, size, 0) for conversion in conversions) / matmul_rate(working)
    return each * (1 + config.search.num_samples / len(conversions))


# ---- memory --------------------------------------------------------------------------------------------


# ---- words ------------------------------------------------------------------------------------------------------


def describe_search(estimate: SearchEstimate, config: SearchConfig) -> Mapping[str, str]:
    """The estimate in words, by what they are about."""
    trials = f"{estimate.trials}" + (f", {estimate.probes} of them probes" if estimate.probes else "")
    words = {
        "trials": f"{trials}; {estimate.trainings} full training(s) in the promotion",
        "tokens": f"about {compact(estimate.tokens)} to train on, {compact(estimate.tokens_most)} at most; "
        f"{compact(estimate.tokens_measured)} to measure on",
        "rate": f"{estimate.rate:.0f} tokens/s a worker, {estimate.rate_from}" if estimate.rate else estimate.rate_from,
    }
    if estimate.hours is not None and estimate.cpu_hours is not None:
        unit = f"{estimate.gpu_hours:.2f} GPU-hours" if estimate.gpu_hours else f"{estimate.cpu_hours:.2f} CPU-hours"
        words["time"] = (
            f"{unit}; about {in_hours(estimate.hours)} with {estimate.parallel} trial(s) at a time, starts left out"
        )
    if estimate.price is not None:
        words["price"] = f"{estimate.price:.2f} at {config.resources.price_per_hour:g} an hour"
    free = f" ({giga(estimate.memory_free)} available here)" if estimate.memory_free else ""
    for need in estimate.processes:
        words[f"memory, {need['process']}"] = _of_process(need)
    held = estimate.parallel * (estimate.driver_bytes + config.train.num_workers * estimate.worker_bytes)
    words["memory"] = f"{giga(held)} with {estimate.parallel} trial(s) at a time{free}"
    parts = ", ".join(f"{name} {giga(value)}" for name, value in estimate.disk_parts.items() if value)
    words["disk"] = (
        f"up to {giga(estimate.disk)} ({giga(estimate.disk_free)} free), {giga(estimate.disk_kept)} in the end; "
        f"at most {parts}"
    )
    return words


def _of_process(need: Mapping[str, Any]) -> str:
    """What a process takes, of its accelerator's memory if that is known, and its parts by falling size."""
    parts = sorted(need["parts"].items(), key=lambda part: -part[1])
    kind, limit = need["accelerator_type"], need["limit"]
    where = " of a GPU" if need["share"] else " of the machine"
    of = f" of the {giga(limit)} that it may take of a GPU ({kind})" if limit else where
    return f"{giga(need['total'])}{of}: {', '.join(f'{name} {giga(number)}' for name, number in parts)}"


def in_hours(hours: float) -> str:
    return duration(3600 * hours)
