"""Run a training job on one of its workers, for any kind of client.

All workers run the same code side by side in one process group.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from attention.base.memory import freeze_garbage
from attention.base.messages import reason
from attention.io import checkpoint
from trainers.deepspeed_config import LAYOUT, decays_everything
from trainers.jobs import best, memory
from trainers.jobs.checkpoints import CheckpointStore, SavedCheckpoint, of_rank_0
from trainers.jobs.link import Link
from trainers.jobs.share import teacher_of
from trainers.jobs.train_job import TrainJob
from trainers.jobs.training import WorkerTraining
from trainers.loop import TrainingDiverged
from trainers.out_of_memory import free_memory, is_out_of_memory


def run_job(job: TrainJob, link: Link) -> dict[str, Any]:
    """Run a job, or the remaining part of it.

    Out of memory, the job continues with a smaller micro-batch, once; the report then has `notes`
    that say so.

    Returns:
        The last report and how it ended: {"metrics"}, {"diverged": reason} or {"stopped": step}.

    Raises:
        JobOutOfMemoryError: When that does not help.
        MicroBatchLoweredError: Where several workers must start again for it: the others wait in a
            collective operation for the one that ran out.
    """
    job = job.on(link.world_size)
    fitting, notes = of_rank_0(lambda: memory.as_it_fits(job))
    try:
        return _attempt(fitting, link, notes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        cause = reason(error)
    memory.lower_micro_batch(fitting, cause, already=bool(notes))
    if link.world_size > 1:
        raise memory.MicroBatchLoweredError(f"rank {link.rank}: {cause}")
    free_memory()
    return run_job(job, link)


def _attempt(job: TrainJob, link: Link, notes: list[str]) -> dict[str, Any]:
    # Imported here, since clients that only request a job need not load DeepSpeed.
    from trainers.engine import TrainEngine
    from trainers.relaxing import relax
    from trainers.zero import load_trainable

    freeze_garbage()
    torch.set_num_threads(job.settings.threads)
    store = CheckpointStore.of(job, link.rank, link.world_size)
    newest, reports, damage = store.newest_whole()
    if reports and not of_rank_0(lambda: best.best_is_there(reports[-1], job.out_dir)):
        damage.append(
            f"the weights of the best step {reports[-1]['best_step']} are damaged: trained from "
            f"the beginning"
        )
        newest = None
        reports = []
    if newest is None:
        store.release()  # what was fetched of damaged ones
    if (ended := _ended_before(job, link, newest, reports)) is not None:
        store.release()
        return ended
    relaxed = None
    if job.relaxation is not None:
        try:
            relaxed = relax(job, link)
        except TrainingDiverged as error:
            return {"diverged": f"relaxation: {error}"}
        job = job.after_relaxation(relaxed.model_dir)
    model = load_trainable(job.model_dir, job.settings)
    with ExitStack() as stack:
        engine = stack.enter_context(
            closing(
                TrainEngine(
                    model,
                    job.settings,
                    job.schedule_steps,
                    schedule_offset=job.schedule_offset,
                    decay_everything=of_rank_0(lambda: _decays_everything(job, store, newest)),
                )
            )
        )
        teacher = None
        if not job.settings.keeps_teacher_logits:
            teacher = stack.enter_context(teacher_of(job, job.settings, engine.device))
        return WorkerTraining(job, engine, teacher, link, store, relaxed, [*notes, *damage]).run(
            newest, reports
        )


def _decays_everything(
    job: TrainJob, store: CheckpointStore, newest: SavedCheckpoint | None
) -> bool:
    """Whether weight decay is on all parameters, as in the checkpoint that the job resumes from."""
    if newest is not None:
        return decays_everything(store.text(str(store.named / newest.name), LAYOUT))
    if job.resume_from is None:
        return False
    earlier = store.of_run(Path(job.resume_from).parent.name)
    return decays_everything(earlier.text(job.resume_from, LAYOUT))


def _ended_before(
    job: TrainJob, link: Link, newest: SavedCheckpoint | None, reports: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Report again what earlier starts of the job have measured.

    Returns:
        The final report if no work remains, else None.
    """
    last = job.milestones[-1]
    for report in reports:
        if not link.report(report, report["step"] == last):
            return {"stopped": report["step"]}
    if (
        newest is not None
        and newest.step == last
        and of_rank_0(lambda: _is_written(job, reports[-1]))
    ):
        return {"metrics": reports[-1]}
    return None


def _is_written(job: TrainJob, report: dict[str, Any]) -> bool:
    """Whether the final weights exist as reported."""
    try:
        return checkpoint.weights_digest(job.out_dir) == report.get("weights_digest")
    except (OSError, ValueError):
        return False
