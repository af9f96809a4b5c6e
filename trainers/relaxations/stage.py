"""A relaxation stage as plain JSON, and the loss that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan
from trainers.loop import CountedLoss, LossFunction
from trainers.relaxations.base import RELAXATION_TRAINING, Relaxation, is_coarser, lifted
from trainers.settings import TrainSettings


@dataclass(frozen=True)
class RelaxationSpec:
    """Which relaxation, towards what, for how long.

    `knobs` are the part's.

    For "lagrangian" alone.

    Attributes:
        plans: JSON of the plan to reach, or of several, each coarser than the one before, reached
            one after the other (DHA's 2x, 4x, 8x: App. B.2); every one takes up to `steps` steps.
        settings: Of this training; None for those of the job.
        save_every: Steps between training checkpoints, which a killed run resumes from, of a job
            without `checkpoint_minutes`.
        own_schedule: Each stage has a separate learning-rate schedule, and so has the training
            after it (DHA, Table 4); else one spans all.
        regroup_steps: So many steps before each stage but the last say which heads of a group are
            fused first (`trainers.fusion_search`); 0: as `plans` have it.
    """

    name: str
    plans: tuple[str, ...]
    steps: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    settings: TrainSettings | None = None
    save_every: int = 50
    own_schedule: bool = False
    regroup_steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", tuple(self.plans))
        object.__setattr__(self, "knobs", RELAXATION_TRAINING.get(self.name).settings(self.knobs))
        if self.steps < 1 or self.save_every < 1:
            raise ValueError(
                f"steps and save_every must be at least 1, got {self.steps} and {self.save_every}"
            )
        if self.regroup_steps < 0 or (self.regroup_steps and self.name != "lagrangian"):
            raise ValueError(
                "regroup_steps is for relaxation=lagrangian, whose mixes tell distances, and at "
                "least 0; got "
                f"{self.regroup_steps} with {self.name}"
            )
        if self.settings is not None and self.settings.tuning != "full":
            raise ValueError(
                f"a relaxation trains all weights: its tuning must be full, got "
                f"{self.settings.tuning!r}"
            )
        if not self.plans:
            raise ValueError("a relaxation needs at least one plan, got none")
        stages = [AttentionPlan.from_json(text) for text in self.plans]
        for a, b in pairwise(stages):
            if not is_coarser(a, b):
                raise ValueError(
                    "each plan of a relaxation must be made of whole groups of the one before"
                )

    @property
    def total_steps(self) -> int:
        """Steps of all stages together, if none ends early."""
        return len(self.plans) * self.steps

    @property
    def scheduled_steps(self) -> int:
        """Positions that the relaxation takes on the schedule of what follows it."""
        return 0 if self.own_schedule else self.total_steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `RelaxationSpec.from_dict` is the inverse."""
        settings = None if self.settings is None else self.settings.model_dump()
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **record,
            "plans": list(self.plans),
            "knobs": dict(self.knobs),
            "settings": settings,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RelaxationSpec:
        """Read a relaxation from its record."""
        settings = record.get("settings")
        return cls(
            **{**record, "settings": None if settings is None else TrainSettings(**settings)}
        )

    def install(
        self, model: PreTrainedModel, stage: int, seed: int, plan: AttentionPlan | None = None
    ) -> Relaxation:
        """Return the relaxation of one stage on a copy of `model`, lifted where need be.

        Args:
            model: The model.
            stage: Number of the stage.
            seed: For random choices.
            plan: The plan to reach, instead of the stage's.
        """
        plan = plan or AttentionPlan.from_json(self.plans[stage])
        if not is_coarser(plan_of(model), plan):
            model = lifted(model)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + stage)
        return RELAXATION_TRAINING.get(self.name)(
            model, plan, steps=self.steps, generator=generator, **self.knobs
        )


def relaxed_objective(
    relaxation: Relaxation, loss_fn: LossFunction, step: Callable[[], int]
) -> LossFunction:
    """Return `loss_fn` plus the penalty; `step()` returns how many steps are done.

    The penalty is also `relaxation.last_penalty`.
    """

    def objective(model: Any, batch: Tensor, rows: int | None = None) -> Tensor:
        now = step()
        relaxation.begin(now)
        penalty = relaxation.penalty(now)
        relaxation.last_penalty = penalty.detach()
        return loss_fn(model, batch, rows) + penalty

    if isinstance(loss_fn, CountedLoss):
        return CountedLoss(objective, loss_fn.count)
    return objective
