"""The one training loop, of fine-tuning and of full training, and what it needs of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from attention.base.products import exact_products
from trainers.text.data import BatchStream


class LossFunction(Protocol):
    """A loss in nats per token, the mean over the first `rows` sequences of a batch `[B, T]`.

    The others, copies that make batches of workers equally large, do not count. None: all count.
    One that is a mean over some predictions alone is a `CountedLoss`.
    """

    def __call__(self, model: Any, batch: Tensor, rows: int | None = None) -> Tensor: ...


@dataclass(frozen=True)
class CountedLoss:
    """A loss that is the mean over some predictions of a batch, and their number.

    Attributes:
        loss: The loss.
        count: Number of these predictions in a batch `[B, T]`. With it the mean of a step does not
            depend on how its sequences are divided over workers and passes.
    """

    loss: LossFunction
    count: Callable[[Tensor], int]

    def __call__(self, model: Any, batch: Tensor, rows: int | None = None) -> Tensor:
        return self.loss(model, batch, rows)


class TrainingDiverged(RuntimeError):
    """The training loss is no longer a finite number."""


class Stepper(Protocol):
    """The interface of an engine for the loop.

    One optimiser step, returning the loss averaged over all workers.
    """

    def step(self, batch: Tensor, loss_fn: LossFunction) -> float: ...


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own peak learning rate, which warms up and falls as all others do.

    Attributes:
        learning_rate: Peak; None: the model's.
        shrink: The share of a parameter that each step subtracts at the peak, in addition to Adam's
            step and independent of the learning rate (decoupled weight decay, Loshchilov 2019, of
            shrink / learning rate).
    """

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float | None
    shrink: float = 0.0

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("a parameter group needs at least one parameter, got none")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(
                f"learning_rate of a parameter group must be above 0, got {self.learning_rate}"
            )
        if not 0 <= self.shrink <= 1:
            raise ValueError(f"shrink of a parameter group must lie in [0, 1], got {self.shrink}")

    def options(self, learning_rate: float) -> tuple[float, float]:
        """Return the group's learning rate over the model's, and its weight decay for AdamW."""
        rate = learning_rate if self.learning_rate is None else self.learning_rate
        return rate / learning_rate, self.shrink / rate


def train_model(
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
    losses: list[float] | None = None,
) -> int:
    """Return the steps `start_step + 1` to `steps`.

    `on_step(step, loss)` after each; `on_milestone(step, mean loss since the last milestone)` after
    those in `milestones`. Steps count from the beginning of the whole training, so a resumed run
    passes the completed steps as `start_step`, and as `losses`, which is updated, those since the
    last milestone. `until`, called after each step, may end the training early.

    Returns:
        The last step done.

    Raises:
        TrainingDiverged: At the first loss that is not finite.
    """
    losses = [] if losses is None else losses
    for step in range(start_step + 1, steps + 1):
        with exact_products():
            loss = engine.step(stream.next(), loss_fn)
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"training loss at step {step} of {steps} is {loss}; lower learning_rate or "
                f"max_grad_norm, "
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
