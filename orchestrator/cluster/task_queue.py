"""Calls that actors take from a queue, as many actors as the cluster has room for.

No call waits for another one; the caller determines their order. One actor can make all of them,
and more actors finish sooner. So a queue needs no more accelerators at once than one actor has,
even if others use the rest and nodes are lost meanwhile.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from orchestrator.cluster.ray_internals import delete_value, put_value

_FAILURES = 3
"""Number of actors that may be lost at one call, or in a row before they take any."""


@dataclass(frozen=True)
class QueuedCall:
    """A call that waits, or runs.

    Attributes:
        key: Identifies the call for the caller.
        method: Method of the actor.
        arguments: References among them are resolved where the call runs.
        results: Number of values that it returns after the first.
    """

    key: Hashable
    method: str
    arguments: tuple[Any, ...]
    results: int


@dataclass(frozen=True)
class FinishedCall:
    """A finished call.

    Attributes:
        key: Identifies the call for the caller.
        value: The first value that it returned.
        results: References to the other values.
        lost: Whether its actor, or something that it reads, was lost: the call was not made.
    """

    key: Any
    value: Any = None
    results: Sequence[Any] = ()
    lost: bool = False


class TaskQueue:
    """Actors, and the calls that they take; a context manager that ends the actors.

    The first value that a method returns is fetched when it is done, and should be small; other
    values stay where they are, and other calls take references to them.

    Args:
        worker: The class of the actors.
        arguments: Arguments of its constructor.
        options: Of the actors, as `ray.remote` takes them.
        most: Largest number of actors. Those without room are not waited for.
        label: Label under which progress is published.
    """

    def __init__(
        self,
        worker: type,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        most: int,
        label: str,
    ) -> None:
        self._actor: Any = ray.remote(worker).options(max_restarts=0, **options)
        self._arguments = arguments
        self._waiting: deque[QueuedCall] = deque()
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[QueuedCall, Any, list[Any]]] = {}
        self._failures: Counter[Hashable] = Counter()
        self._label = label
        self._progress = uuid.uuid4().hex
        self._done = 0
        for _ in range(most):
            self._start()

    def __enter__(self) -> TaskQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        running = [actor for _, actor, _ in self._running.values()]
        for actor in (*self._starting.values(), *self._idle, *running):
            ray.kill(actor)
        delete_value(self._progress)

    def _start(self) -> None:
        actor = self._actor.remote(*self._arguments)
        self._starting[actor.__ray_ready__.remote()] = actor

    def put(
        self, key: Hashable, method: str, *arguments: Any, results: int = 0, first: bool = False
    ) -> None:
        """Queue a call; `first` before all others."""
        call = QueuedCall(key, method, arguments, results)
        (self._waiting.appendleft if first else self._waiting.append)(call)

    def next(self) -> FinishedCall:
        """Wait until a call is finished.

        Raises:
            RayActorError: If actors are lost again and again.
            Exception: What a call raised.
        """
        while True:
            while self._waiting and self._idle:
                self._run(self._waiting.popleft(), self._idle.pop())
            both = [*self._running, *self._starting]
            # Not fetched: results stay where they are until a call reads them
            (reference,), _ = ray.wait(both, num_returns=1, fetch_local=False)
            if reference in self._starting:
                self._take_in(reference)
            else:
                return self._take(reference)

    def _run(self, call: QueuedCall, actor: Any) -> None:
        method = getattr(actor, call.method).options(num_returns=1 + call.results)
        done, *results = _as_list(method.remote(*call.arguments))
        self._running[done] = call, actor, results

    def _take_in(self, reference: Any) -> None:
        """Note that an actor has started, or could not."""
        actor = self._starting.pop(reference)
        try:
            ray.get(reference)
        except RayActorError as error:
            self._replace(None, error)
        else:
            self._failures[None] = 0
            self._idle.append(actor)

    def _take(self, reference: Any) -> FinishedCall:
        call, actor, results = self._running.pop(reference)
        try:
            value = ray.get(reference)
        except RayActorError as error:
            self._replace(call.key, error)
            return FinishedCall(call.key, lost=True)
        except ObjectLostError as error:
            self._idle.append(actor)
            self._count(call.key, error)
            return FinishedCall(call.key, lost=True)
        except RayTaskError as error:
            self._idle.append(actor)
            raise error.cause from None  # without Ray's trace around what a user can mend
        self._idle.append(actor)
        self._done += 1
        put_value(self._progress, f"{self._label}: {self._done} calls made")
        return FinishedCall(call.key, value, results)

    def _replace(self, key: Hashable, error: Exception) -> None:
        self._count(key, error)
        self._start()

    def _count(self, key: Hashable, error: Exception) -> None:
        self._failures[key] += 1
        if self._failures[key] > _FAILURES:
            raise error


def _as_list(references: Any) -> list[Any]:
    """Return what a call returns as a list: Ray gives one reference bare."""
    return references if isinstance(references, list) else [references]
