"""The runs of an experiment in MLflow. The driver is the single writer.

One parent run per search, one child run per trial (by the tag `mlflow.parentRunId`), one level;
`orchestrator.tracking.sync` keeps them up to date. Metrics are series over training steps; plans,
pictures and reports are artifacts; checkpoints are recorded by folder and SHA-256. Only this file,
`registry.py`, `logged_model.py` and `errors.py` import mlflow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from attention.base.messages import reason
from attention.io.file_lock import file_lock
from orchestrator.storage.records import (
    COPY,
    DONE,
    ENDED,
    FAILED,
    KILLED,
    RUNNING,
    STOPPED,
    WAITING,
)
from orchestrator.tracking.errors import TrackingError, is_away, redact
from orchestrator.tracking.metrics import is_number
from orchestrator.tracking.registry import Registry, single_attempts

_TAG_LENGTH = 4000
_PARAM_LENGTH = 500
_METRICS_AT_ONCE = 1000  # of MLflow's REST API
STATUS = {
    DONE: "FINISHED",
    STOPPED: "FINISHED",
    COPY: "FINISHED",
    FAILED: "FAILED",
    KILLED: "KILLED",
    RUNNING: "RUNNING",
    WAITING: "RUNNING",
}
"""MLflow's status by the state of a trial."""
NOTE = "mlflow.note.content"
"""Tag of a run or an experiment with its description, in Markdown."""
KIND = "mlflow.experimentKind"
"""Tag of an experiment by which MLflow's page opens it on its runs, and not on traces."""
TRAINING = "custom_model_development"
REPORT = "report.html"
"""Artifact of the run of a search: its report."""
_REPORTS = "Reports: "
_REPORT_LINKS = 20  # a tag of an experiment has 5,000 characters
_DESCRIPTION = (
    "One run per search; its trials and promotions are child runs. One run per training. Tables "
    "and figures of a search are in the artifact `report.html` of its run; `headfold ui FOLDER` "
    "opens its charts."
)


@dataclass(frozen=True)
class Dataset:
    """A text that a run has used."""

    context: str
    """Its use: train, eval or calibration."""
    source: str
    digest: str
    """Digest of its tokens."""
    tokens: int
    sequence_length: int


def default_uri(storage: str | Path) -> str:
    """Return the address of the store of a storage folder."""
    return f"sqlite:///{Path(storage).absolute() / 'mlflow.db'}"


def _is_database(uri: str) -> bool:
    """Whether a store is a database that this process opens, and no server or folder."""
    from mlflow.store.db.db_types import DATABASE_ENGINES

    return uri.partition(":")[0].partition("+")[0] in DATABASE_ENGINES


def open_client(uri: str) -> Any:
    """Return MLflow's client for a store; no request is sent yet."""
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # it may hold a secret
    # An address without a server must fail in seconds, and one that does not answer in minutes;
    # a busy server with an sqlite store waits up to 20 seconds for the store alone
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow"):  # after the import, which sets the level to INFO
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


