"""Align: each head fades from its own key and value to its group's new ones, by an L0 mask.

Jin 2024, section 3.5, Eq. 25 to 29; the masks are hard concrete (Louizos 2017, Eq. 10 to 13).
Legend: L layers with masks, H query heads, G groups, d head dim, D model dim; z mask, T target.

Where the paper is **silent**:
- the mean mask of Eq. 29 is the probability that a mask is not 0 (Louizos 2017, Eq. 12): a clamped
  sample at 1 has no gradient, so masks that start at 1 would stay there;
- Eq. 29 is negative for a mean mask below T, and still falls down to T - 1/2: masks run ahead of
  the schedule. The formula is kept; T does not fall below 0;
- the location log α starts at 4: then the mask is exactly 1 without noise, and fewer than one in
  ten below 1 with it;
- the paper's constraint and rate close the masks in thousands of steps. With fewer, both are scaled
  up (`relaxation_knobs`): with the rate alone, masks that the loss needs in the first steps stay
  open for good;
- one sample of the masks is used for a whole step, in all passes and on all workers.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.conversion.relaxation_knobs import HARD_CONCRETE, constraint_weight, rate_of
from attention.heads import group_means
from attention.plan import AttentionPlan, PlanError
from trainers.loop import ParameterGroup
from trainers.relaxations.base import (
    RELAXATION_TRAINING,
    HeadGroups,
    HeadProjection,
    Learned,
    Relaxation,
    open_projections,
    replace_projections,
)

_SOURCE = "Jin 2024, sec. 3.5, Eq. 25 to 29; Louizos 2017, Eq. 10 to 13"
# Temperature and stretched interval, Louizos 2017, sec. 4.1.
BETA = 2 / 3
GAMMA = -0.1
ZETA = 1.1


# ---- the equations ----------------------------------------------------------------------------


def stretched(s: Tensor) -> Tensor:
    """Return min(1, max(0, s (ζ - γ) + γ)): Louizos 2017, Eq. 11."""
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def sampled_mask(log_alpha: Tensor, uniform: Tensor) -> Tensor:
    """Return a hard concrete sample from uniform noise in (0, 1) (Louizos 2017, Eq. 10 and 11)."""
    return stretched(torch.sigmoid((uniform.logit() + log_alpha) / BETA))


def certain_mask(log_alpha: Tensor) -> Tensor:
    """Return the mask without noise (Louizos 2017, Eq. 13)."""
    return stretched(torch.sigmoid(log_alpha))


def alive(log_alpha: Tensor) -> Tensor:
    """Probability that a sample is not 0 (Louizos 2017, Eq. 12)."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def target_size(step: int, fall: float) -> float:
    """T of Eq. 29: from 1 at step 0 linearly to 0 at step `fall`, and 0 afterwards."""
    return max(0.0, 1 - step / fall) if fall > 0 else 0.0


def size_constraint(mean_mask: Tensor, size: float) -> Tensor:
    """Eq. 29: (z̄ - T) + (z̄ - T)²."""
    return (mean_mask - size) + (mean_mask - size).square()


def faded(z: Tensor, original: Tensor, shared: Tensor, head_map: Tensor) -> Tensor:
    """Eq. 27 and 28.

    Z W + (1 - z) W~ of the head's group. z `[H]`, own `[H, ...]`, shared `[G, ...]`.
    """
    z = z.to(original.dtype).reshape(-1, *(1,) * (original.ndim - 1))
    return z * original + (1 - z) * shared[head_map]


# ---- the relaxation ---------------------------------------------------------------------------


