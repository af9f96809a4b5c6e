"""Running a refinement, what it reports, and the part that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attention.axes import REFINEMENT
from attention.base.products import exact_products
from attention.conversion.refinement.original import Original


@dataclass(frozen=True)
class FitWork:
    """The cost of optimising single layers.

    Attributes:
        optimizer_steps: Adam steps.
        tokens: Tokens that went through a layer in them, each time that one did.
        flops: Floating-point operations: 6 per parameter of the layer's attention and token, as for
            a training; the products of attention itself are left out.
    """

    optimizer_steps: int = 0
    tokens: int = 0
    flops: float = 0.0

    def __add__(self, other: FitWork) -> FitWork:
        return FitWork(
            self.optimizer_steps + other.optimizer_steps,
            self.tokens + other.tokens,
            self.flops + other.flops,
        )


@dataclass(frozen=True)
class LayerFit:
    """Held-out error of one layer before and after a step of a refinement.

    Attributes:
        step: Name of the step.
        layer: Number of the layer in its checkpoint.
        before: Error relative to the target's power.
        after: The same after the step.
        work: What the step took; nothing for a fit in closed form.
    """

    step: str
    layer: int
    before: float
    after: float
    work: FitWork = FitWork()

    @property
    def improves(self) -> bool:
        return self.after < self.before


def refine(
    name: str,
    original: PreTrainedModel | Original,
    converted: PreTrainedModel,
    sequences: Tensor | None,
    settings: Mapping[str, Any] | None = None,
    *,
    first: int = 0,
    layer_steps: Sequence[int] | None = None,
) -> tuple[LayerFit, ...]:
    """Run the refinement `name` on `converted` in place.

    Args:
        name: A part of the axis.
        original: The model to come close to; an `Original` where others look at the same layers.
        converted: The model that is changed.
        sequences: `[N, T]` calibration tokens.
        settings: Knobs of the part.
        first: The number in its checkpoint of the models' first layer, where they are a window of a
            larger model; layers are seeded and reported by their numbers there.
        layer_steps: Steps of a local fit of each layer, where it is not the same for all.

    Returns:
        One entry per layer and step, in the order in which they ran.

    Raises:
        ValueError: For an unknown name or setting, or if the part needs sequences and there are
            fewer than two.
    """
    part = REFINEMENT.get(name)
    knobs = part.settings(settings)
    if "sequences" in part.needs and (sequences is None or len(sequences) < 2):
        count = "none" if sequences is None else len(sequences)
        raise ValueError(f"refinement={name} needs at least two calibration sequences, got {count}")
    more = {"layer_steps": layer_steps} if "increases" in part.needs else {}
    with exact_products():
        return part(Original.of(original), converted, sequences, first=first, **more, **knobs)


@REFINEMENT.part("none", source="-")
def keep(
    original: Original, converted: PreTrainedModel, sequences: Tensor | None, *, first: int = 0
) -> tuple[LayerFit, ...]:
    """Return the closed-form conversion as it is."""
    return ()
