"""Successive halving with promotions: which trials have earned their next rung.

Asynchronous (Li 2020, Algorithm 2): of the n trials that a rung has seen, the best floor(n / factor) may go on; those
of them that have not yet done so are promoted, the highest rung first. What "best" means is left to a selection, which
for several objectives is non-dominated sorting (Schmucker 2021, Algorithm 1); with one objective it is a sort.

Synchronous (Jamieson 2016): a rung promotes once all trials that can reach it have done so. Slow trials hold up the
others; what is promoted depends on the results alone and not on the order in which they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Values = tuple[float, ...]
Selection = Callable[[Sequence[Values], int], Sequence[int]]


@dataclass
class Rung:
    """What a rung has seen, in order of arrival. `waiting`: came here and neither went on nor ended."""

    trials: list[str] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)
    promoted: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    best: list[str] | None = None  # of those seen so far, the ones that may go on; None: to be found anew


class Rungs:
    """The rungs below the last one. `select(values, count)` gives the indices of the `count` best, best first.

    `expected`: of a synchronous search, how many trials will be told of or leave (None: asynchronous).
    """

    def __init__(self, count: int, factor: float, select: Selection, expected: int | None = None) -> None:
        self.rungs = [Rung() for _ in range(count)]
        self._factor, self._select, self._expected = factor, select, expected
        self._place: dict[str, int] = {}
        self._left: set[str] = set()
        self._unseen = 0
        self._closed = False

    def tell(self, trial: str, rung: int, values: Values) -> None:
        """A trial has come to a rung, for the first time. It waits there until it is promoted."""
        place = self.rungs[rung]
        place.trials.append(trial)
        place.values.append(values)
        place.waiting.add(trial)
        place.best = None
        self._place[trial] = rung

    def leave(self, trial: str) -> None:
        """A trial goes no further. What it scored still counts at the rungs that it came to."""
        if trial in self._left:
            return
        self._left.add(trial)
        if trial in self._place:
            self.rungs[self._place[trial]].waiting.discard(trial)
        else:
            self._unseen += 1

    def rejoin(self, trial: str) -> None:
        """A trial that had left is there again, where it had come to."""
        if trial not in self._left:
            return
        self._left.discard(trial)
        if trial not in self._place:
            self._unseen -= 1
        elif trial not in (place := self.rungs[self._place[trial]]).promoted:
            place.waiting.add(trial)

    def promote(self, trial: str) -> None:
        place = self.rungs[self._place[trial]]
        place.promoted.add(trial)
        place.waiting.discard(trial)

    def promoted(self, trial: str, rung: int) -> bool:
        return trial in self.rungs[rung].promoted

    def close(self) -> bool:
        """No more trials come: of each rung at least one goes on. False if that was known."""
        was, self._closed = self._closed, True
        for rung in self.rungs:
            rung.best = None
        return not was

    def next(self) -> str | None:
        """The trial to promote now: the best of the highest rung that has one to promote; None if there is none."""
        for index in reversed(range(len(self.rungs))):
            if self.rungs[index].waiting and self._open(index):
                for trial in self._best(index):
                    if trial in self.rungs[index].waiting:
                        return trial
        return None

    def _best(self, index: int) -> list[str]:
        """The trials that may go on from a rung, best first: found anew after each arrival only."""
        rung = self.rungs[index]
        if rung.best is None:
            count = max(int(len(rung.trials) / self._factor), int(self._closed))
            order = range(len(rung.trials))
            if self._expected is not None:  # of equals the first counts: here, too, whatever came first
                order = sorted(order, key=lambda place: rung.trials[place])
            kept = self._select([rung.values[place] for place in order], count) if count else []
            rung.best = [rung.trials[order[place]] for place in kept]
        return rung.best

    def _open(self, index: int) -> bool:
        """Whether a rung may promote: always, but in a synchronous search only when nobody else can come to it."""
        if self._expected is None:
            return True
        if not self._closed and len(self._place) + self._unseen < self._expected:
            return False
        return all(self._passed(below, index) for below in range(index))

    def _passed(self, below: int, index: int) -> bool:
        """Whether all that will go on from a lower rung have come to `index`, or further, or have left."""
        rung = self.rungs[below]
        if any(trial in rung.waiting for trial in self._best(below)):
            return False
        return all(trial in self._left or self._place[trial] >= index for trial in rung.promoted)
