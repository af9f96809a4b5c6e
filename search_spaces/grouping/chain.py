"""One chain of the walk over all sites of a model, for scores that arrive later.

The state of a searcher of trials.

Legend: L layers, U stored KV heads per layer (units).

Sites are searched from the first layer to the last, as in AsymGQA, the keys of a layer before its
values. **Silent** in the paper is what later sites look like meanwhile: they keep all heads, so
only plans of the last one meet the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention.geometry import HeadGeometry
from attention.plan import AttentionPlan
from search_spaces.grouping.neighbour import neighbour_partition
from search_spaces.grouping.steps import Walk
from search_spaces.partitions import Partition, check_groups
from search_spaces.site import SIDES, plan_of_sites

SiteKey = tuple[int, str]
"""Layer and side ("key" or "value")."""


def searched_sites(counts: Sequence[tuple[int, int]], units: int) -> dict[SiteKey, int]:
    """Heads to keep at each site where there is something to choose, in the order of the search.

    Args:
        counts: (key heads, value heads) of each layer.

    Raises:
        ValueError: For a count that `units` heads cannot make.
    """
    sites = {
        (layer, side): pair[i] for layer, pair in enumerate(counts) for i, side in enumerate(SIDES)
    }
    for groups in sites.values():
        check_groups(units, groups)
    return {site: groups for site, groups in sites.items() if groups not in (1, units)}


@dataclass
class Chain:
    """Walks one site after another; one plan at a time waits for its score.

    A chain and `make_plan` with the same generator and score make the same decisions. The state is
    plain values: pickled and read back, the chain continues unchanged.

    Raises ValueError for counts that the checkpoint's heads cannot make, or if `iterations` does
    not fit the sites.

    Attributes:
        counts: (key heads, value heads) of each layer.
        iterations: Moves at each of the `searched_sites`, at least one.
        settings: Probabilities, neighbours and `symmetric` of `Walk`.
    """

    geometry: HeadGeometry
    counts: Sequence[tuple[int, int]]
    iterations: Mapping[SiteKey, int]
    generator: np.random.Generator
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    found: dict[SiteKey, Partition] = field(default_factory=dict[SiteKey, Partition])
    score: float = -np.inf
    history: list[tuple[SiteKey, Walk]] = field(default_factory=list[tuple[SiteKey, Walk]])

    def __post_init__(self) -> None:
        choices = searched_sites(self.counts, self.geometry.num_kv_heads)
        if (
            sorted(self.iterations) != sorted(choices)
            or min(self.iterations.values(), default=1) < 1
        ):
            raise ValueError(
                f"iterations must give at least one move for each of the {len(choices)} sites "
                f"where there is a choice, "
                f"got {dict(self.iterations)}"
            )
        self._open = [(layer, side) for layer in range(len(self.counts)) for side in SIDES]
        self._generators = self.generator.spawn(len(self._open))
        self._settle()

    def _settle(self) -> None:
        """Skip the sites that have only one possible grouping."""
        while self._open and self._open[0] not in self.iterations:
            site = self._open.pop(0)
            self.found[site] = neighbour_partition(self.geometry.num_kv_heads, self._groups(site))

    def _groups(self, site: SiteKey) -> int:
        return self.counts[site[0]][SIDES.index(site[1])]

    @property
    def walk(self) -> Walk | None:
        """The walk at the site that is being searched."""
        return (
            self.history[-1][1] if self.history and self.history[-1][0] not in self.found else None
        )

    @property
    def done(self) -> bool:
        """Whether all sites have been searched."""
        return not self._open

    @property
    def moves(self) -> int:
        """Number of moves made, over all sites."""
        return sum(len(walk.trace) for _, walk in self.history)

    @property
    def plan(self) -> AttentionPlan:
        """The best partition of every site that has been searched.

        The others keep all heads until then.
        """
        return plan_of_sites(self.found, self.geometry)

    def propose_next(self, similarities: Mapping[SiteKey, np.ndarray]) -> AttentionPlan | None:
        """Return the plan to score next; the same plan until `tell` is called.

        None when all sites have been searched.

        Args:
            similarities: Of the units at each site, `[U, U]`, higher is closer.
        """
        if self.done:
            return None
        site = self._open[0]
        walk = self.walk
        if walk is None:
            generator = self._generators[2 * site[0] + SIDES.index(site[1])]
            walk = Walk(self.geometry.num_kv_heads, self._groups(site), generator, **self.settings)
            self.history.append((site, walk))
        return plan_of_sites(
            {**self.found, site: walk.propose_next(similarities[site])}, self.geometry
        )

    def tell(self, score: float | None) -> None:
        """Take the score of what was proposed (higher is better); None if it could not be measured.

        Raises:
            ValueError: For a score that is not a number, or if nothing was proposed.
        """
        walk = self.walk
        if walk is None:
            raise ValueError("a score came, but nothing was proposed; call propose_next first")
        walk.tell(score)
        site = self._open[0]
        if len(walk.trace) == self.iterations[site]:
            self.found[site] = walk.found
            self.score = (
                walk.best_score
            )  # of the plan of all sites searched, with this one at its best
            self._open.pop(0)
            self._settle()
