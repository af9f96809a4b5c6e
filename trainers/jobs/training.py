"""A training job on one worker.

From its start or its checkpoint, milestone by milestone, to its finished weights.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from attention.io import checkpoint, piecewise
from trainers.jobs import best
from trainers.jobs.checkpoint_timer import CheckpointTimer
from trainers.jobs.checkpoints import CheckpointStore, SavedCheckpoint
from trainers.jobs.curve import Curve
from trainers.jobs.link import Link
from trainers.jobs.share import WorkerShare
from trainers.jobs.teacher_logits import stored_teacher
from trainers.jobs.train_job import TrainJob
from trainers.jobs.utilization import TokenWork
from trainers.jobs.write_rate import checkpoint_cost
from trainers.loop import TrainingDiverged, train_model
from trainers.text.token_sets import same_text

if TYPE_CHECKING:
    from trainers.engine import TrainEngine
    from trainers.relaxing import Relaxed


class WorkerTraining(WorkerShare):
    """One worker's training of a job, from its start through steps and milestones."""

    def __init__(
        self,
        job: TrainJob,
        engine: TrainEngine,
        teacher: Any,
        link: Link,
        store: CheckpointStore,
        relaxed: Relaxed | None,
        notes: list[str],
    ) -> None:
        super().__init__(job, job.settings)
        self.engine = engine
        self.teacher = teacher
        self.link = link
        self.store = store
        self.notes = notes
        self.relaxed = relaxed
        self.stored_teacher = None
        if self.settings.keeps_teacher_logits:
            self.stored_teacher = stored_teacher(job, self.stream, engine.device)
        self.earlier_tokens = job.start_step * self.tokens_a_step
        if job.start_tokens is not None:
            self.earlier_tokens = job.start_tokens
        self.train_seconds = 0.0
        self.steps = 0
        if relaxed is not None:
            # Continue reading where the relaxation stopped.
            self.stream.load_state_dict(relaxed.position)
            self.earlier_tokens += relaxed.tokens
            self.seconds = relaxed.seconds
        self.metrics: dict[str, Any] = {}
        self.stopped = False
        self.first_step_at = 0.0
        self.losses: list[float] = []  # since the last milestone
        self.saved_step = 0
        store.expected_bytes = engine.checkpoint_bytes
        self.timer = CheckpointTimer(store, link, job.checkpoint_minutes, engine.device)
        show = partial(link.show, job)
        self.curve = None
        if self.rank == 0:
            self.curve = Curve(store.named, engine, self.world_size, show, self._work())

    def run(self, newest: SavedCheckpoint | None, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """Train to the last milestone, from a checkpoint of this run or from where the job starts.

        Args:
            newest: The checkpoint, or None.
            reports: Of the milestones before.

        Returns:
            The result of `run_job`.
        """
        job = self.job
        last = self.job.milestones[-1]
        start = self._begin(newest)
        if start < last:
            cost = checkpoint_cost(job, self.store, self.engine.checkpoint_bytes)
            if cost is not None and cost.warning is not None:
                self.notes.append(cost.warning)
        self.metrics = reports[-1] if reports else {}
        # A relaxation and no recovery: speed and loss are those of the relaxation.
        if last == 0 and not reports:
            assert self.relaxed is not None  # the job has checked it
            losses = [point["train_loss"] for point in self.relaxed.history]
            self.report(0, sum(losses) / max(1, len(losses)))
        self.lap()  # what came before is no training
        try:
            step = train_model(
                self.engine,
                self.stream,
                steps=last,
                start_step=start,
                milestones=job.milestones,
                on_milestone=self.report,
                on_step=self.on_step,
                until=lambda: self.stopped,
                losses=self.losses,
                loss_fn=self.loss_fn(self.teacher, self.stored_teacher),
            )
        except TrainingDiverged as error:
            # Returned and not raised: the loss is the same on all workers, and another try would
            # end alike
            self.store.settle()
            return {"diverged": str(error)}
        if self.stopped:
            return {"stopped": step}
        if start == last and reports:
            # Killed between its last checkpoint and here, or the weights were lost.
            self.finish(self.metrics)
        return {"metrics": self.metrics}

    def _work(self) -> TokenWork:
        settings = self.job.settings
        return TokenWork.of(
            self.engine.model,
            self.tokens_a_step // settings.batch_size,
            recomputed=settings.activation_checkpointing is True,
            teacher=None if settings.distillation == "none" else self.teacher,
        )

    def _begin(self, newest: SavedCheckpoint | None) -> int:
        """Return the step to resume from."""
        if newest is not None:
            start = self.resume(self.store.folder(newest))
            self.store.release()
            return start
        if (earlier := self.job.resume_from) is not None:
            with self.store.of_run(Path(earlier).parent.name).opened(earlier) as folder:
                return self.resume(folder, earlier_job=True)
        self.stream.skip(self.job.first_sequence)
        return 0

    def resume(self, folder: Path, earlier_job: bool = False) -> int:
        """Return the step to resume from.

        That of this run's checkpoint, or of an earlier job's (`resume_from`).
        """
        state = self.engine.load(folder)
        self.saved_step = int(state["step"])
        if not earlier_job:
            self.seconds = float(state["seconds"])
            self.losses += state.get("losses", [])
        elif state["step"] != self.job.start_step:
            raise ValueError(
                f"start_step is {self.job.start_step}, checkpoint {self.job.resume_from} is at "
                f"{state['step']}"
            )
        if not earlier_job or same_text(state["train_file"], self.job.train_file):
            self.stream.load_state_dict(state["stream"])
        return int(state["step"])

    def on_step(self, step: int, loss: float) -> None:
        """Count a step, and write a checkpoint or a line of the curve where one is due."""
        self.first_step_at = self.first_step_at or time.time()
        lap = self.lap()
        self.train_seconds += lap
        self.steps += 1
        if self.curve is not None:
            self.curve.add(step, loss, self.tokens_a_step, lap)
        if step not in self.job.milestones and self._due(step):
            self._save(step)
            self.lap()

    def _due(self, step: int) -> bool:
        """Whether a checkpoint is saved between two milestones."""
        steps = self.job.checkpoint_steps
        many = steps is not None and step - self.saved_step >= steps
        return self.timer.due() or many

    def _save(self, step: int, report: dict[str, Any] | None = None) -> None:
        state = {
            "step": step,
            "stream": self.stream.state_dict(),
            "train_file": self.job.train_file,
        }
        state |= {"seconds": self.seconds, "losses": self.losses if report is None else []}
        self.store.save(step, lambda folder: self.engine.save(folder, state), report)
        self.timer.saved()
        self.saved_step = step

    def report(self, step: int, train_loss: float) -> None:
        """Measure, save, and report: every worker takes part, rank 0's numbers count."""
        job = self.job
        measured = self.evaluate(self.engine.model, self.teacher)
        metrics = {
            "loss": measured.loss,
            "kl": measured.kl,
            "step": step,
            "tokens": self.earlier_tokens + (step - job.start_step) * self.tokens_a_step,
            "tokens_per_second": self._speed(),
            "train_loss": train_loss,
            "learning_rate": self.engine.last_rate,
            "gradient_norm": self.engine.gradient_norm,
            "data_position": self.stream.state_dict()["position"],
            "first_step_at": self.first_step_at,
        }
        if self.stored_teacher is not None:
            metrics["teacher_logits_digest"] = self.stored_teacher.digest
        if self.notes:
            metrics["notes"] = self.notes
        if self.relaxed is not None:
            metrics |= {
                "relaxation_steps": self.relaxed.steps,
                "collapsed_loss": self.relaxed.loss,
                "relaxed_dir": self.relaxed.model_dir,
                "relaxation_history": self.relaxed.history,
                "relaxation_remaining": self.relaxed.remaining,
            }
        last = step == job.milestones[-1]
        if job.keep_best:
            self._keep_if_best(metrics, last)
        if last:
            self.finish(metrics)
        self.lap()
        metrics["seconds"] = self.seconds
        metrics["time"] = time.time()
        self._save(step, metrics)
        if job.keep_best and self.link.rank == 0:
            checkpoints, reports = self.store.read()
            named = [
                report
                for k in checkpoints
                for report in [r for r in reports if r["step"] <= k.step][-1:]
            ]
            best.remove_other_bests(job.out_dir, [metrics] if last else named)
        self.metrics = metrics
        self.stopped = not self.link.report(metrics, last)
        self.lap()
        self.train_seconds = 0.0
        self.steps = 0

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write the finished weights as a checkpoint before the report names them."""
        self._write(self.job.out_dir)
        if self.link.rank == 0:
            metrics["out_dir"] = self.job.out_dir
            metrics["weights_digest"] = checkpoint.weights_digest(self.job.out_dir)
        dist.barrier()

    def _keep_if_best(self, metrics: dict[str, Any], last: bool) -> None:
        """Write the weights if they are the best, and name the best step in the report."""
        best_so_far = {key: self.metrics[key] for key in best.BEST_KEYS if key in self.metrics}
        step = metrics["step"]
        # Never with NaN; of equal steps the earlier one stays.
        if metrics["loss"] < best_so_far.get("best_loss", math.inf):
            out = self.job.out_dir if last else best.best_folder(self.job.out_dir, step)
            best_so_far = dict(
                zip(best.BEST_KEYS, (step, metrics["loss"], metrics["kl"], out), strict=True)
            )
            if not last:  # the final weights are written in any case
                self._write(out)
        metrics |= best_so_far

    def _write(self, folder: str) -> None:
        """Write the weights as they are now, by rank 0, a file at a time; all workers take part."""
        source = self.job.model_dir
        tensors = self.engine.tensors()
        if self.link.rank == 0:
            piecewise.save_as(source, tensors, folder, checkpoint.carried(source))
        else:
            for _ in tensors:  # so that rank 0 has them
                pass
        dist.barrier()

    def _speed(self) -> float:
        """Return the tokens per second since the last milestone.

        They are those of the relaxation, with its measurements, if that was all.
        """
        if self.steps or self.relaxed is None:
            return self.steps * self.tokens_a_step / self.train_seconds
        return self.relaxed.tokens / self.relaxed.seconds
