"""MLflow; only this file, `registry.py`, `logged_model.py` and `errors.py` know of it. The driver is the single writer.

One parent run a search, one child a trial (by the tag `mlflow.parentRunId`), one level; `orchestrator.tracking.sync`
keeps them up to date. Metrics are series over training steps; plans, pictures and reports are artifacts; checkpoints
are recorded by place and SHA-256.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.base.messages import reason
from orchestrator.storage.records import COPY, DONE, ENDED, FAILED, KILLED, RUNNING, STOPPED, WAITING
from orchestrator.tracking import view
from orchestrator.tracking.errors import TrackingError, is_away, redact
from orchestrator.tracking.registry import Registry

ERROR_LENGTH = 4000
PARAM_LENGTH = 500
STATUS = {DONE: "FINISHED", STOPPED: "FINISHED", COPY: "FINISHED", FAILED: "FAILED", KILLED: "KILLED"}
STATUS |= {RUNNING: "RUNNING", WAITING: "RUNNING"}
KIND = "mlflow.experimentKind"
"""Tag of an experiment by which MLflow's page opens it on its runs; without it, it asks, or opens it on traces."""
TRAINING = "custom_model_development"
ABOUT = "Searches of Headfold: a run a search, with a child for each trial and each promotion. Trainings: a run each."


@dataclass(frozen=True)
class Dataset:
    """A text that a run has used: what for (`context`: train, eval or calibration), its `source`, the `digest` of its
    tokens, how many `tokens` and how many in a `sequence_length`."""

    context: str
    source: str
    digest: str
    tokens: int
    sequence_length: int


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


class Tracker(Registry):
    """Writes the runs of one experiment. `open` is for the driver alone: several processes at first use corrupt a new
    sqlite store for good."""

    def __init__(self, uri: str, experiment_id: str, client: Any = None) -> None:
        self.uri, self.experiment_id = uri, experiment_id
        self.client: Any = client or open_client(uri)

    @classmethod
    def open(cls, uri: str | None, experiment: str, storage: str | Path) -> Tracker:
        """Connect, and create the experiment if it is new. Raises TrackingError if the store cannot be reached."""
        address = uri or default_uri(storage)
        try:
            client = open_client(address)
            known = client.get_experiment_by_name(experiment)
            if known is None:
                location = None if uri else (Path(storage).absolute() / "mlartifacts").as_uri()
                about = {KIND: TRAINING, "mlflow.note.content": ABOUT}
                identity = client.create_experiment(experiment, artifact_location=location, tags=about)
            else:
                identity = known.experiment_id
                if known.lifecycle_stage == "deleted":
                    client.restore_experiment(identity)
                if KIND not in known.tags:  # of an earlier version; what somebody has chosen stays
                    client.set_experiment_tag(identity, KIND, TRAINING)
        except Exception as error:
            raise TrackingError(
                f"tracking.uri: cannot use the MLflow store at {redact(address)}: {reason(error, redact)}; leave it "
                "out for a sqlite store in the storage folder"
            ) from None
        return cls(address, identity, client)

    def share_view(self, parent: str) -> str:
        """Keep a view of the search whose run is `parent`, and return what the address of MLflow's page ends with to
        show it. Raises TrackingError if the store cannot be written."""
        try:
            self.client.set_experiment_tag(self.experiment_id, view.tag_of(parent), view.view_of(parent))
        except Exception as error:
            raise TrackingError(
                f"cannot write to the MLflow store at {redact(self.uri)}: {reason(error, redact)}"
            ) from None
        return f"/#/experiments/{self.experiment_id}/runs?{view.link_of(parent)}"

    def start(
        self,
        name: str,
        *,
        parent: str | None = None,
        tags: Mapping[str, Any] | None = None,
        at: float | None = None,
    ) -> str:
        """Start a run and return its id. `parent` makes it a child of that run; `at`: when, in s since 1970 (now)."""
        labels = {key: str(value) for key, value in (tags or {}).items()}
        if parent:
            labels["mlflow.parentRunId"] = parent
        when = None if at is None else int(1000 * at)
        return self.client.create_run(self.experiment_id, start_time=when, run_name=name, tags=labels).info.run_id

    def params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Log parameters; sections are flattened to dotted keys. None is left out."""
        from mlflow.entities import Param

        flat = [Param(k, redact(str(v))[:PARAM_LENGTH]) for k, v in flatten(params).items() if v is not None]
        for start in range(0, len(flat), 100):
            self.client.log_batch(run_id, params=flat[start : start + 100])

    def log(self, run_id: str, point: Mapping[str, Any]) -> None:
        """Log the numbers among the values of a point at its `step` and `time` (in s since 1970; without: now). A
        store takes equal points once."""
        from mlflow.entities import Metric

        when = int(1000 * (point.get("time") or time.time()))
        metrics = [
            Metric(key, float(value), when, int(point["step"]))
            for key, value in point.items()
            if key not in ("step", "time") and isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if metrics:
            self.client.log_batch(run_id, metrics=metrics)

    def datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None:
        """Log the texts that a run has used; a store takes equal ones once."""
        from mlflow.entities import Dataset as Entity
        from mlflow.entities import DatasetInput, InputTag

        inputs = []
        for text in datasets:
            profile = json.dumps({"num_tokens": text.tokens, "sequence_length": text.sequence_length})
            source = json.dumps({"uri": redact(text.source)})
            entity = Entity(f"{text.context}: {_last_part(text.source)}", text.digest, "text", source, profile=profile)
            inputs.append(DatasetInput(entity, [InputTag("mlflow.data.context", text.context)]))
        self.client.log_inputs(run_id, datasets=inputs)

    def tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        for key, value in tags.items():
            self.client.set_tag(run_id, key, redact(str(value))[:ERROR_LENGTH])

    def text(self, run_id: str, text: str, file: str) -> None:
        self.client.log_text(run_id, redact(text), file)

    def file(self, run_id: str, path: str | Path) -> None:
        self.client.log_artifact(run_id, str(path))

    def set_status(self, run_id: str, status: str, at: float | None = None) -> None:
        """Of a run, by one of the states of `orchestrator.storage.records`; one that goes on is no longer ended. `at`:
        when it ended, in s since 1970 (now)."""
        if status in ENDED:
            self.client.set_terminated(run_id, STATUS[status], None if at is None else int(1000 * at))
        else:
            self.client.update_run(run_id, STATUS[status])

    def children(self, run_id: str) -> list[Any]:
        """The child runs of a run."""
        return self._all(f"tags.`mlflow.parentRunId` = '{run_id}'")

    def search_run(self, run_id: str | None, tags: Mapping[str, str]) -> Any:
        """The run of a search, or of a training: that with an id, or else with these tags; None if there is none."""
        from mlflow.exceptions import MlflowException

        try:
            if run_id is not None:
                return self.client.get_run(run_id)
        except MlflowException as error:
            if is_away(error):
                raise
        # Compared here: the store's own filter has no way to write a folder with a quote in its name
        runs = self._all(f"tags.`headfold.kind` = '{tags['headfold.kind']}'")
        return next((run for run in runs if tags.items() <= run.data.tags.items()), None)

    def _all(self, which: str) -> list[Any]:
        runs, token = [], None
        while True:
            page = self.client.search_runs([self.experiment_id], which, max_results=1000, page_token=token)
            runs += page
            if not (token := page.token):
                return runs


def _last_part(source: str) -> str:
    """What a text is called: `stdlib`, or the last part of a path."""
    return redact(source).rstrip("/").rpartition("/")[2]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
