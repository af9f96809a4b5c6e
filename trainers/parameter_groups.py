"""Parameters that train at a rate of their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own peak learning rate (None: the model's), which warms up and falls as all others do.

    `shrink`: the share of a parameter that each step takes away at the peak, beside what Adam's step does and whatever
    the learning rate (decoupled weight decay, Loshchilov 2019, of shrink / learning rate).
    """

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float | None
    shrink: float = 0.0

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("a parameter group needs at least one parameter, got none")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(f"learning_rate of a parameter group must be above 0, got {self.learning_rate}")
        if not 0 <= self.shrink <= 1:
            raise ValueError(f"shrink of a parameter group must lie in [0, 1], got {self.shrink}")

    def options(self, learning_rate: float) -> tuple[float, float]:
        """The group's learning rate over the model's, and the weight decay that AdamW is to be given."""
        rate = learning_rate if self.learning_rate is None else self.learning_rate
        return rate / learning_rate, self.shrink / rate
