"""MLflow's registry: promoted checkpoints as versions of a model, with aliases."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from attention.base.environment import environment_variable
from attention.base.messages import reason
from orchestrator.tracking.errors import TrackingError, is_away, redact
from orchestrator.tracking.logged_model import MLMODEL

_DESCRIPTION = (
    "Checkpoints whose KV cache Headfold has made smaller, promoted by its searches. The alias "
    "kv25 is the best that keeps 25 % of the cache, kv25-2 the second best; tags of a version say "
    "which search, recipe and trial made it."
)
_RETRY_PAUSES = (2.0, 8.0)
"""Seconds before a registration is tried again that had no answer."""


def single_attempts() -> contextlib.AbstractContextManager[None]:
    """Let MLflow's client send the requests of the body once.

    It repeats requests that had no answer, and one that creates something may have been carried
    out: only who looks for the result first may repeat it.
    """
    return environment_variable("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


class Registry:
    """The registry of the store at `uri`, which has the runs of an experiment too."""

    uri: str
    experiment_id: str
    client: Any

    def register(
        self,
        name: str,
        folder: str | Path,
        run_id: str,
        *,
        tags: Mapping[str, Any],
        description: str,
    ) -> str:
        """Register a checkpoint as a version of the model `name`, once for each run.

        Returns:
            The version.

        Raises:
            TrackingError: If the store refuses.
        """
        labels = {key: str(value) for key, value in tags.items()} | {"folder": str(folder)}
        with self._requests(name):
            for pause in _RETRY_PAUSES:
                try:
                    return self._register(name, Path(folder), run_id, labels, description)
                except Exception as error:
                    if not is_away(error):
                        raise
                    time.sleep(pause)
            return self._register(name, Path(folder), run_id, labels, description)

    def _register(
        self, name: str, folder: Path, run_id: str, tags: dict[str, str], description: str
    ) -> str:
        """Return the version of a run; what an attempt before has made of it is not made again."""
        from mlflow.exceptions import MlflowException

        if not self.client.search_registered_models(f"name = '{name}'"):
            try:
                with single_attempts():
                    self.client.create_registered_model(name, description=_DESCRIPTION)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another driver's
                    raise
        versions = self.client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
        for registered in versions:
            if registered.tags.get("folder") == str(folder):
                return str(registered.version)
        on_server = self.uri.startswith(("http://", "https://"))
        model = None
        source = str(folder)
        if (folder / MLMODEL).is_file():
            model, source = self._logged_model(name, folder, run_id, tags, on_server)
        elif on_server:  # which takes no bare local folder
            self.client.log_artifacts(run_id, str(folder), "model")
            source = f"{self.client.get_run(run_id).info.artifact_uri}/model"
        with single_attempts():
            created = self.client.create_model_version(
                name,
                source,
                run_id=run_id,
                tags=tags,
                description=description,
                model_id=model and model.model_id,
            )
        if model is not None:
            tag = json.dumps([{"name": name, "version": created.version}])
            self.client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": tag})
        return str(created.version)

    def _logged_model(
        self, name: str, folder: Path, run_id: str, tags: dict[str, str], upload: bool
    ) -> tuple[Any, str]:
        """Return the logged model of a run, made once, and the address of a version of it.

        Its weights are uploaded to a server. A store on this machine has links to them, and a
        folder to write notes to that is not the checkpoint.
        """
        from mlflow.entities import LoggedModelOutput

        logged = self.client.search_logged_models(
            [self.experiment_id], f"source_run_id = '{run_id}'"
        )
        model = next((entry for entry in logged if entry.tags.get("folder") == str(folder)), None)
        if model is None:
            with single_attempts():
                model = self.client.create_logged_model(
                    self.experiment_id,
                    re.sub(r"[/:.%\"']", "-", name),
                    source_run_id=run_id,
                    tags=tags,
                    model_type="transformers",
                )
        source = model.artifact_location
        if upload:
            self.client.log_model_artifacts(model.model_id, str(folder))
        elif urlparse(source).scheme in ("", "file"):
            source = str(_link_files(folder, Path(url2pathname(urlparse(source).path))))
        else:
            source = str(folder)
        outputs = self.client.get_run(run_id).outputs.model_outputs
        if model.model_id not in {output.model_id for output in outputs}:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        self.client.finalize_logged_model(model.model_id, "READY")
        return model, source

    def version_tags(self, name: str, version: str) -> Mapping[str, str] | None:
        """Return the tags of a version; None if there is no such version.

        Raises:
            TrackingError: If the store refuses.
        """
        from mlflow.exceptions import MlflowException

        with self._requests(name):
            try:
                return self.client.get_model_version(name, version).tags
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None

    def alias_version(self, name: str, alias: str) -> str | None:
        """Return the version that an alias points to; None if it points nowhere.

        Raises:
            TrackingError: If the store refuses.
        """
        with self._requests(name):
            version = self.client.get_registered_model(name).aliases.get(alias)
        return None if version is None else str(version)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Let an alias point to a version, in one step: the alias exists at any time.

        Raises:
            TrackingError: If the store refuses.
        """
        with self._requests(name):
            self.client.set_registered_model_alias(name, alias, version)

    @contextlib.contextmanager
    def _requests(self, name: str) -> Iterator[None]:
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:  # MLflow's, or of the client of a store of artifacts
            raise TrackingError(
                f"the registry at {redact(self.uri)} refused {name}: {reason(error, redact)}"
            ) from None


def _link_files(folder: Path, target: Path) -> Path:
    """Fill `target` with hard links: MLflow does not follow symbolic links out of the folder.

    Returns:
        `target`; `folder` itself on another file system, or on one without links.
    """
    try:
        for file in (path for path in folder.rglob("*") if path.is_file()):
            link = target / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.hardlink_to(file)
    except OSError:
        return folder
    return target
