"""Carrying out a training job on one of its workers, whoever has started them.

All workers run the same code side by side in one process group. A `Link` is their way to whoever wants the job done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from attention import garbage
from attention.io import checkpoint, piecewise
from attention.messages import reason
from trainers.jobs import best, memory
from trainers.jobs.checkpoints import CheckpointStore, gathered
from trainers.jobs.curve import Curve
from trainers.jobs.job import TrainJob
from trainers.jobs.share import WorkerShare, teacher_of
from trainers.loop import TrainingDiverged, train
from trainers.losses import objective
from trainers.shortage import give_back, is_shortage

if TYPE_CHECKING:
    from trainers.engine import Engine
    from trainers.relaxing import Relaxed


class Link(Protocol):
    """What a worker knows of the world. `report` is called by all workers together with rank 0's numbers, after each
    milestone but also for those that an earlier start of the job has measured; it says whether to go on."""

    rank: int
    world_size: int

    def report(self, metrics: dict[str, Any], last: bool) -> bool: ...

    def leaving(self) -> bool:
        """Whether a worker's node is about to be taken away. Called by all workers together."""
        ...

    def show(self, job: TrainJob, line: dict[str, Any]) -> None:
        """A line of a job's curve (`trainers.jobs.curve`). Called by rank 0 alone."""
        ...


def run_job(job: TrainJob, link: Link) -> dict[str, Any]:
    """Carry out a job, or what is left of it. Returns the last report and how it ended: {"metrics"},
    {"diverged": reason} or {"stopped": step}.

    Out of memory, the job goes on with a smaller micro-batch, once; the report then has `notes` that say so. Raises
    JobOutOfMemoryError when that does not help, and MicroBatchLoweredError where several workers must start again for
    it: the others wait in a collective operation for the one that ran out.
    """
    job = job.on(link.world_size)
    fitting, notes = _agreed(link, lambda: memory.as_it_fits(job))
    try:
        return _attempt(fitting, link, notes)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        cause = reason(error)
    memory.lower(fitting, cause, already=bool(notes))
    if link.world_size > 1:
        raise memory.MicroBatchLoweredError(f"rank {link.rank}: {cause}")
    give_back()
    return run_job(job, link)


def _attempt(job: TrainJob, link: Link, notes: list[str]) -> dict[str, Any]:
    from trainers.engine import Engine  # here, and not above: who only asks for a job has no need to load DeepSpeed
    from trainers.relaxing import relax
    from trainers.zero import load_model

    garbage.settle()
    relaxed = None
    torch.set_num_threads(max(1, int(job.settings.cpus_per_worker)))
    store = CheckpointStore.of(job, link.rank, link.world_size)
    newest, reports, damage = store.newest_whole()
    last = job.milestones[-1]
    if reports and not _agreed(link, lambda: best.best_is_there(reports[-1], job.out_dir)):
        damage.append(
            f"the weights of the best step {reports[-1]['best_step']} are damaged: trained from the beginning"
        )
        newest, reports = None, []
    for known in reports:
        if not link.report(known, known["step"] == last):
            store.release()
            return {"stopped": known["step"]}
    if newest is not None and newest.step == last and _agreed(link, lambda: _is_written(job, reports[-1])):
        store.release()
        return {"metrics": reports[-1]}
    if job.relaxation is not None:
        try:
            relaxed = relax(job)
        except TrainingDiverged as error:
            return {"diverged": f"relaxation: {error}"}
        job = job.after_relaxation(relaxed.model_dir)
    model = load_model(job.model_dir, job.settings)
    with ExitStack() as stack:
        engine = stack.enter_context(
            closing(Engine(model, job.settings, job.schedule_steps, schedule_offset=job.schedule_offset))
        )
        teacher = stack.enter_context(teacher_of(job, job.settings, engine.device))
        worker = _Worker(job, engine, teacher, link, store, relaxed, [*notes, *damage])
        if newest is not None:
            start = worker.resume(store.folder(newest))
            store.release()
        elif job.resume_from is not None:
            with store.of_run(Path(job.resume_from).parent.name).opened(job.resume_from) as folder:
                start = worker.resume(folder, earlier_job=True)
        else:
            start = 0
            worker.stream.skip(job.first_sequence)
        worker.metrics = reports[-1] if reports else {}
        if last == 0 and not reports:  # a relaxation and no recovery: speed and loss are those of the relaxation
            assert relaxed is not None  # the job has checked it
            losses = [point["train_loss"] for point in relaxed.history]
            worker.report(0, sum(losses) / max(1, len(losses)))
        try:
            step = train(
                engine,
                worker.stream,
                steps=last,
                start_step=start,
                milestones=job.milestones,
                on_milestone=worker.report,
                on_step=worker.on_step,
                until=lambda: worker.stopped,
                losses=worker.losses,
                loss_fn=objective(job.settings.distillation, job.settings.distillation_weight, teacher),
            )
        except TrainingDiverged as error:
            # Returned and not raised: the loss is the same on all workers, and another try would end alike
            store.settle()
            return {"diverged": str(error)}
        if worker.stopped:
            return {"stopped": step}
        if start == last and reports:
            worker.finish(worker.metrics)  # killed between its last checkpoint and here, or the weights were lost
        return {"metrics": worker.metrics}


