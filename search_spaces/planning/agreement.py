"""Compare the ranking of moves by the layer-output score with that by the whole model's loss.

See docs/methods.md, section 7. Legend: U stored KV heads per layer (units), G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import (  # pyright: ignore[reportMissingTypeStubs] - scipy has no types
    spearmanr,  # pyright: ignore[reportUnknownVariableType]
)

from attention.base.progress import stage
from attention.calibration.store import layer_statistics
from search_spaces.costs import exchanged
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.partitions import Partition, canonical
from search_spaces.planning.context import PlanningContext
from search_spaces.recipes.catalogue import RECIPES
from search_spaces.scores import LayerOutputScore, ModelScore
from search_spaces.site import SIDES, Site, plan_of_sites

MOVES = 24


@dataclass(frozen=True)
class Agreement:
    """Scores of the same moves at one site, higher is better.

    `cheap` of the layer's output, `full` minus the increase of the loss in nats per token.
    `spearman`: their rank correlation, None where fewer than 3 moves differ.
    """

    layer: int
    side: str
    moves: tuple[Partition, ...]
    cheap: tuple[float, ...]
    full: tuple[float, ...]

    @property
    def spearman(self) -> float | None:
        if min(len(set(self.cheap)), len(set(self.full))) < 3:
            return None
        return float(spearmanr(self.cheap, self.full)[0])  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        spread = max(self.full) - min(self.full)
        return {
            "layer": self.layer,
            "side": self.side,
            "moves": len(self.moves),
            "spearman": self.spearman,
            "spread": spread,
        }


def agreement(
    context: PlanningContext,
    generator: np.random.Generator,
    *,
    groups: int | None = None,
    moves: int = MOVES,
    tokens: int = 2048,
) -> list[Agreement]:
    """Score random swaps from neighbour groups both ways, at every layer, for keys and for values.

    Heads are mean-pooled; all other sites stay as they are.

    Args:
        groups: By default half of the units, 2 at least.
        moves: Different partitions a site, at most.
        tokens: Calibration tokens for either score.

    Raises:
        ValueError: Without model, sequences or calibration, or if there are no moves to compare.
    """
    count = len(context.units)
    groups = max(2, count // 2) if groups is None else groups
    if not 1 < groups < count:
        raise ValueError(
            f"{count} KV heads in {groups} groups leave nothing to swap; give 2 to {count - 1} "
            f"groups"
        )
    if context.calibration is None:
        raise ValueError(
            "the layer-output score needs calibration statistics; calibrate the model first"
        )
    swaps = [
        random_swaps(count, groups, moves, generator)
        for _ in range(2 * context.geometry.num_layers)
    ]
    sites: list[Agreement] = []
    with stage("scoring moves both ways", sum(map(len, swaps)), "moves") as progress:
        for index, candidates in enumerate(swaps):
            site = _site(context, index // 2, SIDES[index % 2], tokens)
            cheap = LayerOutputScore.from_site(site, tokens=tokens).scores(candidates)
            assert site.plan_with is not None and site.measure is not None
            full: list[float] = []
            whole = ModelScore(site.plan_with, site.measure)
            for candidate in candidates:
                full.append(whole.score(candidate))
                progress.step()
            sites.append(
                Agreement(site.layer, site.sides[0], tuple(candidates), tuple(cheap), tuple(full))
            )
    return sites


def random_swaps(
    count: int, groups: int, moves: int, generator: np.random.Generator
) -> list[Partition]:
    """Return different partitions in random order, each one exchange away from neighbour groups."""
    start = neighbour_partition(count, groups)
    swaps = {
        canonical(
            [
                *start[:i],
                exchanged(start[i], a, b),
                *start[i + 1 : j],
                exchanged(start[j], b, a),
                *start[j + 1 :],
            ]
        )
        for j in range(groups)
        for i in range(j)
        for a in start[i]
        for b in start[j]
    }
    order = sorted(swaps - {start})
    return [order[int(i)] for i in generator.permutation(len(order))[:moves]]


def _site(context: PlanningContext, layer: int, side: str, tokens: int) -> Site:
    pooled = RECIPES["gqa"]
    return Site(
        layer=layer,
        sides=(side,),
        by=(side,),
        units=context.units,
        heads=context.heads[layer],
        geometry=context.geometry.layer(layer),
        statistics=layer_statistics(context.calibration, layer, context.heads[layer]),
        model=context.model,
        plan_with=lambda partition: plan_of_sites({(layer, side): partition}, context.geometry),
        measure=lambda plan: context.increases_of(pooled, [(layer, plan)], tokens=tokens)[0],
    )
