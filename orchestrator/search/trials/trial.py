"""One trial: plan, convert, measure untrained, and train through the remaining rungs.

Runs in a process of Ray Tune with little CPU; the Ray Train workers that it starts, with DeepSpeed,
have the rest.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ray import tune

from attention.base.timing import Phases
from attention.io import checkpoint
from orchestrator.cluster.ray_tasks import run_task
from orchestrator.cluster.session import prepare_process
from orchestrator.search.candidates import Candidate
from orchestrator.search.duplicates import work_digest
from orchestrator.search.trials.context import TrialContext, training_job
from orchestrator.search.trials.conversions import ConversionLibrary, conversion_key
from orchestrator.search.trials.rungs import ForwardRungs, ReportRungs
from orchestrator.search.trials.untrained import watched_facts
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.training.run import TrainingReport, TrainingRun
from trainers.settings import TrainSettings

OF_RUNG_0 = ("phases", "pooled", "work_digest")
"""Fields of the first report of a trial only.

They are the time of its phases, whether it is of a pooled model that the trial's relaxation does
not start from, and the digest of the training to follow (`orchestrator.search.duplicates`).
"""


def run_trial(config: dict[str, Any], context: TrialContext) -> None:
    """Run a trial, as Tune's function.

    Args:
        config: That of a `Candidate`.
    """
    prepare_process()
    torch.set_num_threads(planning_threads(context))
    candidate = Candidate.from_config(config)
    trial_id = str(tune.get_context().get_trial_id())
    folder = Path(context.folder) / "trials" / trial_id
    trains = trained(candidate, context.rungs)
    facts = earlier_facts(candidate, folder)
    if facts is None:
        facts = dict(rung_zero(candidate, context, folder))
        if trains:
            facts["work_digest"] = work_digest(training_job(context, folder, candidate, ""), folder)
        if math.isfinite(facts["loss"]):
            write_json(folder / "facts.json", facts)
    tune.report(facts | {"rung": 0})
    if trains:
        job = training_job(context, folder, candidate, trial_id)
        run = TrainingRun(job, job.relaxation.total_steps if job.relaxation else 0)
        later_facts = {name: value for name, value in facts.items() if name not in OF_RUNG_0}
        rungs = ReportRungs(context, later_facts, run.offset)
        run.train(context.pool, rungs.report, lambda: [ForwardRungs(rungs)])


def planning_threads(context: TrialContext) -> int:
    """Return the threads of a trial's process while it plans, converts and measures on the CPU.

    Ray counts little CPU for it, so that it would have one thread, while the CPUs that a worker of
    the trial trains on later are idle: on one machine, on which most searches without GPUs run.
    """
    threads = torch.get_num_threads()
    if context.device != "cpu":
        return threads
    cores = len(os.sched_getaffinity(0))
    return max(threads, min(cores, TrainSettings.model_validate(context.train).threads))


def rung_zero(candidate: Candidate, context: TrialContext, folder: Path) -> TrainingReport:
    """Return the report of rung 0, from the conversion of another trial if there is one.

    It waits for a process that is making the same conversion; meanwhile no accelerator is reserved.
    """
    if candidate.probe:
        return watched_facts(candidate, context, folder)
    library = ConversionLibrary.of_search(context.folder)
    key = conversion_key(candidate, context)
    phases = Phases()
    with contextlib.ExitStack() as stack:
        with phases("reuse"):
            stack.enter_context(library.turn(key))
            facts = library.take(key, candidate, folder)
        if facts is not None:
            return {**facts, "phases": dict(phases), "seconds": sum(phases.values())}
        if trained(candidate, context.rungs) and context.task is not None:
            # Its GPUs are free again when the workers start
            return run_task(context.task, watched_facts, candidate, context, folder)
        return watched_facts(candidate, context, folder)


def trained(candidate: Candidate, rungs: Sequence[int]) -> bool:
    """Return whether a trial trains after it was measured untrained."""
    return len(rungs) > 1 and not candidate.probe


def earlier_facts(candidate: Candidate, folder: Path) -> dict[str, Any] | None:
    """Return the facts of rung 0 if this very trial has measured them before.

    It may have been paused, or its process may have died.
    """
    file = folder / "facts.json"
    if not file.is_file() or read_json(folder / "recipe.json") != candidate.config():
        return None
    if not candidate.probe and not checkpoint.intact(folder / "converted"):
        return None  # damaged since
    return read_json(file)
