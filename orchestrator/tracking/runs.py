"""MLflow, and the only file that knows of it. The driver is the single writer.

One parent run a search, one child a trial (by the tag `mlflow.parentRunId`), one level. Metrics are series over
training steps; plans, pictures and reports are artifacts; checkpoints are recorded by place and SHA-256.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.messages import reason
from orchestrator.storage.records import COPY, DONE, FAILED, KILLED, RUNNING, STOPPED

ERROR_LENGTH = 4000
PARAM_LENGTH = 500
STATUS = {
    DONE: "FINISHED",
    STOPPED: "FINISHED",
    COPY: "FINISHED",
    FAILED: "FAILED",
    KILLED: "KILLED",
    RUNNING: "RUNNING",
}
REFUSED = (
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "BAD_REQUEST",
    "INVALID_STATE",
)
"""Answers of a store that another try would get again."""
SECRETS = "token|key|secret|passw|sig|credential|auth"
_WHOLE: dict[str, str] = {}
"""The whole address of a redacted one, for what Tune pickles and reads again in this process. Not the environment: what
the driver starts inherits that, and a second search of the process would write into the store of the first."""
METRICS = ("loss", "rise", "kl", "train_loss", "tokens", "tokens_per_second", "seconds")


class TrackingError(ValueError):
    """A tracking store that cannot be used. The message names its address (without credentials) and the remedy."""


def redact(text: str) -> str:
    """Hide the user information of every URI in a text, and the values of parameters that are named like a secret."""
    hidden = re.sub(r"(?<=://)[^/\s]+@", "***@", text)
    return re.sub(rf"([?&;][\w.-]*(?:{SECRETS})[\w.-]*=)[^&;\s'\"]+", r"\1***", hidden, flags=re.IGNORECASE)


def default_uri(storage: str | Path) -> str:
    return f"sqlite:///{Path(storage).absolute() / 'mlflow.db'}"


def open_client(uri: str) -> Any:
    """MLflow's client of a store; nothing is asked of the store yet."""
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # which may hold a secret
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # an address that nobody serves must fail in seconds
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


