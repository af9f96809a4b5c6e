"""The one training loop: brief fine-tuning and full continued pre-training differ in settings only."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch import Tensor

from trainers.text.stream import BatchStream

LossFunction = Callable[[Any, Tensor], Tensor]
"""`loss_fn(model, batch [B, T]) -> scalar`, the mean over the batch in nats a token."""


class TrainingDiverged(RuntimeError):
    """The training loss is no longer a finite number."""


class Stepper(Protocol):
    """What the loop needs of an engine: one optimiser step, returning the loss averaged over all workers."""

    def step(self, batch: Tensor, loss_fn: LossFunction) -> float: ...


def train(
    engine: Stepper,
    stream: BatchStream,
    *,
    steps: int,
    loss_fn: LossFunction,
    start_step: int = 0,
    milestones: Collection[int] = (),
    on_milestone: Callable[[int, float], None] | None = None,
    on_step: Callable[[int, float], None] | None = None,
    until: Callable[[], bool] | None = None,
) -> int:
    """Steps `start_step + 1` to `steps`. `on_step(step, loss)` after each; `on_milestone(step, mean loss since the
    last milestone)` after those in `milestones`. Steps count from the beginning of the whole training, so a resumed
    run passes what is done as `start_step`. `until`, asked after each step, may end the training early. Returns the
    last step done. Raises TrainingDiverged at the first loss that is not finite.
    """
    losses: list[float] = []
    for step in range(start_step + 1, steps + 1):
        loss = engine.step(stream.next(), loss_fn)
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"training loss at step {step} of {steps} is {loss}; lower learning_rate or max_grad_norm, "
                "or lengthen warmup_fraction"
            )
        losses.append(loss)
        if on_step is not None:
            on_step(step, loss)
        if step in milestones and on_milestone is not None:
            on_milestone(step, sum(losses) / len(losses))
            losses.clear()
        if until is not None and until():
            return step
    return max(start_step, steps)
