"""A training job as plain JSON: it can be logged, sent to a cluster, and run again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.settings import AUTO_STRATEGY, Shape, Strategy, TrainSettings

if TYPE_CHECKING:
    from trainers.relaxations.stage import RelaxationSpec


@dataclass(frozen=True)
class TrainJob:
    """A training: its model, text, length, and output.

    `seed` orders the data. `storage_path` and `out_dir` must be absolute.

    Its tokens are in the report, its steps not in the milestones; milestones (0,) measure the
    collapsed model and end there. One learning-rate schedule spans both, unless the relaxation has
    its own: stage i starts at position `i steps`, the training after them at
    `relaxation.total_steps`. What a stage that ends early leaves of its positions stays unused, so
    that the rate of a step depends on the job alone.

    A checkpoint is kept at each milestone; in between every `checkpoint_steps` steps, and once
    `checkpoint_minutes` have passed since the last one (None: never). With `settings.min_workers`
    the number of workers may change while it runs: each time it resumes from its newest checkpoint,
    on the workers that are available.

    `accelerator_type`, `placement_strategy`: where its workers run (`trainers.settings.Shape`).

    A `run_name` that already exists under `storage_path` continues that run: the same job run twice
    does nothing twice, and two different jobs need two names.

    Attributes:
        milestones: Steps, counted from the beginning of the training, after which the held-out loss
            is measured and reported with a checkpoint; the last one ends the job.
        start_tokens: Tokens that were trained on before `start_step`, by earlier jobs; None: as
            many as so many steps of this one take.
        total_steps: The step at which the learning-rate schedule ends (None: the last milestone).
        schedule_offset: The schedule's steps before step 0, for a job that continues after the
            relaxation of an earlier one; minus `start_step` for a schedule that begins, and warms
            up, with this job.
        first_sequence: Of the training data, for a job that reads on where an earlier one has
            stopped.
        resume_from: A checkpoint of an earlier job (`checkpoint_path` of its reports); the job then
            continues its weights, optimiser, schedule position and, on the same `train_file`, its
            data position from `start_step`.
        keep_best: Also keep the weights of the milestone with the lowest held-out loss
            (`trainers.jobs.best`); the reports then have `best_step`, `best_loss`, `best_kl` and
            `best_dir`.
        relaxation: A stage before all this: from `model_dir`, which is not converted yet, to a
            collapsed checkpoint (in the reports: `relaxed_dir`), where the training then starts.
        checkpoint_address: Address of its training checkpoints (s3://...), below its `run_name`;
            None: `storage_path`.
    """

    model_dir: str
    train_file: str
    eval_file: str
    out_dir: str
    storage_path: str
    run_name: str
    milestones: tuple[int, ...]
    settings: TrainSettings = field(default_factory=TrainSettings)
    teacher_dir: str | None = None
    start_step: int = 0
    start_tokens: int | None = None
    total_steps: int | None = None
    schedule_offset: int = 0
    first_sequence: int = 0
    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = None
    resume_from: str | None = None
    seed: int = 0
    max_failures: int = 1
    keep_best: bool = False
    relaxation: RelaxationSpec | None = None
    accelerator_type: str | None = None
    placement_strategy: Strategy = AUTO_STRATEGY
    checkpoint_address: str | None = None

    def __post_init__(self) -> None:
        steps = (self.start_step, *self.milestones)
        # All steps may be those of a relaxation, before this job or as its beginning
        collapsed_only = self.milestones == (0,) and (
            self.relaxation is not None or self.schedule_offset > 0 or self.total_steps == 0
        )
        if not collapsed_only and (not self.milestones or any(b <= a for a, b in pairwise(steps))):
            raise ValueError(
                f"milestones must increase from above start_step {self.start_step}, got "
                f"{self.milestones}"
            )
        if self.total_steps is not None and self.total_steps < self.milestones[-1]:
            raise ValueError(
                f"total_steps must reach the last milestone {self.milestones[-1]}, got "
                f"{self.total_steps}"
            )
        if self.settings.distillation != "none" and self.teacher_dir is None:
            raise ValueError(
                f"distillation {self.settings.distillation!r} needs a teacher_dir, got None"
            )
        if (
            self.relaxation
            and self.relaxation_settings.distillation != "none"
            and self.teacher_dir is None
        ):
            raise ValueError("a relaxation with distillation needs a teacher_dir, got None")
        if self.relaxation and self.resume_from is not None:
            raise ValueError(
                "a job that resumes has its relaxation behind it: set model_dir to the relaxed_dir "
                "of its reports, "
                "schedule_offset to its relaxation.scheduled_steps and relaxation to None"
            )
        if self.schedule_offset < -self.start_step or (self.schedule_offset and self.relaxation):
            raise ValueError(
                f"schedule_offset must be at least {-self.start_step} (minus start_step), and is 0 "
                f"for a job with its "
                f"own relaxation, got {self.schedule_offset}"
            )
        if self.start_step and self.resume_from is None:
            raise ValueError(
                f"start_step {self.start_step} needs the checkpoint it was reached with; set "
                f"resume_from"
            )
        for name in ("storage_path", "out_dir"):
            if not Path(getattr(self, name)).is_absolute():
                raise ValueError(
                    f"{name} must be an absolute path (workers run in other folders), got "
                    f"{getattr(self, name)!r}"
                )

    @property
    def shape(self) -> Shape:
        """Its workers."""
        return self.settings.shape._replace(
            accelerator_type=self.accelerator_type, strategy=self.placement_strategy
        )

    @property
    def schedule_steps(self) -> int:
        """The length of the learning-rate schedule, over the relaxation and all that follows."""
        before = self.relaxation.scheduled_steps if self.relaxation else self.schedule_offset
        return before + (self.milestones[-1] if self.total_steps is None else self.total_steps)

    def after_relaxation(self, model_dir: str) -> TrainJob:
        """Return the rest of the job, from the collapsed checkpoint on."""
        if self.relaxation is None:
            return self
        total = self.milestones[-1] if self.total_steps is None else self.total_steps
        offset = self.relaxation.scheduled_steps
        return replace(
            self, model_dir=model_dir, relaxation=None, total_steps=total, schedule_offset=offset
        )

    @property
    def relaxation_settings(self) -> TrainSettings:
        """Settings of the training in the relaxation stage.

        Always all weights, since it changes what the heads are.
        """
        settings = self.relaxation.settings if self.relaxation else None
        return settings or self.settings.model_copy(update={"tuning": "full"})

    def on(self, workers: int) -> TrainJob:
        """Return the same job on so many workers."""
        spec = self.relaxation
        if spec is not None and spec.settings is not None:
            spec = replace(spec, settings=spec.settings.on(workers))
        return replace(self, settings=self.settings.on(workers), relaxation=spec)

    def to_json(self) -> str:
        """Return the job as JSON, for the processes that run it."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["relaxation"] = self.relaxation.to_dict() if self.relaxation else None
        return json.dumps({**record, "settings": self.settings.model_dump()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainJob:
        """Read a job from the text that `to_json` returns."""
        record = json.loads(text)
        record["settings"] = TrainSettings(**record["settings"])
        if record.get("relaxation") is not None:
            from trainers.relaxations.stage import RelaxationSpec  # brings all of transformers

            record["relaxation"] = RelaxationSpec.from_dict(record["relaxation"])
        return cls(**{**record, "milestones": tuple(record["milestones"])})
