"""The arms that the comparisons train: the settings that are equal for all are defined here, once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attention.plan import AttentionPlan, LayerPlan
from trainers.engine import TrainEngine
from trainers.evaluation import evaluate
from trainers.loop import train_model
from trainers.losses import objective
from trainers.relaxations.stage import RelaxationSpec, relaxed_objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

LENGTH, BATCH = 128, 4  # tokens of a sequence and sequences of a step: small, so that all arms fit into minutes


@dataclass(frozen=True)
class Corpus:
    """Sequences `[N, 128]`: `train` for training, `calibration` for closed forms, `held_out` for all reported
    losses."""

    train: Tensor
    calibration: Tensor
    held_out: Tensor

    def loss(self, model: Any) -> float:
        return evaluate(model, self.held_out).loss


def neighbours(width: int) -> AttentionPlan:
    """Groups of `width` neighbouring heads in each of the demo's four layers of eight heads."""
    head_map = tuple(h // width for h in range(8))
    return AttentionPlan((LayerPlan(head_map, head_map),) * 4, 32)


def settings(rate: float) -> TrainSettings:
    return TrainSettings(learning_rate=rate, batch_size=BATCH)


def recovered(model: PreTrainedModel, corpus: Corpus, steps: int, rate: float, skipped: int = 0) -> float:
    """Held-out loss after `steps` of language modelling, starting `skipped` steps into the text."""
    with closing(TrainEngine(model, settings(rate), steps)) as engine:
        stream = BatchStream(corpus.train, BATCH)
        for _ in range(skipped):
            stream.next()
        train_model(engine, stream, steps=steps, loss_fn=objective())
        return corpus.loss(engine.model)


def fused_and_recovered(
    model: PreTrainedModel,
    plan: AttentionPlan,
    corpus: Corpus,
    steps: int,
    recovery: int,
    rate: float,
    knobs: dict[str, Any],
) -> tuple[float, float]:
    """DHA from `model`: up to `steps` steps of its Lagrangian, and the rest of `steps + recovery` without it.

    Returns the held-out loss right after collapsing, and at the end.
    """
    relaxation = RelaxationSpec("lagrangian", (plan.to_json(),), steps, knobs).install(model, 0, 0)
    with closing(TrainEngine(relaxation.model, settings(rate), steps, relaxation.parameter_groups())) as engine:
        done = train_model(
            engine,
            BatchStream(corpus.train, BATCH),
            steps=steps,
            loss_fn=relaxed_objective(relaxation, objective(), lambda: engine.steps_done),
            until=relaxation.finished,
        )
        collapsed = relaxation.collapsed_model().eval()
    before = corpus.loss(collapsed)
    return before, recovered(collapsed, corpus, steps + recovery - done, rate, skipped=done)


def best(arm: Callable[[float], float], rates: tuple[float, ...]) -> float:
    """The arm at its best learning rate of the grid; every value is printed."""
    result = {rate: arm(rate) for rate in rates}
    print({rate: round(loss, 3) for rate, loss in result.items()})
    return min(result.values())