class MaskedProjection(HeadProjection):
    """The k or v projection of Align.

    Its original heads, its groups' new heads, the masks.

    Args:
        linear: The projection to replace.
        groups: The heads of each new head.
        new_heads: What new heads start as: `mean` of their group, or the head `nearest` to it.

    Attributes:
        masks: Whose masks it fades by, and at which row of them.
    """

    head_map: Tensor
    masks: tuple[HardConcrete, int]

    def __init__(self, linear: HeadProjection, groups: HeadGroups, *, new_heads: str) -> None:
        weight, bias = linear.source()
        super().__init__(weight, bias)
        if new_heads == "nearest":
            sources = nearest_to_mean(weight, groups)
        else:
            sources = groups
        self.shared_weight = _means(weight, sources)
        self.shared_bias = None if bias is None else _means(bias, sources)
        head_map = torch.empty(len(weight), dtype=torch.int64)
        for index, group in enumerate(groups):
            head_map[list(group)] = index
        self.register_buffer("head_map", head_map.to(weight.device), persistent=False)

    def mixed(self) -> tuple[Tensor, Tensor | None]:
        masks, row = self.masks
        z = masks.masks()[row]
        (weight, bias) = self.source()
        weight = faded(z, weight, self.shared_weight, self.head_map)
        if bias is not None and self.shared_bias is not None:
            bias = faded(z, bias, self.shared_bias, self.head_map)
        return weight, bias

    def collapsed(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (
            self.shared_weight.detach(),
            None if self.shared_bias is None else self.shared_bias.detach(),
        )


@torch.no_grad()
def nearest_to_mean(weight: Tensor, groups: HeadGroups) -> HeadGroups:
    """Return for each group the one head whose weights are nearest to the group's mean.

    `weight` is `[S, d, D]`. Of equally near heads, the first.
    """
    means = group_means(weight, groups)
    distances = [
        (weight[list(group)] - mean).flatten(1).norm(dim=1)
        for group, mean in zip(groups, means, strict=True)
    ]
    return tuple(
        (group[int(away.argmin())],) for group, away in zip(groups, distances, strict=True)
    )


def _means(rows: Tensor, groups: HeadGroups) -> nn.Parameter:
    """Return the mean of each group's heads, `[S, ...]` -> `[G, ...]`."""
    return nn.Parameter(group_means(rows.detach(), groups))


@RELAXATION_TRAINING.part("hard_concrete", source=_SOURCE, knobs=HARD_CONCRETE)
class HardConcrete(Relaxation):
    """Align's pruning training, of a copy of `model`, towards `plan`.

    `penalty` is Eq. 29 over all masks at once.

    One mask a query head serves its key and its value (Eq. 27 and 28). `generator` seeds the masks'
    noise (None: 0). Raises PlanError if the model shares heads already.
    """

    seed: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        plan: AttentionPlan,
        *,
        steps: int,
        generator: torch.Generator | None = None,
        rate: float | str,
        weight: float | str,
        log_alpha_start: float,
        target_fraction: float,
        freeze_fraction: float,
        new_heads: str,
    ) -> None:
        new, old = open_projections(model, plan)
        if not all(layer.is_identity for layer in old.layers):
            raise PlanError(
                "relaxation=hard_concrete needs one key and one value head a query head; lift the "
                "model first"
            )
        masked_projection = partial(MaskedProjection, new_heads=new_heads)
        layers = replace_projections(new, old, plan, masked_projection)
        super().__init__(new, plan, layers)
        self.rate = rate_of("hard_concrete", rate, steps)
        self.weight = constraint_weight(weight, rate, steps)
        self.fall = target_fraction * steps
        self.freeze = freeze_fraction * steps
        masked = [layer for layer in layers if layer]
        self._layers = [index for index, layer in enumerate(layers) if layer]
        self._shape = len(masked), plan.num_heads
        self.log_alpha = Learned(
            torch.full(self._shape, log_alpha_start, device=new.device, dtype=new.dtype)
        )
        seed = 0 if generator is None else int(torch.randint(2**31, (1,), generator=generator))
        self.register_buffer("seed", torch.tensor(seed, device=new.device))
        for row, layer in enumerate(masked):
            for projection in layer.values():
                projection.masks = self, row
        self.begin(0)

    def begin(self, step: int) -> None:
        """Draw the step's noise.

        A function of seed and step alone, so equal on all workers and after a resume.
        """
        self.step = step
        # A compiled layer is compiled anew where a number of a module has changed, so no layer
        # reads the step.
        self.frozen = step >= self.freeze
        generator = torch.Generator().manual_seed(int(self.seed) * 1_000_003 + step)
        uniform = torch.rand(self._shape, generator=generator, dtype=torch.float64)
        self._uniform = uniform.clamp(1e-6, 1 - 1e-6).float()

    def masks(self) -> Tensor:
        """Z `[L, H]` float32.

        This step's sample in training, the mask without noise in evaluation, 0 once frozen.
        """
        log_alpha = self.log_alpha().float()
        if self.frozen:
            return log_alpha * 0
        return (
            sampled_mask(log_alpha, self._uniform.to(log_alpha.device))
            if self.training
            else certain_mask(log_alpha)
        )

    def penalty(self, step: int) -> Tensor:
        log_alpha = self.log_alpha().float()
        if step >= self.freeze:
            return log_alpha.sum() * 0
        return self.weight * size_constraint(alive(log_alpha).mean(), target_size(step, self.fall))

    def finished(self) -> bool:
        """All masks are frozen at 0, so that collapsing changes nothing."""
        return self.frozen

    @torch.no_grad()
    def remaining(self) -> float:
        """Return the mean mask without noise, whether or not masks are frozen by now."""
        return float(certain_mask(self.log_alpha().float()).mean())

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return mean_mask (without noise), target T, masks_open (share of masks above 0).

        `mean_mask_layer_<n>` is that of one layer (Jin 2024, Fig. 4).
        """
        log_alpha = self.log_alpha().float()
        z = log_alpha * 0 if self.finished() else certain_mask(log_alpha)
        return {
            "mean_mask": float(z.mean()),
            "target": target_size(self.step, self.fall),
            "masks_open": float((z > 0).float().mean()),
            **{
                f"mean_mask_layer_{index}": mean
                for index, mean in zip(self._layers, z.mean(dim=1).tolist(), strict=True)
            },
        }

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup((self.log_alpha.value,), self.rate)]