class Tracker(Registry):
    """Writes the runs of one experiment.

    `open` is for the driver alone. Drivers that open a new sqlite store at the same time wait for
    each other, since MLflow's migrations do not.
    """

    def __init__(self, uri: str, experiment_id: str, client: Any = None) -> None:
        self.uri = uri
        self.experiment_id = experiment_id
        self.client: Any = client or open_client(uri)

    @classmethod
    def open(cls, uri: str | None, experiment: str, storage: str | Path) -> Tracker:
        """Connect, and create the experiment if it is new.

        Args:
            uri: Address of the store; None for a sqlite store in `storage`.
            experiment: Its name.
            storage: Folder of the storage.

        Raises:
            TrackingError: If the store cannot be reached.
        """
        address = uri or default_uri(storage)
        try:
            with _opening(address):
                client = open_client(address)
                artifacts = None
                if _is_database(address):  # else MLflow puts them into the present folder
                    artifacts = (Path(storage).absolute() / "mlartifacts").as_uri()
                experiment_id = _experiment(client, experiment, artifacts)
        except Exception as error:
            raise TrackingError(
                f"tracking.uri: cannot use the MLflow store at {redact(address)}: "
                f"{reason(error, redact)}; leave it out for a sqlite store in the storage folder"
            ) from None
        return cls(address, experiment_id, client)

    def start(
        self,
        name: str,
        *,
        parent: str | None = None,
        tags: Mapping[str, Any] | None = None,
        at: float | None = None,
    ) -> str:
        """Start a run and return its id.

        Args:
            name: Its displayed name.
            parent: The run that it is a child of.
            tags: Its tags.
            at: When it started, in seconds since 1970 (default: now).
        """
        labels = {key: str(value) for key, value in (tags or {}).items()}
        if parent:
            labels["mlflow.parentRunId"] = parent
        with single_attempts():
            run = self.client.create_run(
                self.experiment_id, start_time=_milliseconds(at), run_name=name, tags=labels
            )
        return run.info.run_id

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Log parameters; sections are flattened to dotted keys. None is left out."""
        from mlflow.entities import Param

        flat = [
            Param(key, redact(str(value))[:_PARAM_LENGTH])
            for key, value in _flatten(params).items()
            if value is not None
        ]
        for start in range(0, len(flat), 100):
            self.client.log_batch(run_id, params=flat[start : start + 100])

    def log_point(self, run_id: str, point: Mapping[str, Any]) -> None:
        """Log the numbers of a point at its `step` and `time`; a store takes equal points once.

        The time is in seconds since 1970, now where the point has none.
        """
        self.log_points(run_id, [point])

    def log_points(self, run_id: str, points: Iterable[Mapping[str, Any]]) -> None:
        """Log several points, as few requests as the store takes them in."""
        from mlflow.entities import Metric

        metrics = [
            Metric(
                key,
                float(value),
                int(1000 * (point.get("time") or time.time())),
                int(point["step"]),
            )
            for point in points
            for key, value in point.items()
            if key not in ("step", "time") and is_number(value)
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self.client.log_batch(run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def log_datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None:
        """Log the texts that a run has used; a store keeps equal ones once."""
        from mlflow.entities import Dataset as DatasetEntity
        from mlflow.entities import DatasetInput, InputTag

        inputs = []
        for text in datasets:
            source = redact(text.source)
            profile = {"num_tokens": text.tokens, "sequence_length": text.sequence_length}
            entity = DatasetEntity(
                f"{text.context}: {source.rstrip('/').rpartition('/')[2]}",
                text.digest,
                "text",
                json.dumps({"uri": source}),
                profile=json.dumps(profile),
            )
            tag = InputTag("mlflow.data.context", text.context)
            inputs.append(DatasetInput(entity, [tag]))
        self.client.log_inputs(run_id, datasets=inputs)

    def set_tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Set tags of a run, without secrets."""
        for key, value in tags.items():
            self.client.set_tag(run_id, key, redact(str(value))[:_TAG_LENGTH])

    def log_text(self, run_id: str, text: str, file: str) -> None:
        """Log a text, without secrets, as an artifact."""
        self.client.log_text(run_id, redact(text), file)

    def log_file(self, run_id: str, path: str | Path) -> None:
        """Log a file as an artifact."""
        self.client.log_artifact(run_id, str(path))

    def link_report(self, run_id: str, name: str) -> None:
        """Link the report of a search in the first line of the experiment's description.

        Args:
            run_id: The run of the search.
            name: Text of the link.
        """
        note = self.client.get_experiment(self.experiment_id).tags.get(NOTE, "")
        line, _, rest = note.partition("\n\n")
        links = re.findall(r"\[.*?\]\(.*?\)", line) if line.startswith(_REPORTS) else []
        target = f"#/experiments/{self.experiment_id}/runs/{run_id}/artifacts/{REPORT}"
        if any(link.endswith(f"({target})") for link in links):
            return
        links = [f"[{name}]({target})", *links][:_REPORT_LINKS]
        text = f"{_REPORTS}{', '.join(links)}\n\n{rest if len(links) > 1 else note}"
        self.client.set_experiment_tag(self.experiment_id, NOTE, text)

    def set_status(self, run_id: str, status: str, at: float | None = None) -> None:
        """Set the status of a run; a continued run is no longer marked as finished.

        Args:
            run_id: The run.
            status: A state of `orchestrator.storage.records`.
            at: When it ended, in seconds since 1970 (default: now).
        """
        if status in ENDED:
            self.client.set_terminated(run_id, STATUS[status], _milliseconds(at))
        else:
            self.client.update_run(run_id, STATUS[status])

    def children(self, run_id: str) -> list[Any]:
        """Return the child runs of a run."""
        return self._search(f"tags.`mlflow.parentRunId` = '{run_id}'")

    def search_run(self, run_id: str | None, tags: Mapping[str, str]) -> Any:
        """Return the run of a search or of a training; None if there is none.

        Args:
            run_id: Its id, if that is known.
            tags: Tags to find it by otherwise.
        """
        from mlflow.exceptions import MlflowException

        try:
            if run_id is not None:
                return self.client.get_run(run_id)
        except MlflowException as error:
            if is_away(error):
                raise
        # Compared here: the store's filter has no way to write a folder with a quote in its name
        runs = self._search(f"tags.`headfold.kind` = '{tags['headfold.kind']}'")
        return next((run for run in runs if tags.items() <= run.data.tags.items()), None)

    def _search(self, filter_string: str) -> list[Any]:
        runs = []
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id], filter_string, max_results=1000, page_token=token
            )
            runs += page
            if not (token := page.token):
                return runs


def _opening(address: str) -> contextlib.AbstractContextManager[object]:
    """Return the lock for opening a store: a file next to an sqlite database."""
    database = urlparse(address).path.removeprefix("/")
    if not address.startswith("sqlite:///") or not database:
        return contextlib.nullcontext()
    path = Path(database)
    return file_lock(path.with_name(f".{path.name}.opening"))


def _experiment(client: Any, name: str, artifacts: str | None) -> str:
    """Return the id of an experiment, which is created if it is new.

    Args:
        client: MLflow's.
        name: Its name.
        artifacts: Address of its artifacts; None for the store's own.
    """
    from mlflow.exceptions import MlflowException

    existing = client.get_experiment_by_name(name)
    if existing is None:
        tags = {KIND: TRAINING, NOTE: _DESCRIPTION}
        try:
            return client.create_experiment(name, artifact_location=artifacts, tags=tags)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            existing = client.get_experiment_by_name(name)  # another driver's, of this moment
    if existing.lifecycle_stage == "deleted":
        client.restore_experiment(existing.experiment_id)
    if KIND not in existing.tags:  # a user's choice stays
        client.set_experiment_tag(existing.experiment_id, KIND, TRAINING)
    return existing.experiment_id


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(1000 * seconds)


def _flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
