"""MLflow's own library, pointed at a store for a while: its address is one of the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlflow


@contextmanager
def mlflow_at(uri: str) -> Iterator[None]:
    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])
