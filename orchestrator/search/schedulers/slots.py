"""How many trials run at a time, when some of them may be paused.

Tune's own limit (`max_concurrent_trials`) counts a paused trial as one that runs [ray 2.60]: as soon as that many are
paused nothing would start any more. Searcher and scheduler therefore share these slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.tune.search import Searcher


@dataclass
class Slots:
    """`capacity` trials at most, a number or who knows it now (None: no limit). `promised`: paused trials that go
    first."""

    capacity: int | Callable[[], int] | None = None
    promised: int = 0
    taken: set[str] = field(default_factory=set)

    @property
    def full(self) -> bool:
        most = self.capacity() if callable(self.capacity) else self.capacity
        return most is not None and len(self.taken) >= most

    def take(self, trial_id: str) -> None:
        self.taken.add(trial_id)

    def free(self, trial_id: str) -> None:
        self.taken.discard(trial_id)


class SlotSearcher(Searcher):
    """Asks the searcher behind it only when a new trial may start."""

    def __init__(self, searcher: Searcher, slots: Slots) -> None:
        super().__init__(metric=searcher.metric, mode=searcher.mode)
        self.searcher, self.slots = searcher, slots

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict, **spec: Any) -> bool:
        return self.searcher.set_search_properties(metric, mode, config, **spec)

    def suggest(self, trial_id: str) -> Any:
        if self.slots.full or self.slots.promised:
            return None
        config = self.searcher.suggest(trial_id)
        if isinstance(config, dict):
            self.slots.take(trial_id)
        return config

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        self.searcher.on_trial_complete(trial_id, result, error)
