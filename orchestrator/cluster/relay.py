"""Progress of work in other processes of the cluster: each keeps its line in the store of Ray, the driver shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import ray

from attention.base.progress import show_progress
from orchestrator.cluster.ray_internals import store_line, stored_line

EVERY_SECONDS = 2.0


@contextlib.contextmanager
def relayed(key: str, label: str) -> Iterator[None]:
    """While the body runs, keep how far this process is under `key`; `label`: what it does outside of stages."""
    if not ray.is_initialized():
        yield
        return
    try:
        with show_progress(label, partial(store_line, key), EVERY_SECONDS):
            yield
    finally:
        store_line(key, "")


def progress_of(key: str) -> str:
    """The line that a process keeps under `key`; empty without one."""
    return stored_line(key) if ray.is_initialized() else ""
