"""One walk, step by step.

The decisions of the walk of AsymGQA between two scores, for callers that wait for scores.

Legend: n heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from search_spaces.partitions import Partition, canonical, full_sizes, random_partition


class WalkStep(NamedTuple):
    """One iteration.

    The partition tried, its score, the best score, whether the walk moved there, whether the walk
    was reset before it.
    """

    partition: Partition
    score: float
    best: float
    accepted: bool
    reset: bool


def propose(
    partition: Partition,
    similarity: np.ndarray,
    *,
    preserve: float,
    neighbours: int,
    generator: np.random.Generator,
    symmetric: bool = False,
) -> Partition:
    """One move of the walk (AsymGQA, App. A, Alg. 1 and 2). At least two groups.

    A random head a goes to the group of b, one of its `neighbours` most similar heads outside its
    own group. In return another random member of that group (sec. 2.1: "another head b' in group
    B"; b only where it is alone there) takes the place of a: always if `symmetric`, else with
    probability `preserve`, and always when a is alone, since a group may not vanish. (Were b to go
    back, a and b would end apart, and with two groups similarity would decide nothing. The paper's
    text has a larger `preserve` unbalance more, its pseudo-code less; this follows the
    pseudo-code.)
    """
    owner = {head: index for index, group in enumerate(partition) for head in group}
    a = int(generator.integers(len(owner)))
    home = owner[a]
    outside = [h for h in range(len(owner)) if owner[h] != home]
    # Ties go to the lower head: the order must not depend on the machine's sort.
    nearest = sorted(outside, key=lambda h: (-similarity[a, h], h))[:neighbours]
    b = nearest[int(generator.integers(len(nearest)))]
    target = owner[b]
    keeps_sizes = generator.random() < preserve
    groups = [list(group) for group in partition]
    if symmetric or keeps_sizes or len(groups[home]) == 1:
        remaining = [head for head in groups[target] if head != b] or [b]
        back = remaining[int(generator.integers(len(remaining)))]
        groups[target].remove(back)
        groups[home].append(back)
    groups[home].remove(a)
    groups[target].append(a)
    return canonical(groups)


@dataclass
class Walk:
    """The state of one walk: its partition, the best one, and the one to be scored."""

    count: int
    groups: int
    generator: np.random.Generator
    accept: float = 0.1
    reset: float = 0.1
    preserve: float = 0.2
    neighbours: int = 3
    symmetric: bool = False
    current: Partition = field(init=False)
    best: Partition | None = None
    best_score: float = -np.inf
    pending: Partition | None = None
    trace: list[WalkStep] = field(default_factory=list[WalkStep])
    _was_reset: bool = False

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"neighbours must be at least 1, got {self.neighbours}")
        self.current = random_partition(self.count, self.groups, self.generator, full_sizes)

    def propose_next(self, similarity: np.ndarray) -> Partition:
        """Return the partition to score next; the same one until `tell` is called.

        `similarity` `[n, n]`, higher is closer.
        """
        if self.pending is None:
            self._was_reset = bool(self.generator.random() < self.reset)
            if self._was_reset:
                self.current = random_partition(self.count, self.groups, self.generator, full_sizes)
            self.pending = propose(
                self.current,
                similarity,
                preserve=self.preserve,
                neighbours=self.neighbours,
                generator=self.generator,
                symmetric=self.symmetric,
            )
        return self.pending

    def tell(self, score: float | None) -> WalkStep:
        """Take the score of what was proposed, higher is better.

        None if it could not be measured: not accepted.

        Raises:
            ValueError: For a score that is not a number, or if nothing was proposed.
        """
        tried = self.pending
        if tried is None:
            raise ValueError("a score came, but nothing was proposed; call propose_next first")
        value = -np.inf if score is None else float(score)
        if np.isnan(value):
            raise ValueError(
                f"the score of {tried} is not a number; check the model and the data it was "
                f"measured on"
            )
        better = score is not None and (self.best is None or value > self.best_score)
        lucky = self.generator.random() < self.accept
        accepted = score is not None and bool(lucky or better)
        if better:
            self.best = tried
            self.best_score = value
        if accepted:
            self.current = tried
        self.pending = None
        self.trace.append(WalkStep(tried, value, self.best_score, accepted, self._was_reset))
        return self.trace[-1]

    @property
    def found(self) -> Partition:
        """The best partition; where the walk is if nothing could be measured."""
        return self.current if self.best is None else self.best
