"""The relaxation stage of a training job: relax, train with the one loop, collapse, save.

Runs inside the workers. Its files are next to the job's `out_dir`, its training checkpoints where
the job's are if those are at an address. Those of each step are written before the next begins, so
that a killed worker resumes from the last training checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from attention.io import checkpoint
from attention.io.files import write_whole
from attention.plan import AttentionPlan
from trainers.deepspeed_config import LAYOUT, decays_everything
from trainers.engine import TrainEngine
from trainers.fusion_search import next_stage
from trainers.jobs.checkpoint_timer import CheckpointTimer
from trainers.jobs.checkpoints import CheckpointStore, of_rank_0
from trainers.jobs.link import Link
from trainers.jobs.share import WorkerShare, frozen_model, packed_text, teacher_of
from trainers.jobs.train_job import TrainJob
from trainers.loop import train_model
from trainers.losses import objective
from trainers.relaxations.base import Relaxation
from trainers.relaxations.stage import RelaxationSpec, relaxed_objective

OUTCOME = "outcome.json"
HISTORY_POINTS = 40  # entries of the history of a stage, about; its last step is always one


@dataclass(frozen=True)
class Relaxed:
    """The result of a relaxation stage.

    `model_dir` the collapsed checkpoint, `loss` its held-out loss before any recovery, `steps` and
    `tokens` over all stages, `position` that of the data stream, `seconds` of work, `history` what
    was followed while relaxing: the relaxation's own metrics and the loss at some steps, counted
    over all stages.

    Attributes:
        remaining: Share of its way that was left at the end (`Relaxation.remaining`), of the stage
            that has most; None for one that a former version has run.
    """

    model_dir: str
    loss: float
    steps: int
    tokens: int
    position: dict[str, Any]
    seconds: float
    history: list[dict[str, float]]
    remaining: float | None = None


def _read(file: Path) -> dict[str, Any] | None:
    """Return the object in a file of a stage; None if the file is not there yet."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def relax(job: TrainJob, link: Link) -> Relaxed:
    """Run the job's relaxation, or the remaining part. All workers call it together."""
    if (spec := job.relaxation) is None:
        raise ValueError("expected a job with a relaxation, got None")
    root = Path(f"{job.out_dir}.relaxed")
    if dist.get_rank() == 0:
        _claim(root, job, spec)
    dist.barrier()
    records: list[dict[str, Any]] = []
    model_dir = job.model_dir
    for index in range(len(spec.plans)):
        folder = root / f"stage-{index}"
        outcome = of_rank_0(partial(_read, folder / OUTCOME))
        if outcome is None:
            stage = _Stage(job, spec, index, model_dir, folder, link)
            if records:
                stage.stream.load_state_dict(records[-1]["position"])
            stage.run()
            outcome = of_rank_0(partial(_read, folder / OUTCOME))
        records.append(outcome)
        model_dir = str(folder / "collapsed")
    return Relaxed(
        model_dir,
        records[-1]["loss"],
        sum(r["steps"] for r in records),
        sum(r["tokens"] for r in records),
        records[-1]["position"],
        sum(r["seconds"] for r in records),
        [
            h | {"step": h["step"] + i * spec.steps}
            for i, r in enumerate(records)
            for h in r["history"]
        ],
        max((r["remaining"] for r in records if r.get("remaining") is not None), default=None),
    )