class Tracker:
    """Writes the runs of one experiment.

    `open` creates database and experiment once, in the driver: several processes at first use corrupt a new sqlite
    store for good.
    """

    def __init__(self, uri: str, experiment_id: str) -> None:
        self.uri, self.experiment_id = uri, experiment_id
        self._opened: Any = None
        _WHOLE[redact(uri)] = uri

    @classmethod
    def open(cls, uri: str | None, experiment: str, storage: str | Path) -> Tracker:
        """Connect, and create the experiment if it is new. Raises TrackingError if the store cannot be reached."""
        address = uri or default_uri(storage)
        try:
            client = open_client(address)
            found = client.get_experiment_by_name(experiment)
            if found is not None and found.lifecycle_stage == "deleted":
                client.restore_experiment(found.experiment_id)
            if found is None:
                location = None if uri else (Path(storage).absolute() / "mlartifacts").as_uri()
                identity = client.create_experiment(experiment, artifact_location=location)
            else:
                identity = found.experiment_id
        except Exception as error:
            raise TrackingError(
                f"tracking.uri: cannot use the MLflow store at {redact(address)}: "
                f"{reason(error, redact)}; leave it out for a "
                "sqlite store in the storage folder"
            ) from None
        return cls(address, identity)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks into the search folder: no password goes there."""
        return self.__dict__ | {"uri": redact(self.uri), "_opened": None}

    @property
    def client(self) -> Any:
        """MLflow's client; unpickled in the driver, it takes the whole address from where it was first made."""
        if self._opened is None:
            self.uri = _WHOLE.get(self.uri, self.uri)
            self._opened = open_client(self.uri)
        return self._opened

    @property
    def address(self) -> str:
        return redact(self.uri)

    # ---- runs -------------------------------------------------------------------------------------------------

    def start(self, name: str, *, parent: str | None = None, tags: Mapping[str, Any] | None = None) -> str:
        """Start a run and return its id. `parent` makes it a child of that run."""
        labels = {key: str(value) for key, value in (tags or {}).items()}
        if parent:
            labels["mlflow.parentRunId"] = parent
        return self.client.create_run(self.experiment_id, run_name=name, tags=labels).info.run_id

    def params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Log parameters; sections are flattened to dotted keys. None is left out."""
        from mlflow.entities import Param

        flat = [Param(k, redact(str(v))[:PARAM_LENGTH]) for k, v in flatten(params).items() if v is not None]
        for start in range(0, len(flat), 100):
            self.client.log_batch(run_id, params=flat[start : start + 100])

    def metrics(self, run_id: str, values: Mapping[str, Any], step: int = 0) -> None:
        """Log the numbers among `values` as one point of their series."""
        self.series(run_id, [{**values, "step": step}])

    def series(self, run_id: str, points: Sequence[Mapping[str, Any]], at: int | None = None) -> None:
        """Log the numbers of many points at once, each at its own `step`; `at`: when, in ms since 1970 (None: now)."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000) if at is None else at
        found = [
            Metric(key, float(value), now, int(point["step"]))
            for point in points
            for key, value in point.items()
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        for start in range(0, len(found), 1000):  # a store takes no more at a time
            self.client.log_batch(run_id, metrics=found[start : start + 1000])

    def tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        for key, value in tags.items():
            self.client.set_tag(run_id, key, redact(str(value))[:ERROR_LENGTH])

    def text(self, run_id: str, text: str, file: str) -> None:
        self.client.log_text(run_id, redact(text), file)

    def file(self, run_id: str, path: str | Path, folder: str | None = None) -> None:
        self.client.log_artifact(run_id, str(path), folder)

    def end(self, run_id: str, status: str) -> None:
        """End a run with one of the states of `orchestrator.storage.records`."""
        self.client.set_terminated(run_id, STATUS[status])

    def resume(self, run_id: str) -> None:
        self.client.update_run(run_id, status="RUNNING")

    def children(self, run_id: str) -> list[Any]:
        """The child runs of a run."""
        found = self.client.search_runs(
            [self.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'", max_results=1000
        )
        return list(found)

    def find(self, parent: str, tags: Mapping[str, str]) -> str | None:
        """The child run of `parent` with these tags, if there is one: a step that was cut off takes it up again."""
        wanted = " and ".join(f"tags.`{k}` = '{v}'" for k, v in {"mlflow.parentRunId": parent, **tags}.items())
        found = self.client.search_runs([self.experiment_id], wanted, max_results=1)
        return found[0].info.run_id if found else None

    def logged_steps(self, run_id: str, key: str) -> set[int]:
        """The steps at which a run has a value of the metric `key`."""
        return {int(point.step) for point in self.client.get_metric_history(run_id, key)}

    # ---- registry ---------------------------------------------------------------------------------------------

    def register(self, name: str, folder: str | Path, run_id: str, *, tags: Mapping[str, Any], description: str) -> str:
        """Register a checkpoint folder as a version of the model `name`, with its tags. Returns the version.

        A folder that the run has already registered is not registered twice. Raises TrackingError if the store refuses:
        a server takes object-store addresses or run artifacts, never a bare local folder.
        """
        with self._registry(name):
            if not self.client.search_registered_models(f"name = '{name}'"):
                self.client.create_registered_model(name)
            return self._version(name, str(folder), run_id, tags, description)

    def holder(self, name: str, alias: str) -> str | None:
        """The version that an alias points to; None if it points nowhere. Raises TrackingError."""
        with self._registry(name):
            found = self.client.get_registered_model(name).aliases.get(alias)
        return None if found is None else str(found)

    def point(self, name: str, alias: str, version: str) -> None:
        """Let an alias point to a version, in one step: there is no moment without it. Raises TrackingError."""
        with self._registry(name):
            self.client.set_registered_model_alias(name, alias, version)

    @contextlib.contextmanager
    def _registry(self, name: str) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise TrackingError(f"the registry at {self.address} refused {name}: {reason(error, redact)}") from None

    def _version(self, name: str, folder: str, run_id: str, tags: Mapping[str, Any], description: str) -> str:
        for known in self.client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'"):
            if known.tags.get("folder") == folder:
                return str(known.version)
        labels = {key: str(value) for key, value in tags.items()} | {"folder": folder}
        source = folder
        if self.uri.startswith(("http://", "https://")):
            self.client.log_artifacts(run_id, folder, "model")
            source = f"{self.client.get_run(run_id).info.artifact_uri}/model"
        made = self.client.create_model_version(name, source, run_id=run_id, tags=labels, description=description)
        return str(made.version)


def is_away(error: Exception) -> bool:
    """Whether a store could not be reached or could not work, as against having refused."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in REFUSED
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in (
        "requests",
        "urllib3",
        "sqlalchemy",
    )


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