def _is_written(job: TrainJob, report: dict[str, Any]) -> bool:
    """Whether the finished weights are there as they were reported."""
    try:
        return checkpoint.weights_digest(job.out_dir) == report.get("weights_digest")
    except (OSError, ValueError):
        return False


def _agreed(link: Link, look: Callable[[], Any]) -> Any:
    """What rank 0 finds, on all workers."""
    return gathered(look() if link.rank == 0 else None, link.world_size)[0]


class _Worker(WorkerShare):
    """One worker's view of a job: its share, where it resumes, and what it does at a milestone."""

    def __init__(
        self,
        job: TrainJob,
        engine: Engine,
        teacher: Any,
        link: Link,
        store: CheckpointStore,
        relaxed: Relaxed | None,
        notes: list[str],
    ) -> None:
        super().__init__(job, job.settings)
        self.engine, self.teacher, self.link, self.store, self.notes = engine, teacher, link, store, notes
        self.relaxed, self.earlier_tokens = relaxed, 0
        self.train_seconds, self.steps = 0.0, 0
        if relaxed is not None:
            self.stream.load_state_dict(relaxed.position)  # go on reading where the relaxation stopped
            self.earlier_tokens, self.seconds = relaxed.tokens, relaxed.seconds
        self.metrics: dict[str, Any] = {}
        self.stopped, self.first_step_at = False, 0.0
        self.losses: list[float] = []  # since the last milestone
        self.saved_at, self.saved_step, self.leaving = time.monotonic(), 0, False
        show = partial(link.show, job)
        self.curve = Curve(store.named, engine, self.world_size, show) if self.rank == 0 else None

    def resume(self, folder: Path, earlier_job: bool = False) -> int:
        """The step to go on from: that of this run's checkpoint, or of an earlier job's (`resume_from`)."""
        state = self.engine.load(folder)
        self.saved_step = int(state["step"])
        if not earlier_job:
            self.seconds = float(state["seconds"])
            self.losses += state.get("losses", [])
        elif state["step"] != self.job.start_step:
            raise ValueError(
                f"start_step is {self.job.start_step}, checkpoint {self.job.resume_from} is at {state['step']}"
            )
        if not earlier_job or state["train_file"] == self.job.train_file:
            self.stream.load_state_dict(state["stream"])
        return int(state["step"])

    def on_step(self, step: int, loss: float) -> None:
        self.first_step_at = self.first_step_at or time.time()
        self.store.advance()
        lap = self.lap()
        self.train_seconds += lap
        self.steps += 1
        if self.curve is not None:
            self.curve.add(step, loss, self.tokens_a_step, lap)
        if step not in self.job.milestones and self._due(step):
            self._save(step)
            self.lap()

    def _due(self, step: int) -> bool:
        """Whether a checkpoint is kept between two milestones; the clock is rank 0's. One is kept, once, when a node is
        about to be taken away."""
        if self.link.leaving() and not self.leaving:
            self.leaving = True
            return True
        steps, minutes = self.job.checkpoint_steps, self.job.checkpoint_minutes
        if steps is not None and step - self.saved_step >= steps:
            return True
        if minutes is None:
            return False
        late = torch.tensor([time.monotonic() - self.saved_at >= 60 * minutes], device=self.engine.device)
        if self.world_size > 1:
            dist.broadcast(late, src=0)
        return bool(late.item())

    def _save(self, step: int, report: dict[str, Any] | None = None) -> None:
        state = {"step": step, "stream": self.stream.state_dict(), "train_file": self.job.train_file}
        state |= {"seconds": self.seconds, "losses": self.losses if report is None else []}
        self.store.save(step, lambda folder: self.engine.save(folder, state), report)
        self.saved_at, self.saved_step = time.monotonic(), step

    def report(self, step: int, train_loss: float) -> None:
        """Measure, save, and report: every worker takes part, rank 0's numbers count."""
        job, measured = self.job, self.evaluate(self.engine.model, self.teacher)
        metrics = {
            "loss": measured.loss,
            "kl": measured.kl,
            "step": step,
            "tokens": self.earlier_tokens + step * self.tokens_a_step,
            "tokens_per_second": self._speed(),
            "train_loss": train_loss,
            "learning_rate": self.engine.last_rate,
            "gradient_norm": self.engine.gradient_norm,
            "data_position": self.stream.state_dict()["position"],
            "first_step_at": self.first_step_at,
        }
        if self.notes:
            metrics["notes"] = self.notes
        if self.relaxed is not None:
            metrics |= {
                "relaxation_steps": self.relaxed.steps,
                "collapsed_loss": self.relaxed.loss,
                "relaxed_dir": self.relaxed.model_dir,
                "relaxation_history": self.relaxed.history,
            }
        last = step == job.milestones[-1]
        if job.keep_best:
            self._keep_if_best(metrics, last)
        if last:
            self.finish(metrics)
        self.lap()
        metrics["seconds"], metrics["time"] = self.seconds, time.time()
        self._save(step, metrics)
        if job.keep_best and self.link.rank == 0:
            kept, reports = self.store.read()
            named = [report for k in kept for report in [r for r in reports if r["step"] <= k.step][-1:]]
            best.remove_other_bests(job.out_dir, [metrics] if last else named)
        self.metrics = metrics
        self.stopped = not self.link.report(metrics, last)
        self.lap()
        self.train_seconds, self.steps = 0.0, 0

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write the finished weights as a checkpoint of their own, before the report says that they are there."""
        self._write(self.job.out_dir)
        if self.link.rank == 0:
            metrics["out_dir"] = self.job.out_dir
            metrics["weights_digest"] = checkpoint.weights_digest(self.job.out_dir)
        dist.barrier()

    def _keep_if_best(self, metrics: dict[str, Any], last: bool) -> None:
        """Write the weights down if none were better so far, and add to the report which are the best."""
        known, step = {key: self.metrics[key] for key in best.BEST if key in self.metrics}, metrics["step"]
        if metrics["loss"] < known.get("best_loss", math.inf):  # never with NaN; of equal steps the earlier one stays
            out = self.job.out_dir if last else best.best_folder(self.job.out_dir, step)
            known = dict(zip(best.BEST, (step, metrics["loss"], metrics["kl"], out), strict=True))
            if not last:  # the finished weights are written in any case
                self._write(out)
        metrics |= known

    def _write(self, folder: str) -> None:
        """The weights as they are now, by rank 0, a file at a time; all workers take part."""
        source, tensors = self.job.model_dir, self.engine.tensors()
        if self.link.rank == 0:
            piecewise.save_as(source, tensors, folder, checkpoint.carried(source))
        else:
            for _ in tensors:  # so that rank 0 has them
                pass
        dist.barrier()

    def _speed(self) -> float:
        """Tokens a second since the last milestone; of the relaxation, with its own measuring, where it was all."""
        if self.steps or self.relaxed is None:
            return self.steps * self.tokens_a_step / self.train_seconds
        return self.relaxed.tokens / self.relaxed.seconds