class _Stage(WorkerShare):
    """One plan of a relaxation on one worker."""

    def __init__(
        self,
        job: TrainJob,
        spec: RelaxationSpec,
        index: int,
        model_dir: str,
        folder: Path,
        link: Link,
    ) -> None:
        super().__init__(job, job.relaxation_settings)
        self.spec = spec
        self.index = index
        self.model_dir = model_dir
        self.folder = folder
        self.store = CheckpointStore.of_stage(job, folder, self.rank, self.world_size)
        self.history: list[dict[str, float]] = []
        self.last_loss = 0.0
        self.link = link

    def run(self) -> None:
        self.plan = self._regrouped()
        relaxation = self._install()
        groups = relaxation.parameter_groups()
        # One schedule over all stages and the recovery; what an earlier stage did not use of it
        # stays unused.
        offset = self.index * self.spec.steps
        total = self.job.schedule_steps
        if self.spec.own_schedule:
            offset = 0
            total = self.spec.steps
        newest, _, _ = self.store.newest_whole()
        state_folder = self.store.folder(newest) if newest is not None else None
        engine = TrainEngine(
            relaxation.model,
            self.settings,
            total,
            groups,
            schedule_offset=offset,
            decay_everything=state_folder is not None
            and decays_everything((state_folder / LAYOUT).read_text()),
        )
        with closing(engine), teacher_of(self.job, self.settings, engine.device) as teacher:
            start = 0
            if state_folder is not None:
                start = self._resume(engine, state_folder)
            self.store.release()
            self.store.expected_bytes = engine.checkpoint_bytes
            minutes = self.job.checkpoint_minutes
            self.timer = CheckpointTimer(self.store, self.link, minutes, engine.device)
            loss_fn = self.loss_fn(teacher)
            steps = train_model(
                engine,
                self.stream,
                steps=self.spec.steps,
                start_step=start,
                loss_fn=relaxed_objective(relaxation, loss_fn, lambda: engine.steps_done),
                on_step=lambda step, loss: self._on_step(engine, relaxation, step, loss),
                until=relaxation.finished if relaxation.stop_early else None,
            )
            metrics = relaxation.metrics()
            remaining = relaxation.remaining()
            if not self.history or self.history[-1]["step"] < steps:
                self.history.append({"step": steps, "train_loss": self.last_loss, **metrics})
            self.store.settle()
            weights = engine.weights()
            device = engine.device
        self._collapse(weights)
        with frozen_model(self.folder / "collapsed", self.settings, device) as collapsed:
            loss = self.evaluate(collapsed).loss
        self.lap()
        if self.rank == 0:
            grouping_steps = 0 if self.plan is None else self.spec.regroup_steps
            outcome = {
                "steps": steps,
                "tokens": (steps + grouping_steps) * self.tokens_a_step,
                "loss": loss,
                "metrics": metrics,
                "remaining": remaining,
                "history": self.history,
                "position": self.stream.state_dict(),
                "seconds": self.seconds,
            }
            write_whole(self.folder / OUTCOME, json.dumps(outcome, sort_keys=True))
            with contextlib.suppress(OSError):  # they go with the trial's
                self.store.remove()
        dist.barrier()

    def _install(self) -> Relaxation:
        return self.spec.install(self.load(self.model_dir), self.index, self.job.seed, self.plan)

    def _collapse(self, weights: dict[str, Any]) -> None:
        if self.rank == 0:  # only rank 0 has whole weights
            whole = self._install()
            source = self.model_dir
            whole.model.load_state_dict(weights)
            record = checkpoint.carried(source)
            checkpoint.save(
                whole.collapsed_model(), self.folder / "collapsed", source, record=record
            )
        dist.barrier()

    def _regrouped(self) -> AttentionPlan | None:
        """Return the plan of a stage that is grouped anew, made once and stored with the stage.

        None: the spec's.
        """
        if not self.spec.regroup_steps or self.index == len(self.spec.plans) - 1:
            return None
        file = self.folder / "plan.json"
        record = of_rank_0(partial(_read, file))
        if record is None:
            plan = next_stage(
                self.load(self.model_dir),
                self.spec,
                self.settings,
                copy.deepcopy(self.stream),
                objective(**packed_text(self.settings, self.job.model_dir)),
            )
            if self.rank == 0:
                write_whole(file, json.dumps(plan.to_dict(), sort_keys=True))
            record = of_rank_0(partial(_read, file))
        return AttentionPlan.from_dict(record)

    def _resume(self, engine: TrainEngine, folder: Path) -> int:
        state = engine.load(folder)
        self.stream.load_state_dict(state["stream"])
        self.history = state["history"]
        self.seconds = state["seconds"]
        return engine.steps_done

    def _on_step(self, engine: TrainEngine, relaxation: Relaxation, step: int, loss: float) -> None:
        self.last_loss = loss - float(relaxation.last_penalty)
        if step % max(1, self.spec.steps // HISTORY_POINTS) == 0:
            metrics = relaxation.metrics()
            self.history.append({"step": step, "train_loss": self.last_loss, **metrics})
        due = self.timer.due()
        if self.job.checkpoint_minutes is None:
            due = due or step % self.spec.save_every == 0
        # A stage that resumed from its last step would not know that it had ended
        ended = relaxation.stop_early and relaxation.finished()
        if due and step < self.spec.steps and not ended:
            self.lap()
            state = {
                "stream": self.stream.state_dict(),
                "history": self.history,
                "seconds": self.seconds,
            }
            self.store.save(step, lambda folder: engine.save(folder, state))
            self.timer.saved()


def _claim(root: Path, job: TrainJob, spec: RelaxationSpec) -> None:
    """Clear what a different job may have left in `root`, and mark it as this job's."""
    settings = job.relaxation_settings.identity()
    for name in ("micro_batch_size", "activation_checkpointing"):  # which change no result
        del settings[name]

    def digest(**more: Any) -> str:
        parts: list[Any] = [spec.to_dict() | {"settings": settings | more}, job.schedule_steps]
        parts += [job.model_dir, job.teacher_dir, job.train_file, job.seed]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    mark = root / "job.json"
    # Marks of earlier versions have one of these settings too
    accepted = [digest(), *(digest(activation_checkpointing=on) for on in (False, True))]
    if mark.exists() and json.loads(mark.read_text())["digest"] in accepted:
        return
    if root.exists():
        shutil.rmtree(root)
    for index in range(len(spec.plans)):
        folder = root / f"stage-{index}"
        CheckpointStore.of_stage(job, folder).remove()
        folder.mkdir(parents=True)
    write_whole(mark, json.dumps({"digest": accepted[0]}))
