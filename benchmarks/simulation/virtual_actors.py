"""Ray's actors in virtual time: the interface for Ray Tune's controller, without any processes."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any

START_SECONDS, RESET_SECONDS, SAVE_SECONDS = 4.0, 0.1, 0.01


class VirtualActors:
    """Stands in for Ray's actor manager: the same calls, but time is virtual and nothing runs.

    `report(trial_id, rung)`: a trial's report there and the seconds it takes; None after its last rung. `busy`: seconds
    of work, over all workers; `events`: number of events.
    """

    def __init__(self, report: Callable[[str, int], tuple[dict[str, Any], float] | None]) -> None:
        self._report = report
        self._events: list[tuple[float, int, Any, Callable[[], None]]] = []
        self._live_actors_to_ray_actors_resources: dict[Any, tuple[Any, Any]] = {}
        self._pending: set[Any] = set()
        self._numbers = itertools.count()
        self._trial: dict[Any, str] = {}
        self._done: dict[str, int] = {}
        self.events, self.busy = 0, 0.0
        self.now, self._since = 0.0, time.process_time()

    # ---- interface for the controller -------------------------------------------------------------------------

    @property
    def num_live_actors(self) -> int:
        return len(self._live_actors_to_ray_actors_resources)

    @property
    def num_pending_actors(self) -> int:
        return len(self._pending)

    @property
    def num_total_actors(self) -> int:
        return self.num_live_actors + self.num_pending_actors

    @property
    def num_actor_tasks(self) -> int:
        return len(self._events)

    def get_live_actors_resources(self) -> dict[str, float]:
        return {}

    def is_actor_started(self, tracked_actor: Any) -> bool:
        return tracked_actor in self._live_actors_to_ray_actors_resources

    def is_actor_failed(self, tracked_actor: Any) -> bool:
        return False

    def add_actor(
        self, cls: Any, kwargs: dict, resource_request: Any, on_start: Any, on_stop: Any, on_error: Any
    ) -> Any:
        from ray.air.execution._internal.tracked_actor import TrackedActor

        actor = TrackedActor(next(self._numbers), on_start=on_start, on_stop=on_stop, on_error=on_error)
        self._pending.add(actor)
        self._trial[actor] = _trial_of(kwargs["config"])

        def start() -> None:
            self._pending.discard(actor)
            self._live_actors_to_ray_actors_resources[actor] = (_Handle(), None)
            on_start(actor)

        self._later(START_SECONDS, actor, start)
        return actor

    def remove_actor(self, tracked_actor: Any, kill: bool = False, stop_future: Any = None) -> bool:
        self.clear_actor_task_futures(tracked_actor)
        self._pending.discard(tracked_actor)
        was = self._live_actors_to_ray_actors_resources.pop(tracked_actor, None) is not None
        if was and tracked_actor._on_stop is not None:
            self._later(0.0, None, lambda: tracked_actor._on_stop and tracked_actor._on_stop(tracked_actor))
        return was

    def clear_actor_task_futures(self, tracked_actor: Any) -> None:
        self._events = [event for event in self._events if event[2] is not tracked_actor]
        heapq.heapify(self._events)

    def schedule_actor_task(
        self, tracked_actor: Any, method_name: str, args: tuple = (), kwargs: dict | None = None, on_result: Any = None,
        on_error: Any = None, _return_future: bool = False,
    ) -> Any:  # fmt: skip
        from ray.train._internal.session import _TrainingResult

        seconds, answer = 0.0, None
        if method_name == "train":
            answer, seconds = self._trained(self._trial[tracked_actor])
            self.busy += seconds
        elif method_name == "save":
            seconds, answer = SAVE_SECONDS, _TrainingResult(checkpoint=None, metrics={})
        elif method_name == "reset":
            self._trial[tracked_actor] = _trial_of(args[0])
            seconds, answer = RESET_SECONDS, True
        if on_result is not None:
            self._later(seconds, tracked_actor, lambda: on_result(tracked_actor, answer))
        return object() if _return_future else None

    def next(self, timeout: float = 0.0) -> bool:
        """The next event; the driver's time since the last one has gone by on the virtual clock."""
        self.now += time.process_time() - self._since
        happened = bool(self._events)
        if happened:
            due, _, _, action = heapq.heappop(self._events)
            self.now = max(self.now, due)
            self._since = time.process_time()
            self.events += 1
            action()
        else:
            self._since = time.process_time()
        return happened

    def cleanup(self) -> None:
        self._events.clear()

    # ---- inside -----------------------------------------------------------------------------------------------

    def _later(self, seconds: float, actor: Any, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), actor, action))

    def _trained(self, trial_id: str) -> tuple[dict[str, Any], float]:
        from ray.tune.result import RESULT_DUPLICATE

        rung = self._done.get(trial_id, 0)
        report = self._report(trial_id, rung)
        if report is None:
            return {RESULT_DUPLICATE: True, "done": True}, 0.0
        self._done[trial_id] = rung + 1
        result, seconds = report
        clock = {"training_iteration": rung + 1, "time_this_iter_s": seconds, "time_total_s": seconds, "done": False}
        return {**result, **clock, "timestamp": int(self.now)}, seconds


def _trial_of(config: dict[str, Any]) -> str:
    from ray.tune.result import TRIAL_INFO

    return str(config[TRIAL_INFO].trial_id)


class _Handle:
    """An actor's handle. Tune requests from each started one the fields that a trial without result needs."""

    @property
    def get_auto_filled_metrics(self) -> _Handle:
        return self

    def remote(self, **_: Any) -> dict[str, Any]:
        return {}


class Classes:
    def get(self, trainable: Any) -> Any:
        return trainable


class Unlimited:
    """A resource manager that is never called: `VirtualActors` has no resources, slots limit the trials."""
